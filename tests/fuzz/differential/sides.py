"""What the three ways to run one program have in common: under ZeRO++, under stock FSDP2, and unsharded in plain PyTorch.

Every operation of ``cases.OPERATIONS`` is a method of ``Side``. It returns what is compared afterwards: losses, this rank's
rows of weights, and this rank's rows of gradients. sharded_sides.py runs FSDP2, with ``apply_zeropp`` and without it, and
plain_side.py whole models.

A user of FSDP2 holds the sharded parameters from the start (an optimizer does), so all operations act on those, also
while a unit is unsharded and its module shows other tensors.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from differential.cases import STATELESS, Case
from differential.meshes import cut_dim, place_of, rank_of
from differential.networks import Container, Net, parameters_of, put, skipped_blocks
from differential.optimizers import RaisesHalfway, make_optimizer

Observation = dict[str, Any]


class Side(ABC):
    """One run of a case on this rank.

    Args:
        folder: where checkpoints go, the same on every rank.
        mesh: of all ranks (``meshes.make_mesh``).

    Attributes:
        params: the parameters by name, as an optimizer holds them.
        on_node: the names of those that ZeRO++ shards over the node.
        place: this rank's number in its group, and ``group`` that of the group (see ``meshes``).
        peers: the ranks that hold parts of the same models.
    """

    def __init__(self, case: Case, rank: int, folder: str, mesh: DeviceMesh) -> None:
        self.case = case
        self.rank = rank
        self.mesh = mesh
        self.place, self.group = place_of(case, rank)
        self.peers = mesh.get_group("shard") if case.mesh == "pp" else dist.group.WORLD
        self.folder = os.path.join(folder, f"stage{self.group}") if case.mesh == "pp" else folder
        os.makedirs(self.folder, exist_ok=True)
        self.nets = self._build_nets()
        self.container = Container(self.nets, case.chained) if case.joined else None
        self._finish_models()
        self.params: dict[str, torch.Tensor] = {}
        self._first_name: dict[str, str] = {}  # of every name, for tied parameters the first
        for index, net in enumerate(self.nets):
            for name, param in net.named_parameters(remove_duplicate=False):
                first = next((known for known, other in self.params.items() if other is param), f"{index}.{name}")
                self._first_name[f"{index}.{name}"] = first
                self.params[first] = param
        self.on_node = {f"{param.model}.{param.name}" for param in parameters_of(case) if param.is_on_node}
        self._has_run = False
        self._is_last = True
        self.optimizers = [make_optimizer(spec, self._by_mesh()) for spec in case.optimizers]
        self.save()

    def run(self, name: str, args: dict[str, Any]) -> Observation:
        return getattr(self, name)(**args) or {}

    # Forward and backward passes.

    def train(
        self, data: int, which: int | None, path: Sequence[int] | None, forwards: int, backwards: int, input_grad: bool
    ) -> Observation:
        """One micro-step: the sum of ``forwards`` losses, and ``backwards`` backward passes through its graph."""
        loss = sum(self._loss(data + 50 * number, which, path, input_grad) for number in range(forwards))
        self._backward(loss, backwards)
        return {"loss": loss.item()}

    def forward(self, data: int, which: int | None) -> Observation:
        """A forward pass with autograd whose loss is thrown away, as loops do where a loss is not finite."""
        return {"loss": self._loss(data, which).item()}

    def evaluate(self, data: int, which: int | None, path: Sequence[int] | None, times: int) -> Observation:
        with torch.no_grad():
            return {f"loss {number}": self._loss(data + number, which, path).item() for number in range(times)}

    def generate(self, data: int, which: int | None, times: int, budget: int) -> Observation:
        """Forward passes one after another, as generation runs them."""
        return self.evaluate(data, which, None, times)

    def no_sync(self, data: int, which: int | None, count: int, marks_last: bool) -> Observation:
        """``count`` micro-steps whose gradients FSDP2 is told not to reduce, and one with reduction.

        With ``marks_last``, ``set_is_last_backward`` tells FSDP2 which is which as well.
        """
        seen = {}
        for number in range(count + 1):
            self._set_sync(number == count, marks_last)
            seen |= {f"loss {number}": self.train(data + number, which, None, 1, 1, False)["loss"]}
        return seen

    def train_with_steps_inside(self, data: int, which: int | None) -> Observation:
        """The backward pass steps each parameter as soon as its gradient is there, and drops the gradient."""
        self.set_last(True)
        loss = self._loss(data, which)
        self._backward_with_steps(loss)
        return {"loss": loss.item(), **self.weights()}

    def train_apart(self, data: int, model: int, rank: int, block: int, other: int | None) -> Observation:
        """A micro-step of one model in which one rank skips a block that the others run and train.

        The others skip the block ``other``, if that is another one, so that all ranks run as many.

        It is a plain one where none may be skipped (``skipped_blocks``), and where gradients wait: they may not cross ranks.
        """
        which = model % len(self.nets)
        path = list(range(len(self.nets[which].blocks)))
        trained = [name for name, param in self.params.items() if param.requires_grad]
        skipped = skipped_blocks(self.case, trained, which, block, other) if self._is_last else None
        if skipped is not None:
            of_one, of_others = skipped
            left_out = of_one if self.rank == rank % self.case.world else of_others
            path = [index for index in path if index not in left_out]
        return self.train(data, which, path, 1, 1, False)

    @abstractmethod
    def abort(self, data: int, which: int | None) -> Observation:
        """A backward pass that raises halfway on all ranks, and what FSDP2 documents for the time after."""

    # Gradients.

    def set_last(self, last: bool) -> None:
        """Tell ZeRO++ whether the coming micro-steps end an accumulation. Elsewhere it means nothing."""
        self._is_last = last

    def zero_grad(self, optimizer: int | None, keep: bool) -> None:
        """Zero the gradients of all parameters, or of one optimizer's; ``keep`` is ``set_to_none=False``."""
        for param in self.params.values() if optimizer is None else self._optimized(optimizer):
            if not keep:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def discard(self) -> None:
        """Start an accumulation over, in the way that the handle offers."""
        self.zero_grad(None, False)

    def clip(self, norm: float, foreach: bool | None) -> Observation:
        totals = [nn.utils.clip_grad_norm_(params, norm, foreach=foreach) for params in self._by_mesh()]
        return {"norm": torch.stack([full(total) for total in totals]).norm().item(), **self.gradients()}

    def scale_grads(self, factor: float) -> None:
        for param in self.params.values():
            if param.grad is not None:
                param.grad.mul_(factor)

    def read_grads(self) -> Observation:
        return self.gradients()

    # Optimizers.

    def step(self, optimizer: int) -> Observation:
        self._optimizer(optimizer).step()
        return {**self.gradients(), **self.weights()}

    def step_with_closure(self, optimizer: int, data: int) -> Observation:
        chosen = self._optimizer(optimizer)

        def closure() -> torch.Tensor:
            chosen.zero_grad()
            loss = self._loss(data, None)
            self._backward(loss)
            return loss

        loss = chosen.step(closure)
        return {"loss": loss.item(), **self.gradients(), **self.weights()}

    @abstractmethod
    def step_on_all_but_one(self, optimizer: int, rank: int) -> Observation:
        """One rank leaves its shard as it is. Only optimizers without state are skipped so.

        The ranks of the same place in other groups do as it does, here and in ``edit_on_one_rank``. Where replicas differ there
        are no right numbers: FSDP2 never makes them equal again.
        """

    def step_that_raises(self) -> Observation:
        """An optimizer updates half of the parameters, then raises; the loop catches it and goes on."""
        try:
            RaisesHalfway([{"params": params} for params in self._by_mesh()]).step()
        except ArithmeticError:
            pass
        return self.weights()

    def step_of_another_module(self, rank: int) -> None:
        """On one rank alone, as a probe or a logger there would train something of its own."""
        if self.rank == rank % self.case.world:
            param = nn.Parameter(torch.ones(3))
            param.grad = torch.ones(3)
            torch.optim.SGD([param], lr=0.1).step()

    # Parameters.

    def freeze(self, param: int, count: int) -> None:
        for name in self._chosen(param, count):
            self.params[name].requires_grad_(False)

    def unfreeze(self, param: int, count: int) -> None:
        for name in self._chosen(param, count):
            self.params[name].requires_grad_(True)

    def replace(self, param: int, count: int, factor: float) -> Observation:
        """Put new parameters in the places of old ones, as loops do before training begins. Later it does nothing."""
        if self._has_run:
            return {}
        for name in self._chosen(param, count):
            old = self.params[name]
            new = nn.Parameter(old.detach().clone().mul_(factor), requires_grad=old.requires_grad)
            self.params[name] = new
            for place in (place for place, first in self._first_name.items() if first == name):
                index, _, path = place.partition(".")
                put(self.nets[int(index)], path, new)
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["params"] = [new if each is old else each for each in group["params"]]
        return self.weights()

    @abstractmethod
    def edit(self, route: str, param: int, count: int, factor: float) -> Observation:
        """Multiply some parameters, through ``route``."""

    @abstractmethod
    def edit_on_one_rank(self, route: str, param: int, rank: int, factor: float) -> Observation:
        """Multiply one rank's shard of a parameter, through ``route``."""

    def save(self) -> None:
        """Remember the weights for ``load``."""
        self._saved = {name: param.detach().clone() for name, param in self.params.items()}

    @abstractmethod
    def load(self, route: str) -> Observation:
        """Put back the weights of the last ``save``, or those at the start."""

    def invalidate(self) -> None:  # noqa: B027 - ZeRO++ alone has something to do
        """Tell ZeRO++ that weights may have changed."""

    def save_handle_state(self) -> None:  # noqa: B027 - as above
        """Ask of ZeRO++ what a checkpoint asks."""

    # What is compared.

    def weights(self) -> Observation:
        return {f"weight {name}": self._rows(name, param).clone() for name, param in self.params.items()}

    def gradients(self) -> Observation:
        grads = {name: param.grad for name, param in self.params.items()}
        return {
            f"grad {name}": None if grad is None else self._rows(name, grad).clone() for name, grad in grads.items()
        }

    # Defaults that a side may override. Every side also defines ``_build_nets``; ``_outputs``, of the models that have an input;
    # ``_rows``, this rank's rows of a parameter or gradient, without autograd and not copied; and ``_backward_with_steps``.

    def _finish_models(self) -> None:  # noqa: B027 - the oracle has nothing to do
        """Do what follows before anything holds the parameters."""

    def _set_sync(self, sync: bool, marks_last: bool) -> None:  # noqa: B027 - the oracle has nothing to do
        """Tell FSDP2 whether to reduce gradients."""

    def _backward(self, loss: torch.Tensor, times: int = 1) -> None:
        for number in range(times):
            if loss.requires_grad:
                loss.backward(retain_graph=number < times - 1)

    def _loss(
        self, data: int, which: int | None, path: Sequence[int] | None = None, input_grad: bool = False
    ) -> torch.Tensor:
        """The sum of the models' losses for a batch that depends on ``data`` and on the rank.

        Ranks of one place share batches with tensor parallelism. Behind a pipeline stage, the mean of its outputs is added.
        """
        self._has_run = True
        number = self.place if self.case.mesh == "tp" else self.rank
        of_stage = torch.zeros(())
        if self.case.mesh == "pp" and self.group > 0:
            dist.recv(of_stage, rank_of(self.case, self.place, self.group - 1))
        inputs, targets = [], []
        for index, spec in enumerate(self.case.models):
            generator = torch.Generator().manual_seed(10_000 * data + 100 * index + number)
            x, y = torch.randn((2, 3, spec.width), generator=generator)
            x += of_stage
            is_used = which is None or which % len(self.nets) == index
            inputs.append(x.requires_grad_(input_grad) if is_used else None)
            targets += [y] if is_used else []
        outputs = self._outputs(inputs, path)
        if self.case.mesh == "pp" and self.group < self.case.groups - 1:
            of_stage = torch.stack([out.detach().float().mean() for out in outputs]).mean()
            dist.send(of_stage, rank_of(self.case, self.place, self.group + 1))
        losses = ((out.float() - y).square().mean() for out, y in zip(outputs, targets, strict=True))
        return torch.stack(list(losses)).sum()

    def _by_mesh(self) -> list[list[torch.Tensor]]:
        """The parameters, those that groups divide apart from the others: one operator takes no DTensors of two meshes."""
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for name, param in self.params.items():
            parts[cut_dim(self.case, name) is not None].append(param)
        return [params for params in parts if params]

    def _used(self, which: int | None) -> Iterable[Net]:
        return self.nets if which is None else [self.nets[which % len(self.nets)]]

    def _optimizer(self, index: int) -> torch.optim.Optimizer:
        return self.optimizers[index % len(self.optimizers)]

    def _has_state(self, index: int) -> bool:
        return self.case.optimizers[index % len(self.optimizers)].kind not in STATELESS

    def _optimized(self, index: int) -> list[torch.Tensor]:
        return [param for group in self._optimizer(index).param_groups for param in group["params"]]

    def _chosen(self, first: int, count: int) -> list[str]:
        names = list(self.params)
        return [names[(first + offset) % len(names)] for offset in range(min(count, len(names)))]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor; return other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step_and_drop(param: torch.Tensor) -> None:
    """Step as a loop with an optimizer inside the backward pass does, in a gradient hook."""
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
