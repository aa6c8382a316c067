"""Tensor subclasses that make the input of their gather themselves (``fsdp_pre_all_gather``) stay with FSDP2's gather.

What they gather has sizes, dtypes and a meaning of its own. The oracle is stock FSDP2 with the same tensors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from differential.extension import Extension
from harness import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import logged_messages

from hf_zeropp import ZeroPPHandle, apply_zeropp, generation_mode
from hf_zeropp.traffic import FSDP2_GATHER, GATHER_CROSS, GATHER_RESYNC

NODES = {"ranks_per_node": 2, "qgz_bits": None, "qgz_intra_bits": None}
SETTINGS = {
    "values": NODES,
    "exact": NODES | {"qwz_mode": "exact"},
    "no copies": NODES | {"hpz_size": None},
    "unquantized": NODES | {"qwz_bits": None},
}


class Block(nn.Module):
    """A residual block with one matrix in parts, and a plain one in a unit of its own."""

    def __init__(self, size: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = nn.Linear(size, size, bias=bias)
        self.plain = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.plain(F.gelu(self.parts(x)))


def model_in_parts(mesh: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(20) for _ in range(2)])
    for block in model:
        block.parts.weight = nn.Parameter(Extension(block.parts.weight.detach(), "parts"))
        fully_shard(block.plain, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicas_in_parts() -> nn.Module:
    return model_in_parts(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def model_in_float8() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    # gloo does not gather float8 tensors. With a bias beside them FSDP2 gathers both as bytes.
    model = nn.Sequential(*[Block(32, bias=True) for _ in range(2)])
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name.endswith("parts"))
    for block in model:
        fully_shard(block.plain)
        fully_shard(block)
    return fully_shard(model)


class Adapted(nn.Module):
    """A frozen NF4 matrix with LoRA beside it."""

    def __init__(self) -> None:
        from torchao.quantization import to_nf4

        super().__init__()
        self.base = nn.Parameter(to_nf4(torch.randn(256, 256) / 16), requires_grad=False)
        self.a = nn.Linear(256, 8, bias=False)
        self.b = nn.Linear(8, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x, self.base) + self.b(self.a(x))


def model_in_nf4() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted() for _ in range(2)])
    for block in model:
        fully_shard([block.a, block.b])
        fully_shard(block)
    return fully_shard(model)


def train(model: nn.Module, width: int, rank: int, handle: ZeroPPHandle | None = None) -> list[float]:
    """Return the losses of three steps of two micro-steps, and of an evaluation."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        for micro_step in range(2):
            if handle is not None:
                handle.set_last_micro_step(micro_step == 1)
            loss = (model(torch.randn(3, width, generator=generator)) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(torch.ones(1, width)).square().mean().item())
    return losses


def beside_stock(rank: int, make: Callable[[], nn.Module], width: int, mode: str, units: list[str]) -> str:
    """Train with ZeRO++ and without; return what was warned of."""
    expected = train(make(), width, rank)
    model = make()
    # Replicas must span nodes to be served: with two ranks each, they have nodes of one.
    has_replicas = next(model.parameters()).device_mesh.ndim == 2
    with logged_messages("hf_zeropp") as logged:
        handle = apply_zeropp(model, SETTINGS[mode] | ({"ranks_per_node": 1} if has_replicas else {}))
        losses = train(model, width, rank, handle)
    # Plain units may be quantized. What the others gather is as exact as stock's.
    assert losses == pytest.approx(expected, rel=1e-4 if mode in ("exact", "unquantized") else 0.05)
    handle.traffic.reset()
    losses = train(model, width, rank, handle)
    counts = handle.traffic.counts
    assert counts[FSDP2_GATHER].calls and (counts.get(GATHER_CROSS) or counts[GATHER_RESYNC]).calls
    by_name = {gather.unit.name: gather for gather in handle.gathers}
    assert all(by_name[name].secondary_bytes() == 0 and not by_name[name].stays_in_group for name in units)
    predicted = handle.predict(2)[FSDP2_GATHER]
    # An evaluation gathers once more than three steps do.
    assert 3 * predicted.cross_node < counts[FSDP2_GATHER].cross_node < 3.5 * predicted.cross_node
    with torch.no_grad(), generation_mode(model):
        assert torch.equal(model(torch.ones(1, width)), model(torch.ones(1, width)))
    return "\n".join(logged)


NEEDS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.mark.thorough("*unquantized", "*no copies", "replicas-*", "two parts-values", "float8-exact", "nf4-values")
@pytest.mark.parametrize("mode", SETTINGS)
@pytest.mark.parametrize(
    ("make", "width"),
    [
        (model_in_parts, 20),
        (replicas_in_parts, 20),
        pytest.param(model_in_float8, 32, marks=NEEDS_TORCHAO),
        pytest.param(model_in_nf4, 256, marks=NEEDS_TORCHAO),
    ],
    ids=["two parts", "replicas", "float8", "nf4"],
)
def test_trains_as_stock_and_names_the_units(make, width, mode):
    rank_0, *_ = run_ranks(beside_stock, 4, make, width, mode, ["0", "1"])
    assert "fsdp_pre_all_gather" in rank_0 and "0, 1" in rank_0, rank_0
