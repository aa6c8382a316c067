"""The oracle: a program on whole models in plain PyTorch, whose gradients are averaged over ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from differential.cases import Case
from differential.meshes import rank_of, rows_by_group
from differential.networks import (
    MP_POLICIES,
    Experts,
    Net,
    build,
    fill_in_zeros,
    run_models,
    unused_in,
)
from differential.sides import Observation, Side, step_and_drop


class Plain(Side):
    """The oracle: whole models on every rank, gradients averaged over ranks behind every backward pass.

    Of experts a rank runs those of its group alone, as sharded ones do.

    Attributes:
        scales: the largest gradient of each parameter that any rank has had since gradients were zeroed, summed over
            micro-steps; what errors of gradients are measured by.
    """

    def __init__(self, case: Case, rank: int, folder: str, mesh: DeviceMesh) -> None:
        super().__init__(case, rank, folder, mesh)
        self.scales = dict.fromkeys(self.params, 0.0)

    def force(self, weights: Sequence[Observation]) -> None:
        """Go on with the weights of which every rank saw its rows: rounding in another run must not add up."""
        for key in weights[self.rank]:
            name = key.removeprefix("weight ")
            for place in range(self.case.world):
                for group, rows in self._rows_of_place(name, self.params[name], place).items():
                    rows.copy_(weights[rank_of(self.case, place, group)][key])

    def abort(self, data: int, which: int | None) -> Observation:
        loss = self._loss(data, which).item()
        self.zero_grad(None, False)
        return {"loss": loss}

    def step_on_all_but_one(self, optimizer: int, rank: int) -> Observation:
        if self._has_state(optimizer):
            return self.step(optimizer)
        before = {name: param.detach().clone() for name, param in self.params.items()}
        self._optimizer(optimizer).step()
        for name, param in self.params.items():
            old = self._rows_of_place(name, before[name], rank)
            for group, rows in self._rows_of_place(name, param, rank).items():
                rows.copy_(old[group])
        return {**self.gradients(), **self.weights()}

    def edit(self, route: str, param: int, count: int, factor: float) -> Observation:
        for name in self._chosen(param, count):
            self.params[name].detach().mul_(factor)
        return self.weights()

    def edit_on_one_rank(self, route: str, param: int, rank: int, factor: float) -> Observation:
        (name,) = self._chosen(param, 1)
        if name not in self.on_node:
            for rows in self._rows_of_place(name, self.params[name], rank).values():
                rows.mul_(factor)
        return self.weights()

    def load(self, route: str) -> Observation:
        for name, param in self.params.items():
            param.detach().copy_(self._saved[name])
        return self.weights()

    def _build_nets(self) -> list[Net]:
        nets = [build(spec, seed) for seed, spec in enumerate(self.case.models)]
        for experts in (module for net in nets for module in net.modules() if isinstance(module, Experts)):
            experts.group = (self.group, self.case.groups)
        return nets

    def _outputs(self, inputs: list[torch.Tensor | None], path: Sequence[int] | None) -> list[torch.Tensor]:
        nets = zip(self.nets, self.case.models, strict=True)
        models = [functools.partial(_run, net, spec.policy, path) for net, spec in nets]
        return run_models(models, inputs, self.case.chained)

    def _rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._rows_of_place(name, tensor, self.place)[self.group]

    def _rows_of_place(self, name: str, tensor: torch.Tensor, place: int) -> dict[int, torch.Tensor]:
        return rows_by_group(self.case, name, tensor.detach(), place % self.case.world, self.group)

    def zero_grad(self, optimizer: int | None, keep: bool) -> None:
        super().zero_grad(optimizer, keep)
        for name, param in self.params.items():
            if param.grad is None or not param.grad.any():
                self.scales[name] = 0.0

    def _backward(self, loss: torch.Tensor, times: int = 1) -> None:
        self._backward_and_average(loss, times)

    def _backward_with_steps(self, loss: torch.Tensor) -> None:
        for name in self._backward_and_average(loss, 1):
            step_and_drop(self.params[name])

    def _backward_and_average(self, loss: torch.Tensor, times: int) -> list[str]:
        """Add to ``.grad`` the mean over ranks of this pass's gradients; return the parameters that got one."""
        before = {name: param.grad for name, param in self.params.items()}
        for param in self.params.values():
            param.grad = None
        super()._backward(loss, times)
        used = {name for name, param in self.params.items() if param.grad is not None}
        fill_in_zeros(unused_in(self.case, self.params, used))
        fresh = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        self._average(fresh)
        for name, param in self.params.items():
            if before[name] is not None:
                param.grad = before[name] if name not in fresh else before[name].add_(fresh[name])
        return list(fresh)

    def _average(self, grads: dict[str, torch.Tensor]) -> None:
        if not grads:
            return
        largest = torch.stack([grad.abs().max() for grad in grads.values()])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.peers)
        flat = torch.cat([grad.flatten() for grad in grads.values()])
        dist.all_reduce(flat, group=self.peers)
        pieces = flat.div_(self.peers.size()).split([grad.numel() for grad in grads.values()])
        for (name, grad), piece, scale in zip(grads.items(), pieces, largest.tolist(), strict=True):
            grad.copy_(piece.view_as(grad))
            self.scales[name] += scale


def _run(net: Net, policy: str, path: Sequence[int] | None, x: torch.Tensor) -> torch.Tensor:
    dtype = MP_POLICIES[policy].param_dtype
    if dtype is None:
        return net(x, path)
    halves = {name: param.to(dtype) for name, param in net.named_parameters()}
    return torch.func.functional_call(net, halves, (x.to(dtype), path))
