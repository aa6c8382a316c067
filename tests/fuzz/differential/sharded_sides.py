"""The two sides that run FSDP2: stock, and with ``apply_zeropp``."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed.checkpoint as checkpoints
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from differential.cases import SILENT_ROUTES, Case, ModelSpec
from differential.extension import local
from differential.meshes import rows_of
from differential.networks import Net, build, fill_in_zeros, leave_meta, run_models, shard, starts_on_meta, unused_in
from differential.sides import Observation, Side, step_and_drop
from hf_zeropp import apply_zeropp, generation_mode
from hf_zeropp.dtensors import local_tensor_of
from hf_zeropp.fsdp.gradients.pending import PendingGradient
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.traffic import REDUCE_CROSS, REDUCE_REPLICAS, Bytes

UNQUANTIZED = {"qwz_bits": None, "hpz_size": "node", "qgz_bits": None, "qgz_intra_bits": None}


class Aborted(Exception):
    """Raised inside a backward pass, in place of an error such as running out of memory."""


class CrossedTwiceError(Exception):
    """Gradients crossed nodes more often than predicted. Their numbers may be right all the same."""


class Stock(Side):
    """FSDP2 as torch has it.

    Attributes:
        makes_zeros: whether parameters without a gradient get zeros in a unit that is reduced. Stock FSDP2 is given them here.
    """

    makes_zeros = False
    _num_saved = 0

    def abort(self, data: int, which: int | None) -> Observation:
        hidden: list[torch.Tensor] = []
        with contextlib.ExitStack() as stack:
            for net in self._used(which):
                module = net.blocks[len(net.blocks) // 2] if len(net.blocks) else net.first
                handle = module.register_forward_hook(lambda module, args, output: hidden.append(output))
                stack.callback(handle.remove)
            loss = self._loss(data, which)
        for tensor in hidden:
            if tensor.requires_grad:
                tensor.register_hook(_abort)
        with contextlib.suppress(Aborted):
            self._backward(loss)
        # The root's modules may show unsharded parameters, which have gradients of their own.
        for net in self._used(which):
            net.zero_grad()
            net.reset_iter_state()
        self.zero_grad(None, False)
        return {"loss": loss.item()}

    def step_on_all_but_one(self, optimizer: int, rank: int) -> Observation:
        if self._has_state(optimizer) or self.place != rank % self.case.world:
            self._optimizer(optimizer).step()
        return {**self.gradients(), **self.weights()}

    def edit(self, route: str, param: int, count: int, factor: float) -> Observation:
        ROUTES[route]([self.params[name] for name in self._chosen(param, count)], factor)
        if route in SILENT_ROUTES:
            self.invalidate()
        return self.weights()

    def edit_on_one_rank(self, route: str, param: int, rank: int, factor: float) -> Observation:
        if self.place == rank % self.case.world:
            names = [name for name in self._chosen(param, 1) if name not in self.on_node]
            ROUTES[route]([self.params[name] for name in names], factor)
            if route in SILENT_ROUTES:
                self.invalidate()
        return self.weights()

    def load(self, route: str) -> Observation:
        for index, net in enumerate(self.nets):
            state = net.state_dict()
            saved = {name: self._saved[self._first_name[f"{index}.{name}"]] for name in state}
            if route == "load_state_dict":
                net.load_state_dict(saved)
            elif route == "set_model_state_dict":
                set_model_state_dict(net, saved)
            else:
                self._load_files(net, state, saved, in_place=route == "dcp_in_place")
        return self.weights()

    def _load_files(self, net: Net, state: dict, saved: dict, in_place: bool) -> None:
        """``checkpoints.load`` writes into the tensors of ``state``, which are the parameters' own."""
        self._num_saved += 1
        path = os.path.join(self.folder, f"{type(self).__name__}{self._num_saved}")
        checkpoints.save(saved, checkpoint_id=path, process_group=self.peers)
        checkpoints.load(state, checkpoint_id=path, process_group=self.peers)
        if in_place:
            self.invalidate()
        else:
            net.load_state_dict(state)

    def _build_nets(self) -> list[Net]:
        return [self._shard(build(spec, seed), spec) for seed, spec in enumerate(self.case.models)]

    def _shard(self, net: Net, spec: ModelSpec) -> Net:
        return shard(net, spec, self.case, self.mesh, frozen_units=False)

    def _finish_models(self) -> None:
        for seed, (net, spec) in enumerate(zip(self.nets, self.case.models, strict=True)):
            if starts_on_meta(net, spec):
                leave_meta(net, spec.meta, build(spec, seed), self.mesh)

    def _outputs(self, inputs: list[torch.Tensor | None], path: Sequence[int] | None) -> list[torch.Tensor]:
        if self.container is not None:
            return self.container(inputs, path)
        return run_models([functools.partial(net, path=path) for net in self.nets], inputs, self.case.chained)

    def _rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor), type(tensor)
        if tensor.device_mesh.size() >= self.case.world:
            return local(tensor)
        return rows_of(tensor.detach().full_tensor(), self.place, self.case.world)  # sharded over the node

    def _set_sync(self, sync: bool, marks_last: bool) -> None:
        for net in self.nets:
            net.set_requires_gradient_sync(sync)
            if marks_last:
                net.set_is_last_backward(sync)

    def _backward(self, loss: torch.Tensor, times: int = 1) -> None:
        if self.makes_zeros:
            super()._backward(loss, times)
            return
        before = self._stamps_of_gradients()
        super()._backward(loss, times)
        fresh = {name for name, stamp in self._stamps_of_gradients().items() if before.get(name) != stamp}
        fill_in_zeros(unused_in(self.case, self.params, fresh))

    def _stamps_of_gradients(self) -> dict[str, tuple[int, int]]:
        grads = ((name, param.grad) for name, param in self.params.items())
        return {name: (id(grad), local(grad)._version) for name, grad in grads if grad is not None}

    def _backward_with_steps(self, loss: torch.Tensor) -> None:
        stepped: set[str] = set()

        def step(name: str, param: torch.Tensor) -> None:
            stepped.add(name)
            step_and_drop(param)

        trained = [(name, param) for name, param in self.params.items() if param.requires_grad]
        hooks = [param.register_post_accumulate_grad_hook(functools.partial(step, name)) for name, param in trained]
        super()._backward(loss)
        for hook in hooks:
            hook.remove()
        for param in () if self.makes_zeros else unused_in(self.case, self.params, stepped):
            step_and_drop(param)


