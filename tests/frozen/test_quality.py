"""Packing a small trained model: its perplexity. ops/test_frozen_format.py has the errors."""

from __future__ import annotations

import copy
import math
import statistics
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import quantize_frozen

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]
LENGTH, BATCH = 128, 8  # bytes of text in a sequence; sequences of a step
HELD_OUT = 64  # sequences
STEPS = 120


@torch.no_grad()
def loss_of(model: nn.Module, data: torch.Tensor) -> float:
    return statistics.mean(model(input_ids=batch, labels=batch).loss.item() for batch in data.split(16))


@pytest.fixture(scope="module")
def code() -> torch.Tensor:
    """Lines of the standard library that are code, as bytes, cut into sequences and shuffled."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line for file in files for line in file.read_text(errors="ignore").splitlines()]
    lines = [line for line in lines if line.strip() and not line.strip().startswith(("#", '"'))]
    tokens = torch.tensor(bytearray("\n".join(lines).encode("ascii", "ignore")), dtype=torch.uint8).long()
    tokens = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]


@pytest.fixture(scope="module")
def model(code) -> LlamaForCausalLM:
    """A Llama that has read code, in fp32 with values that bf16 can hold."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
    trained = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(trained.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    data, chance = code[HELD_OUT:], torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = data[torch.randint(len(data), (BATCH,), generator=chance)]
        trained(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for param in trained.parameters():
        param.data = param.data.bfloat16().float()
    return trained


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.001), (4, 0.03)])
def test_packing_barely_moves_perplexity(model, code, bits, limit):
    dense = math.exp(loss_of(model, code[:HELD_OUT]))
    assert dense < 20, "256 without training"
    packed = quantize_frozen(copy.deepcopy(model).requires_grad_(False), bits, skip=["lm_head", "embed_tokens"])
    assert math.exp(loss_of(packed, code[:HELD_OUT])) < (1 + limit) * dense
