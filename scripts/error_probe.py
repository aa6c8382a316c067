"""What communication did to numbers on the way, measured in a training run that goes on as if nobody looked.

Relative errors are Frobenius norms over all matrices of the model; 1-D parameters travel unquantized and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_zeropp.units import ReduceScatter, Unit, find_units


@torch.no_grad()
def weight_error(model: nn.Module) -> float:
    """Distance of the weights that gathers deliver from the fp32 masters, the mean over ranks.

    Call it where a forward of these weights was run: then they have crossed nodes already, and nothing is sent that
    would not be sent without it.
    """
    gathered = _gathered(model)
    squares = torch.zeros(2, dtype=torch.float64)
    for name, param in model.named_parameters():
        if param.ndim > 1:
            master = param.full_tensor().double()
            squares += torch.stack([(gathered[name] - master).square().sum(), master.square().sum()])
    error = squares[0].div(squares[1]).sqrt()
    dist.all_reduce(error)
    return error.item() / dist.get_world_size()


def _gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return weights


class GradientProbe:
    """Sums up reduced gradients, and beside them what an exact reduction makes of the same local gradients.

    An exact reduction is fp32, the sums are fp64. Other gradients, and so the training, stay what they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._recorders = [_Recorder(unit) for unit in find_units(model)]
        self._squares: list[torch.Tensor] = []

    def look(self) -> None:
        """Take in one step. After its backward pass, before gradients are clipped."""
        parts = [recorder.look() for recorder in self._recorders]
        self._squares.append(torch.stack(parts).sum(0))

    def errors(self) -> list[float]:
        """After each step: |sum of reduced - sum of exact| / |sum of exact|. Collective."""
        squares = torch.stack(self._squares)
        dist.all_reduce(squares)
        return (squares[:, 0] / squares[:, 1]).sqrt().tolist()


class _Recorder(ReduceScatter):
    """Takes the place of a unit's comm object, and lets it do the work."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._comm = unit.reduce_scatter
        numel = sum(shard.padded_numel for shard in unit.param_shards(trainable_only=True))
        self._exact, self._reduced = torch.zeros(2, numel, dtype=torch.float64)
        unit.set_reduce_scatter(self)

    def allocate(self, size, *, dtype, device):
        return self._comm.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        exact = torch.empty_like(output_tensor, dtype=torch.float32)
        dist.reduce_scatter_tensor(exact, input_tensor.float(), op=op, group=group)
        self._exact += exact
        return self._comm(output_tensor, input_tensor, group, op, async_op)

    def look(self) -> torch.Tensor:
        """This rank's part of the squares, of the error and of the exact sum."""
        squares = torch.zeros(2, dtype=torch.float64)
        for param, place in self._matrices():
            exact, reduced = self._exact[place], self._reduced[place]
            reduced += param.grad.to_local().flatten()
            squares += torch.stack([(reduced - exact).square().sum(), exact.square().sum()])
        return squares

    def _matrices(self) -> Iterator[tuple[DTensor, slice]]:
        """And where they lie in the flat shard."""
        start = 0
        for shard, param in zip(self._unit.param_shards(trainable_only=True), self._unit.trainable, strict=True):
            if shard.ndim > 1:
                yield param, slice(start, start + shard.numel)
            start += shard.padded_numel
