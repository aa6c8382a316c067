"""Shared by the Accelerate tests: a tiny Llama, batches, and a training loop that returns what can be compared."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from toy import full_gradients, full_weights
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hf_zeropp import ZeroPPHandle, ZeroPPPlugin

VOCAB = 97
TWO_NODES = {"ranks_per_node": 2}
UNQUANTIZED = TWO_NODES | {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None}


def tiny_llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    """A model that is the same on every rank. It has 2 kv heads, so that its matrices have many shapes."""
    set_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def new_accelerator(zeropp=TWO_NODES, *, mixed_precision: str = "no", micro_steps: int = 1, **plugin) -> Accelerator:
    """An Accelerator as in a fresh process: the singletons of Accelerate are reset before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=micro_steps,
        fsdp_plugin=ZeroPPPlugin(zeropp=zeropp, **plugin),
    )


def batch_of(rank: int, step: int, num_sequences: int = 2) -> torch.Tensor:
    return torch.randint(VOCAB, (num_sequences, 7), generator=torch.Generator().manual_seed(100 * step + rank))


def prepared(accelerator: Accelerator, model: LlamaForCausalLM | None = None):
    model = model or tiny_llama()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def handle_of(accelerator: Accelerator, model) -> ZeroPPHandle:
    return accelerator.state.fsdp_plugin.handle_of(model)


def train(accelerator: Accelerator, model, optimizer, rank: int, steps) -> list[float]:
    """Train a micro-step for each number of ``steps``, on the batch of that number. Returns the losses."""
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            tokens = batch_of(rank, step)
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def gradients(accelerator: Accelerator, model, rank: int) -> dict[str, torch.Tensor]:
    """Full gradients of one micro-step."""
    with accelerator.accumulate(model):
        tokens = batch_of(rank, 0)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    result = full_gradients(model)
    for param in model.parameters():
        param.grad = None
    return result


def weights(model) -> dict[str, torch.Tensor]:
    model.reshard()
    return full_weights(model)


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, divided by the norm of ``theirs``, all tensors together."""
    assert ours.keys() == theirs.keys()
    difference = sum((ours[name] - theirs[name]).double().square().sum() for name in ours)
    return torch.sqrt(difference / sum(value.double().square().sum() for value in theirs.values())).item()
