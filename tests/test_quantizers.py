"""``compare_quantizers.py`` on a model small enough for a test: the effect of packing on perplexity and on LoRA."""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts/benchmarks"))

import compare_quantizers as study  # noqa: E402

ARGS = argparse.Namespace(hidden_size=128, layers=2, steps=120, lora_steps=40, batch_size=8)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def code() -> torch.Tensor:
    return study.byte_sequences(lambda line: bool(line) and not line.startswith(("#", '"')))


@pytest.fixture(scope="module")
def model(code, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "ROOT", tmp_path_factory.mktemp("kept"))
        return study.trained_model(ARGS, code[64:])


def perplexity(model, held_out: torch.Tensor) -> float:
    return math.exp(study.loss_of(model, held_out))


def test_the_model_has_learned_something(model, code):
    assert perplexity(model, code[:64]) < 20, "256 without training"


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.001), (4, 0.03)])
def test_packing_barely_moves_perplexity(model, code, bits, limit):
    packed, error, bits_per_weight = study.quantized(model, lambda weight: study.frozen(weight, bits))
    assert error < {8: 0.007, 4: 0.1}[bits]
    assert bits_per_weight == bits + 16 / 128
    assert perplexity(packed, code[:64]) < (1 + limit) * perplexity(model, code[:64])


def test_the_search_of_int4_scales_pays(model):
    _, searched, _ = study.quantized(model, lambda weight: study.frozen(weight, 4))
    _, unsearched, _ = study.quantized(model, lambda weight: study.unsearched(weight, 4))
    assert searched < 0.9 * unsearched


@pytest.mark.parametrize("block", [64, 128])
def test_int4_is_closer_than_nf4_of_the_same_size(model, block):
    """NF4 keeps fp32 scales: at block b it has the bits of ours at b / 2."""
    pytest.importorskip("bitsandbytes")
    _, ours, our_bits = study.quantized(model, lambda weight: study.frozen(weight, 4, block // 2))
    _, theirs, their_bits = study.quantized(model, lambda weight: study.nf4(weight, block))
    assert our_bits == their_bits
    assert ours < theirs


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.01), (4, 0.02)])
def test_lora_on_a_packed_base_learns_as_on_a_dense_one(model, bits, limit):
    comments = study.byte_sequences(lambda line: line.startswith("#"))
    losses = []
    for base in (
        study.with_adapter(copy.deepcopy(model)),
        study.packed_with_adapter(copy.deepcopy(model), bits),
    ):
        before = study.loss_of(base, comments[:64])
        study.train(base, comments[64:], ARGS.lora_steps, 2e-3, ARGS.batch_size, "LoRA")
        losses.append(study.loss_of(base, comments[:64]))
        assert losses[-1] < 0.97 * before
    dense, packed = losses
    assert packed < (1 + limit) * dense
