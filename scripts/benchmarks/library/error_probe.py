"""How far communication moves weights and gradients, measured in a training run that goes on as without the measuring.

Errors are relative: the Frobenius norm of the difference over that of the reference, over all matrices of the model.
1-D parameters travel unquantized and are left out.
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
    """Return the distance of gathered weights from the fp32 masters, the mean over ranks. All ranks must call it.

    Call it after a forward pass with these weights. They have crossed nodes by then, and gathering them once more sends
    nothing that the run would not send without the call.
    """
    gathered = _gathered(model)
    squares = torch.zeros(2, dtype=torch.float64)  # fp32 sums over a whole model would be off by more than small errors
    for name, param in model.named_parameters():
        if param.ndim > 1:
            master = param.full_tensor().double()
            squares += torch.stack([(gathered[name] - master).square().sum(), master.square().sum()])
    error = squares[0].div(squares[1]).sqrt()
    dist.all_reduce(error)
    return error.item() / dist.get_world_size()


def _gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights with which a forward pass computes, by name."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    # Parameters are the gathered weights now, in buffers that ``reshard`` frees.
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return weights


class GradientProbe:
    """Compares the sum of reduced gradients with that of exactly reduced ones.

    The exact reduction takes the same local gradients, in fp32; sums are kept in fp64. The gradients that the optimizer
    sees, and so the training, stay as they are. From its construction on, a probe must see every step.

    Args:
        model: a model that ``fully_shard`` has sharded, with this package's communication or FSDP2's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._recorders = [_Recorder(unit) for unit in find_units(model)]
        self._squares: list[torch.Tensor] = []

    def look(self) -> None:
        """Take in one step. Call it after the step's backward pass and before gradients are clipped."""
        parts = [recorder.look() for recorder in self._recorders]
        self._squares.append(torch.stack(parts).sum(0))

    def errors(self) -> list[float]:
        """Return the relative error of the summed gradients after each step. All ranks must call it."""
        return _relative(torch.stack(self._squares)).tolist()


def _relative(squares: torch.Tensor) -> torch.Tensor:
    """Sum [..., 2], the squares of error and reference, over ranks, and return the relative errors [...]."""
    dist.all_reduce(squares)
    return (squares[..., 0] / squares[..., 1]).sqrt()


class _Recorder(ReduceScatter):
    """Takes the place of a unit's ``ReduceScatter``, lets the replaced one do the work, and reduces exactly beside it.

    Its sums have the layout of the unit's flat shard, and hold zeros for all parameters but matrices.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._replaced = unit.reduce_scatter
        self._fsdp2 = DefaultReduceScatter()
        numel = sum(shard.padded_numel for shard in unit.param_shards(trainable_only=True))
        self._latest = torch.empty(0)
        self._exact, self._reduced = torch.zeros(2, numel, dtype=torch.float64)
        unit.set_reduce_scatter(self)

    def allocate(self, size, *, dtype, device):
        return self._replaced.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        # Both reductions take the same input, this rank's unreduced gradients of the whole unit. The second one runs on the
        # network too, but the package does not count its bytes: the run's traffic stays that of a run without a probe.
        self._latest = torch.empty_like(output_tensor, dtype=torch.float32)
        self._fsdp2(self._latest, input_tensor.float(), group, op)
        return self._replaced(output_tensor, input_tensor, group, op, async_op)

    def look(self) -> torch.Tensor:
        """Add the latest gradients to the sums, and return this rank's squares of their error and reference."""
        for param, place in self._matrices():
            # ``grad`` is what the optimizer reads, so FSDP2's own casts count as errors of the reduction.
            exact, reduced = self._latest[place].double(), param.grad.to_local().flatten().double()
            self._exact[place] += exact
            self._reduced[place] += reduced
        return self._squares()

    def _squares(self) -> torch.Tensor:
        error = self._reduced - self._exact
        return torch.stack([error.square().sum(), self._exact.square().sum()])

    def _matrices(self) -> Iterator[tuple[DTensor, slice]]:
        """Yield the unit's trainable matrices, each with its place in the flat shard."""
        start = 0
        for shard, param in zip(self._unit.param_shards(trainable_only=True), self._unit.trainable, strict=True):
            if shard.ndim > 1:
                yield param, slice(start, start + shard.numel)
            start += shard.padded_numel
