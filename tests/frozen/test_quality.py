"""Packing a small trained model: its perplexity, and LoRA training on it. ops/test_frozen_format.py has the errors."""

from __future__ import annotations

import copy
import math
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import quantize_frozen

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.thorough]
LENGTH, BATCH = 128, 8  # bytes of text in a sequence; sequences of a step
HELD_OUT = 64  # sequences


def byte_sequences(is_wanted: Callable[[str], bool]) -> torch.Tensor:
    """Lines of the standard library that are wanted, as bytes, cut into sequences and shuffled."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [line for file in files for line in file.read_text(errors="ignore").splitlines() if is_wanted(line.strip())]
    tokens = torch.tensor(bytearray("\n".join(lines).encode("ascii", "ignore")), dtype=torch.uint8).long()
    tokens = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]


def train(model: nn.Module, data: torch.Tensor, steps: int) -> None:
    """Train what requires gradients, on the same batches for the same number of steps."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    chance = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = data[torch.randint(len(data), (BATCH,), generator=chance)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def loss_of(model: nn.Module, data: torch.Tensor) -> float:
    return statistics.mean(model(input_ids=batch, labels=batch).loss.item() for batch in data.split(16))


@pytest.fixture(scope="module")
def code() -> torch.Tensor:
    return byte_sequences(lambda line: bool(line) and not line.startswith(("#", '"')))


@pytest.fixture(scope="module")
def model(code) -> LlamaForCausalLM:
    """A Llama that has read code, in fp32 with values that bf16 can hold."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
    trained = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    train(trained, code[HELD_OUT:], steps=120)
    for param in trained.parameters():
        param.data = param.data.bfloat16().float()
    return trained


def packed(model: nn.Module, bits: int) -> nn.Module:
    """A copy whose linear layers are packed, but for the head."""
    return quantize_frozen(copy.deepcopy(model).requires_grad_(False), bits, skip=["lm_head", "embed_tokens"])


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.001), (4, 0.03)])
def test_packing_barely_moves_perplexity(model, code, bits, limit):
    dense = math.exp(loss_of(model, code[:HELD_OUT]))
    assert dense < 20, "256 without training"
    assert math.exp(loss_of(packed(model, bits), code[:HELD_OUT])) < (1 + limit) * dense


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.01), (4, 0.02)])
def test_lora_on_a_packed_base_learns_as_on_a_dense_one(model, bits, limit):
    comments = byte_sequences(lambda line: line.startswith("#"))
    losses = []
    for base in (copy.deepcopy(model), packed(model, bits)):
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        before = loss_of(adapted, comments[:HELD_OUT])
        train(adapted, comments[HELD_OUT:], steps=40)
        losses.append(loss_of(adapted, comments[:HELD_OUT]))
        assert losses[-1] < 0.97 * before
    dense, on_packed = losses
    assert on_packed < (1 + limit) * dense
