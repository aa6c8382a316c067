"""Weights for inference engines: in the ranks themselves, on TRL's servers, or elsewhere.

``publish.py`` iterates over full weights from the secondary shards of the node. ``trl_sync.py``, ``trl_server.py`` and
``trl_async.py`` put that under the syncs of TRL's trainers, ``callback.py`` says which of them a Trainer needs.
``versions`` holds weights for servers elsewhere, as the words that changed; ``vllm_transfer.py`` lets vLLM read them.

This package imports the rest of hf_zeropp. Three places lead into it: ``ZeroPPCallback``, once a Trainer feeds an engine,
``hf_zeropp.publish_weights``, when it is first used, and the entry point by which vLLM finds its plugin.
"""