class Ours(Stock):
    """FSDP2 with ``apply_zeropp``."""

    makes_zeros = True

    def __init__(self, case: Case, rank: int, folder: str, mesh: DeviceMesh) -> None:
        self.handles: list[ZeroPPHandle] = []
        self._aborted: set[nn.Module] = set()  # the models whose last backward pass raised
        super().__init__(case, rank, folder, mesh)
        self._apply()  # behind the optimizers, as Accelerate does it

    def _finish_models(self) -> None:
        if any(spec.meta for spec in self.case.models):
            self._apply()  # a model on meta has no optimizer yet
        super()._finish_models()

    def _apply(self) -> None:
        ranks_per_node = self.case.ranks_per_node * (self.case.groups if self.case.has_neighbours else 1)
        settings = UNQUANTIZED | dict(self.case.settings) | {"ranks_per_node": ranks_per_node}
        mesh = self.mesh["shard"] if self.case.mesh == "pp" else None
        self.handles = [apply_zeropp(model, settings, mesh=mesh) for model in self._models()]

    def _shard(self, net: Net, spec: ModelSpec) -> Net:
        return shard(net, spec, self.case, self.mesh, frozen_units=spec.frozen_units and self.case.has_nodes)

    def train(
        self, data: int, which: int | None, path: Sequence[int] | None, forwards: int, backwards: int, input_grad: bool
    ) -> Observation:
        """Gradients must not cross nodes more often than predicted, which their numbers would not show."""
        before = _num_crossings(handle.traffic.counts for handle in self.handles)
        seen = super().train(data, which, path, forwards, backwards, input_grad)
        crossings = _num_crossings(handle.traffic.counts for handle in self.handles) - before
        expected = _num_crossings(handle.predict() for handle in self.handles)
        # Reductions that a backward pass left when it raised end in the model's next pass.
        is_predictable = self._is_predictable and self._aborted.isdisjoint(self._used(which))
        self._aborted.difference_update(self._used(which))
        if is_predictable and path is None and forwards == backwards == 1 and crossings > expected:
            raise CrossedTwiceError(f"{crossings} reductions crossed nodes in one backward pass, expected {expected}")
        return seen

    def abort(self, data: int, which: int | None) -> Observation:
        self._aborted.update(self._used(which))
        return super().abort(data, which)

    @property
    def _is_predictable(self) -> bool:
        # Sums of earlier micro-steps cross by themselves where other parameters train by now, and FSDP2 goes on for a while with
        # the parameters that trained before.
        return not any(operation.name in ("freeze", "unfreeze") for operation in self.case.operations)

    def generate(self, data: int, which: int | None, times: int, budget: int) -> Observation:
        with contextlib.ExitStack() as stack:
            for model in self._models():
                stack.enter_context(generation_mode(model, budget))
            return super().generate(data, which, times, budget)

    def set_last(self, last: bool) -> None:
        for handle in self.handles:
            handle.set_last_micro_step(last)
        super().set_last(last)

    def discard(self) -> None:
        for handle in self.handles:
            handle.discard_accumulated()
        super().discard()

    def clip(self, norm: float, foreach: bool | None) -> Observation:
        self._complete_gradients()
        return super().clip(norm, foreach)

    def scale_grads(self, factor: float) -> None:
        self._complete_gradients()
        super().scale_grads(factor)

    def gradients(self) -> Observation:
        self._complete_gradients()
        return super().gradients()

    def _complete_gradients(self) -> None:
        """Do what a user does before gradients are looked at while micro-steps wait. Until then a look must raise."""
        for name, param in self.params.items():
            if param.grad is not None and isinstance(local_tensor_of(param.grad), PendingGradient):
                try:
                    param.grad + param.grad
                except RuntimeError as error:
                    if "a gradient that is not complete" in str(error):
                        continue
                    raise
                raise AssertionError(f"a look at the gradient of {name}, which is not complete, raised nothing")
        for handle in self.handles:
            handle.deliver()

    def invalidate(self) -> None:
        for handle in self.handles:
            handle.invalidate()

    def save_handle_state(self) -> None:
        for handle in self.handles:
            handle.save_state()

    def _models(self) -> Sequence[nn.Module]:
        """Return what ``apply_zeropp`` and ``generation_mode`` are called with."""
        return self.nets if self.container is None else [self.container]


