"""Operators as PyTorch dispatches them: which tensors each of them reads and writes, on which stream.

An operator's schema says it. An argument that is marked as written (``Tensor(a!)``) is written, an argument that a result is a
view of (``Tensor(a)``) is not touched, and every other one is read. A result in new memory is allocated and written. The schemas
of collectives and of one operator of FSDP2 mark nothing, so ``UNMARKED`` says what they write. An operator is looked at as a
whole: memory that it uses only inside is not seen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from happens_before.clocks import Clock, Event, Stream, Timeline
from happens_before.memory import Memory, Place

UNMARKED = {
    "fsdp::all_gather_copy_in": {"all_gather_output"},
    "c10d::_allgather_base_": {"output_tensor"},
    "c10d::allgather_into_tensor_coalesced_": {"outputs"},
    "c10d::_reduce_scatter_base_": {"output_tensor"},
    "c10d::reduce_scatter_tensor_coalesced_": {"outputs"},
    "c10d::alltoall_base_": {"output"},
    "c10d::allgather_": {"output_tensors"},
    "c10d::allreduce_": {"tensors"},
    "c10d::broadcast_": {"tensors"},
    "c10d::barrier": set(),
}
"""The arguments that some operators write although their schemas do not mark them as written."""

WITHOUT_CONTENT = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose results are allocated and not written."""

BLOCKING = ("_local_scalar_dense", "equal", "nonzero")
"""Operators for whose result the host waits."""

FUNCTIONAL = "_c10d_functional"


class Argument(NamedTuple):
    """An argument of a schema: its name, and whether it is written, or looked through by a view."""

    name: str
    is_written: bool
    is_viewed: bool


class Launch(NamedTuple):
    """An asynchronous collective under way.

    Attributes:
        end: recorded behind it.
        tensors: its arguments, which PyTorch keeps until the collective is waited for.
    """

    end: Event
    tensors: list[torch.Tensor]


class Operation(NamedTuple):
    """An operator that a stream was given.

    Attributes:
        func: the operator.
        arguments: its arguments by name.
        tensors: those that it touches, its result included, each with whether it is written.
        stream: where it runs.
        clock: what happens before it, itself included.
        step: the step of FSDP2 within which it was started.
    """

    func: Any
    arguments: dict[str, Any]
    tensors: list[tuple[torch.Tensor, bool]]
    stream: Stream
    clock: Clock
    step: str


