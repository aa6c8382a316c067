"""The models of the fuzz: a few parameters each, none of whose sizes a world divides."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from differential.cases import BlockSpec, ModelSpec

MP_POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "fp16 reduce": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}


class Mlp(nn.Module):
    """x + down(tanh(up(scale * x))), where ``scale`` is a bare 1-D parameter."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.5 + torch.rand(width))
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.scale * x)))


class Bare(nn.Module):
    """Parameters in containers, and no submodule that owns one."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(inner, width) / width) for _ in range(2))
        self.vectors = nn.ParameterDict({"gain": nn.Parameter(torch.rand(width))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.vectors["gain"] * (torch.tanh(x @ self.matrices[0].t()) @ self.matrices[1])


class Nested(nn.Module):
    """A block with a block inside, which is a unit of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.child = Mlp(width, inner)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.child(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Unused(Mlp):
    """A block with a parameter that never gets a gradient."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.idle = nn.Parameter(torch.randn(inner, 2))


BLOCKS: dict[str, type[nn.Module]] = {"mlp": Mlp, "bare": Bare, "nested": Nested, "tied": Tied, "unused": Unused}


class Net(nn.Module):
    """The root: a matrix, the blocks in the order of ``path``, and another matrix."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        has_ends = spec.ends != "none"
        self.first = nn.Linear(spec.width, spec.width) if has_ends else nn.Identity()
        self.blocks = nn.ModuleList(_build_block(block, spec.width) for block in spec.blocks)
        self.last = nn.Linear(spec.width, spec.width, bias=False) if has_ends else nn.Identity()
        if spec.ends == "tied":
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, path: Sequence[int] | None = None) -> torch.Tensor:
        x = self.first(x)
        for index in range(len(self.blocks)) if path is None or not len(self.blocks) else path:
            x = self.blocks[index % len(self.blocks)](x)
        return self.last(x)


class Container(nn.Module):
    """An unsharded module around two models. Its output is a list of theirs."""

    def __init__(self, nets: Sequence[Net]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, inputs: Sequence[torch.Tensor | None], path: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Run each model that has an input."""
        return [net(x, path) for net, x in zip(self.nets, inputs, strict=True) if x is not None]


def build(spec: ModelSpec, seed: int) -> Net:
    """The model with the same weights on every rank and every side."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(spec)


@functools.cache
def used_and_trainable(spec: ModelSpec) -> tuple[tuple[bool, bool], ...]:
    """Return for each parameter whether every forward without a path uses it, and whether it trains at the start."""
    net = build(spec, 0)
    return tuple((not name.endswith("idle"), param.requires_grad) for name, param in net.named_parameters())


def shard(net: Net, spec: ModelSpec, mesh: DeviceMesh) -> Net:
    """Call ``fully_shard`` as the specification says, inner modules first; and recompute activations where it says so."""
    policy = MP_POLICIES[spec.policy]
    for block, block_spec in zip(net.blocks, spec.blocks, strict=True):
        if block_spec.recomputes:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if not block_spec.unit:
            continue
        settings = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": block_spec.reshards}
        if block_spec.kind == "nested":
            fully_shard(block.child, **settings)
        fully_shard(block, **settings)
    if spec.ends == "unit":
        fully_shard([net.first, net.last], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(net, mesh=mesh, mp_policy=policy, reshard_after_forward=spec.root_reshards)


def _build_block(spec: BlockSpec, width: int) -> nn.Module:
    block = BLOCKS[spec.kind](width, spec.inner)
    params = list(block.parameters())
    for index in spec.frozen:
        params[index % len(params)].requires_grad_(False)
    return block
