"""Seams to what feeds an inference engine: TRL's use of vLLM, and vLLM itself."""

from __future__ import annotations

from hf_zeropp.compat.seam import Seam, called, has, reads, sets

# fmt: off
INFERENCE: tuple[Seam, ...] = (
    has("trl.generation.vllm_generation:VLLMGeneration",
        "_iter_named_params model mode accelerator", "rollouts.trl_sync",
        "The weights that TRL hands to vLLM, which ours yields from the secondary shards of the node; the trained model; whether "
        "a server or an engine in this process is fed; and the rank that sends. If it moved: a Trainer with `use_vllm` "
        "raises when it is built.", since=(1, 11)),
    # A method that exists but is not called any more would pass, and ours in its place would never run.
    reads("trl.generation.vllm_generation:VLLMGeneration.sync_weights", "_iter_named_params", "rollouts.trl_sync",
        "It iterates over these weights in both modes. If it moved: TRL gathers each weight over the whole world, "
        "in the dtype of the masters.", silent=True, since=(1, 11)),
    reads("trl.generation.vllm_generation:VLLMGeneration._init_vllm",
        "VLLMClient init_communicator", "rollouts.trl_server",
        "In server mode rank 0 makes a client, and lets it join the server. Ours finds the server's backend then. "
        "If it moved: a server with the backend hf_zeropp gets requests that it refuses.", since=(1, 16)),
    reads("trl.generation.vllm_generation:VLLMGeneration.sync_weights",
        "_weight_metadata update_named_params reset_prefix_cache", "rollouts.trl_server",
        "What it calls of the client in a sync, and names and shapes that it looks for before the first. If it "
        "moved: weights do not reach a server with the backend hf_zeropp, or all are decoded twice before the first "
        "sync.", silent=True, since=(1, 16)),
    called("trl.generation.vllm_client:VLLMClient", "get_server_info init_communicator", "rollouts.trl_server",
        "The client of a server, which joins one that takes updates without NCCL. If it moved: as before 1.16, all servers are "
        "fed over NCCL.", since=(1, 16)),
    sets("trl.generation.vllm_client:VLLMClient", "update_named_params reset_prefix_cache", "rollouts.trl_server",
        "Ours sends versions in place of whole weights, to a server that takes them.", since=(1, 16)),
    sets("trl.generation.vllm_generation:VLLMGeneration", "_weight_metadata", "rollouts.trl_server",
        "Names and shapes, which versions hold themselves.", since=(1, 16)),
    # As above: a method that is not called any more would pass.
    reads("trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer.__init__",
        "_sync_weight", "rollouts.trl_async",
        "The sync of weights that a callback runs. Around it ours publishes, and ranks agree on errors. If it "
        "moved: TRL gathers each weight over the whole world, and an error of rank 0 leaves the other ranks "
        "waiting.", silent=True, since=(1, 16)),
    reads("trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer._sync_weight_merged",
        "_streaming_iter merge_adapter unmerge_adapter", "rollouts.trl_async",
        "It merges adapters and iterates over the weights. Ours yield them merged, and the model stays as it is. If "
        "it moved: TRL gathers each weight over the whole world, or adapters are added to the weights "
        "twice.", silent=True, since=(1, 16)),
    reads("trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer._sync_weight",
        "_lora_sync", "integrations.trainer",
        "Whether adapters alone go to the server. If it moved: a warning says that every weight is gathered over all nodes.",
        since=(1, 16)),
    has("trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer",
        "model accelerator weight_transfer", "rollouts.trl_async",
        "The trained model, and the transfer, which rank 0 alone keeps.", since=(1, 16)),
    # vLLM looks the function up in its module at each call. Only for this reason a replacement is called.
    reads("vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
        "dispatch_cpu_unquantized_gemm", "rollouts.vllm_cpu",
        "It packs the weights of a linear layer on a CPU. Ours leaves them as they are. If it moved: on a CPU the "
        "second sync of weights raises: 'Parameter' object has no attribute 'weight_loader'."),
    reads("vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading",
        "dispatch_cpu_unquantized_gemm", "rollouts.vllm_cpu",
        "The same for the output head, which keeps its weights beside their packed copy. If it moved: on a CPU the "
        "output head computes with the weights of the first sync.", silent=True),
    has("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        "process_weights_after_loading apply", "rollouts.vllm_cpu",
        "They pack the weights of experts on a CPU, and compute with them. Ours packs for each computation. If it "
        "moved: AttributeError when an engine is to be fed on a CPU."),
    reads("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
        "w13_weight w2_weight", "rollouts.vllm_cpu",
        "The weights that it packs, and no others."),
)
# fmt: on
