"""Shared by the tests with vLLM's real engine: its settings, its weights, and its greedy tokens beside a model's."""

from __future__ import annotations

import re

import torch

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# fp32 as the trainer, so that no tie of two tokens breaks differently; and a small cache, because processes keep old engines.
ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**24}
NUM_TOKENS = 8


def engine_weights(llm) -> dict[str, torch.Tensor]:
    """The weights that vLLM computes with. It fuses some, and pads the vocabulary."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a Llama or a Mixtral as vLLM lays them out."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, weight in weights.items():
        name = re.sub(r"\.mlp\.experts\.gate_up_proj$", ".block_sparse_moe.experts.routed_experts.w13_weight", name)
        name = re.sub(r"\.mlp\.experts\.down_proj$", ".block_sparse_moe.experts.routed_experts.w2_weight", name)
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        name = re.sub(r"\.[qkv]_proj", ".qkv_proj", name)
        name = re.sub(r"\.(gate|up)_proj", ".gate_up_proj", name)
        found.setdefault(name, []).append(weight)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def differences(engine: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> list[str]:
    """The names of weights that are not the same bits in both. A tied head is the engine's embedding."""
    tied = engine["model.embed_tokens.weight"]
    return [name for name, each in fused(weights).items() if not torch.equal(engine.get(name, tied)[: len(each)], each)]


def greedy_by_engine(llm, ids: list[list[int]]) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy_by_model(model, ids: list[list[int]]) -> list[list[int]]:
    tokens = torch.tensor(ids)
    is_training = model.training
    with torch.no_grad():
        written = model.eval().generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=-1,
        )
    model.train(is_training)
    return written[:, tokens.shape[1] :].tolist()