class Watch(TorchDispatchMode):
    """Tells ``memory`` of all accesses of the operators that run under it.

    Args:
        timeline: the streams.
        memory: the blocks.
        step: the step of FSDP2 under way, for people.
        answer: called after a collective, to put something into its output.
        host_groups: names of the process groups that move the host's memory.
        observe: called with each operator that a stream was given.

    Attributes:
        launched: the asynchronous collective that was launched last, until it is taken.
    """

    def __init__(
        self,
        timeline: Timeline,
        memory: Memory,
        step: Callable[[], str],
        answer: Callable[..., None],
        host_groups: Collection[str],
        observe: Callable[[Operation], None] | None = None,
    ) -> None:
        super().__init__()
        self.launched: Launch | None = None
        self._timeline = timeline
        self._memory = memory
        self._step = step
        self._answer = answer
        self._host_groups = host_groups
        self._observe = observe
        self._functional: dict[int, Launch] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # DTensor looks for shardings with tensors that hold nothing.
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        # A tensor subclass unpacks itself first. Its inner tensors come back here.
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func.namespace == FUNCTIONAL:
            return self._functional_collective(func, args, kwargs)
        result = self._run(func, self._timeline.current, args, kwargs)
        if func._overloadpacket.__name__ in BLOCKING:
            self._timeline.current.synchronize()
        return result

    def _run(self, func: Any, stream: Stream, args: tuple, kwargs: dict) -> Any:
        """Run an operator on ``stream``, and note its accesses and what it allocates."""
        tick, place = stream.launch(), Place(str(func), _line(), self._step())
        clock = dict(stream.clock) if self._observe else {}
        touched: list[tuple[torch.Tensor, bool]] = []
        viewed, inputs = [], set()
        for argument, tensor in _tensor_arguments(func, args, kwargs):
            inputs.add(tensor.untyped_storage()._cdata)
            if argument.is_viewed:
                viewed.append(tensor)
            else:
                touched.append((tensor, argument.is_written))
                self._memory.access(tensor, stream, tick, place, writes=argument.is_written)
        result = func(*args, **kwargs)
        created = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in inputs]
        # Operators such as ``contiguous`` and ``to`` may return a view or a copy. Only a copy reads.
        for tensor in viewed if created else ():
            touched.append((tensor, False))
            self._memory.access(tensor, stream, tick, place, writes=False)
        for tensor in created:
            if not self._memory.knows(tensor.untyped_storage()):
                self._memory.allocate(tensor.untyped_storage())
            if func._overloadpacket.__name__ not in WITHOUT_CONTENT:
                touched.append((tensor, True))
                self._memory.access(tensor, stream, tick, place, writes=True)
        if self._observe:
            self._observe(Operation(func, _by_name(func, args, kwargs), touched, stream, clock, place.step))
        return result

    def _collective(self, func: Any, args: tuple, kwargs: dict) -> Any:
        values = _by_name(func, args, kwargs)
        group = dist.ProcessGroup.unbox(values["process_group"])
        if group.group_name in self._host_groups:
            for _, tensor in _tensor_arguments(func, args, kwargs):
                self._memory.exempt(tensor.untyped_storage())
            result = func(*args, **kwargs)
        elif values.get("async_op", True):
            result = self._launch(group.group_name, func, args, kwargs)
        else:
            # NCCL runs a collective for which the caller waits at once on the caller's stream.
            result = self._run(func, self._timeline.current, args, kwargs)
        self._answer(func, group, values)
        return result

    def _launch(self, group: str, func: Any, args: tuple, kwargs: dict) -> Any:
        stream = self._timeline.stream_of_group(group)
        stream.wait_stream(self._timeline.current)
        result = self._run(func, stream, args, kwargs)
        tensors = [tensor for _, tensor in _tensor_arguments(func, args, kwargs)]
        self.launched = Launch(stream.record_event(), [*tensors, *tensors_in(result)])
        return result

    def _functional_collective(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run a collective of DTensor, which is launched in one operator and waited for in another."""
        values = _by_name(func, args, kwargs)
        if func._overloadpacket.__name__ == "wait_tensor":
            launch = self._functional.pop(values["tensor"].untyped_storage()._cdata, None)
            if launch is not None:
                self._timeline.current.wait_event(launch.end)
        if "group_name" not in values:
            return func(*args, **kwargs)
        result = self._launch(values["group_name"], func, args, kwargs)
        for tensor in tensors_in(result):
            self._functional[tensor.untyped_storage()._cdata] = self.launched
        return result


@functools.cache
def arguments_of(func: Any) -> tuple[Argument, ...]:
    """Return what the schema says of an operator's arguments."""
    name = func._schema.name
    marks_writes = any(argument.alias_info is not None for argument in func._schema.arguments)
    if func.namespace in ("c10d", "fsdp") and name not in UNMARKED and not marks_writes:
        raise NotImplementedError(f"The schema of {name} does not say what it writes: add it to UNMARKED.")
    unmarked = UNMARKED.get(name, set())
    return tuple(
        Argument(
            argument.name,
            argument.name in unmarked or (argument.alias_info is not None and argument.alias_info.is_write),
            argument.alias_info is not None and not argument.alias_info.is_write,
        )
        for argument in func._schema.arguments
    )


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a value that are on the device: a tensor, or a list of values."""
    if isinstance(value, torch.Tensor):
        return (value,) if value.device.type == "cpu" and value.layout == torch.strided else ()
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    return ()


def _by_name(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(arguments_of(func), args, strict=False)} | kwargs


def _tensor_arguments(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Argument, torch.Tensor]]:
    arguments = arguments_of(func)
    for argument, value in zip(arguments, args, strict=False):
        for tensor in tensors_in(value):
            yield argument, tensor
    for argument in arguments if kwargs else ():
        for tensor in tensors_in(kwargs.get(argument.name)):
            yield argument, tensor


_HIDDEN = ("/torch/", "/happens_before/", "<")


def _line() -> str:
    """Return the nearest line of the call that is FSDP2's, the package's or a test's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/_fully_shard/" in name or not any(part in name for part in _HIDDEN):
            parts = name.rsplit("/", 2)
            return f"{'/'.join(parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
