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

from hf_zeropp.fsdp.units import DefaultReduceScatter, ReduceScatter, Unit, find_units


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
        return _relative(torch.stack(self._squares)).tolist()

    def scaled_error(self) -> float:
        """After the last step, every element divided by the root mean square of its gradients, much as AdamW does: there
        the small elements of a matrix count as much as the large ones. Collective.

        Of exact and reduced gradients together: elements that are lost on the way count, and so does noise where exact
        gradients are next to nothing, but neither without bounds.
        """
        return _relative(torch.stack([recorder.scaled() for recorder in self._recorders]).sum(0)).item()


def _relative(squares: torch.Tensor) -> torch.Tensor:
    """[..., 2], each rank's squares of error and reference -> the relative errors [...] over all ranks."""
    dist.all_reduce(squares)
    return (squares[..., 0] / squares[..., 1]).sqrt()


class _Recorder(ReduceScatter):
    """Takes the place of a unit's comm object, and lets it do the work. Its sums are flat shards, zero but for matrices."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._comm = unit.reduce_scatter
        self._engine = DefaultReduceScatter()
        numel = sum(shard.padded_numel for shard in unit.param_shards(trainable_only=True))
        self._latest = torch.empty(0)
        self._exact, self._reduced, self._power = torch.zeros(3, numel, dtype=torch.float64)
        unit.set_reduce_scatter(self)

    def allocate(self, size, *, dtype, device):
        return self._comm.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self._latest = torch.empty_like(output_tensor, dtype=torch.float32)
        self._engine(self._latest, input_tensor.float(), group, op)
        return self._comm(output_tensor, input_tensor, group, op, async_op)

    def look(self) -> torch.Tensor:
        """This rank's part of the squares, of the error and of the exact sum."""
        for param, place in self._matrices():
            exact, reduced = self._latest[place].double(), param.grad.to_local().flatten().double()
            self._exact[place] += exact
            self._reduced[place] += reduced
            self._power[place] += exact.square() + reduced.square()
        return self._squares()

    def scaled(self) -> torch.Tensor:
        """The same of elements over their root mean square; those that were always zero stay so."""
        return self._squares(torch.where(self._power > 0, self._power.rsqrt(), 0.0))

    def _squares(self, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
        error, exact = (self._reduced - self._exact) * weight, self._exact * weight
        return torch.stack([error.square().sum(), exact.square().sum()])

    def _matrices(self) -> Iterator[tuple[DTensor, slice]]:
        """And where they lie in the flat shard."""
        start = 0
        for shard, param in zip(self._unit.param_shards(trainable_only=True), self._unit.trainable, strict=True):
            if shard.ndim > 1:
                yield param, slice(start, start + shard.numel)
            start += shard.padded_numel