def _num_crossings(of_handles: Iterable[Mapping[str, Bytes]]) -> int:
    """Return how many reductions crossed nodes, within replicas and between them."""
    return sum(counts.get(name, Bytes()).calls for counts in of_handles for name in (REDUCE_CROSS, REDUCE_REPLICAS))


def _abort(gradient: torch.Tensor) -> None:
    raise Aborted


Route = Callable[[list[torch.Tensor], float], None]


def _each(change: Callable[[torch.Tensor, float], object]) -> Route:
    @torch.no_grad()
    def route(params: list[torch.Tensor], factor: float) -> None:
        for param in params:
            change(param, factor)

    return route


def _multiply_memory(param: torch.Tensor, factor: float) -> None:
    memory = local(param).numpy()
    np.multiply(memory, factor, out=memory)


@torch.no_grad()
def _multiply_foreach(params: list[torch.Tensor], factor: float) -> None:
    of_meshes = defaultdict(list)
    for param in params:
        of_meshes[param.device_mesh].append(param)
    for together in of_meshes.values():
        torch._foreach_mul_(together, factor)


ROUTES: dict[str, Route] = {
    "in_place": _each(lambda param, factor: param.mul_(factor)),
    "local": _each(lambda param, factor: param.to_local().mul_(factor)),
    "detached": _each(lambda param, factor: param.detach().mul_(factor)),
    "data": _each(lambda param, factor: param.data.mul_(factor)),
    "numpy": _each(_multiply_memory),
    "foreach": _multiply_foreach,
}
