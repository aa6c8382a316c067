"""Seams to what feeds an inference engine: TRL's use of vLLM, and vLLM itself."""

from __future__ import annotations

from hf_zeropp.compat.seam import ON_USE, Relation, Seam

INFERENCE: tuple[Seam, ...] = (
    Seam(
        owner="trl.generation.vllm_generation:VLLMGeneration",
        names=("_iter_named_params",),
        used_by=("rollouts.trl_sync",),
        why="The weights that TRL hands to vLLM. Ours yields them from the secondary shards of the node.",
        if_moved="A Trainer with `use_vllm` raises when it is built.",
        since=(1, 11),
    ),
    Seam(
        owner="trl.generation.vllm_generation:VLLMGeneration.sync_weights",
        # A method that exists but is not called any more would pass, and ours in its place would never run.
        names=("_iter_named_params",),
        used_by=("rollouts.trl_sync",),
        why="It iterates over these weights in both modes.",
        if_moved="TRL gathers each weight over the whole world, in the dtype of the masters.",
        relation=Relation.READS,
        is_silent=True,
        since=(1, 11),
    ),
    Seam(
        owner="trl.generation.vllm_generation:VLLMGeneration",
        names=("model", "mode", "accelerator"),
        used_by=("rollouts.trl_sync",),
        why="The trained model, whether a server or an engine in this process is fed, and the rank that sends.",
        if_moved=ON_USE,
        since=(1, 11),
    ),
    Seam(
        owner="trl.generation.vllm_generation:VLLMGeneration._init_vllm",
        names=("VLLMClient", "init_communicator"),
        used_by=("rollouts.trl_server",),
        why="In server mode rank 0 makes a client, and lets it join the server. Ours finds the server's backend then.",
        if_moved="A server with the backend hf_zeropp gets requests that it refuses.",
        relation=Relation.READS,
        since=(1, 16),
    ),
    Seam(
        owner="trl.generation.vllm_generation:VLLMGeneration.sync_weights",
        names=("_weight_metadata", "update_named_params", "reset_prefix_cache"),
        used_by=("rollouts.trl_server",),
        why="What it calls of the client in a sync, and names and shapes that it looks for before the first.",
        if_moved="Weights do not reach a server with the backend hf_zeropp, or all are decoded twice before the first sync.",
        relation=Relation.READS,
        is_silent=True,
        since=(1, 16),
    ),
    Seam(
        owner="trl.generation.vllm_client:VLLMClient",
        names=("get_server_info", "init_communicator", "update_named_params", "reset_prefix_cache"),
        used_by=("rollouts.trl_server",),
        why="The client of a server. Ours sends versions in place of whole weights, to a server that takes them.",
        if_moved="As before 1.16, all servers are fed over NCCL.",
        since=(1, 16),
    ),
    Seam(
        owner="trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer.__init__",
        # As above: a method that is not called any more would pass.
        names=("_sync_weight",),
        used_by=("rollouts.trl_async",),
        why="The sync of weights that a callback runs. Around it ours publishes, and ranks agree on errors.",
        if_moved="TRL gathers each weight over the whole world, and an error of rank 0 leaves the other ranks waiting.",
        relation=Relation.READS,
        is_silent=True,
        since=(1, 16),
    ),
    Seam(
        owner="trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer._sync_weight_merged",
        names=("_streaming_iter", "merge_adapter", "unmerge_adapter"),
        used_by=("rollouts.trl_async",),
        why="It merges adapters and iterates over the weights. Ours yield them merged, and the model stays as it is.",
        if_moved="TRL gathers each weight over the whole world, or adapters are added to the weights twice.",
        relation=Relation.READS,
        is_silent=True,
        since=(1, 16),
    ),
    Seam(
        owner="trl.experimental.async_grpo.async_grpo_trainer:AsyncGRPOTrainer",
        names=("model", "accelerator", "weight_transfer"),
        used_by=("rollouts.trl_async",),
        why="The trained model, and the transfer, which rank 0 alone keeps.",
        if_moved=ON_USE,
        since=(1, 16),
    ),
    Seam(
        owner="vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
        # vLLM looks the function up in its module at each call. Only for this reason a replacement is called.
        names=("dispatch_cpu_unquantized_gemm",),
        used_by=("rollouts.vllm_cpu",),
        why="It packs the weights of a linear layer on a CPU. Ours leaves them as they are.",
        if_moved="On a CPU the second sync of weights raises: 'Parameter' object has no attribute 'weight_loader'.",
        relation=Relation.READS,
    ),
    Seam(
        owner="vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading",
        names=("dispatch_cpu_unquantized_gemm",),
        used_by=("rollouts.vllm_cpu",),
        why="The same for the output head, which keeps its weights beside their packed copy.",
        if_moved="On a CPU the output head computes with the weights of the first sync.",
        relation=Relation.READS,
        is_silent=True,
    ),
    Seam(
        owner="vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        names=("process_weights_after_loading", "apply"),
        used_by=("rollouts.vllm_cpu",),
        why="They pack the weights of experts on a CPU, and compute with them. Ours packs for each computation.",
        if_moved="AttributeError when an engine is to be fed on a CPU.",
    ),
    Seam(
        owner="vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
        names=("w13_weight", "w2_weight"),
        used_by=("rollouts.vllm_cpu",),
        why="The weights that it packs, and no others.",
        if_moved=ON_USE,
        relation=Relation.READS,
    ),
)
