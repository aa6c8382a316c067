"""The names that the checker replaces while it runs: PyTorch's streams, and the package's question whether a device has any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from happens_before.clocks import Stream, Timeline
from happens_before.dispatch import Launch, Watch
from happens_before.memory import Memory
from hf_zeropp import devices

COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_to_all_single", "allgather", "allreduce", "broadcast")
# Before torch 2.13 three of them had other names.
COLLECTIVES += ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
COLLECTIVES += ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")


@contextlib.contextmanager
def replaced(*tables: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes while this lasts. A table has the new values by owner and name."""
    with contextlib.ExitStack() as stack:
        for table in tables:
            for (owner, name), value in table.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


def streams_of_torch(timeline: Timeline, memory: Memory, watch: Watch) -> dict[tuple[Any, str], Any]:
    """Return PyTorch's streams, events, works and frees as the model has them."""
    resize, works = torch.UntypedStorage.resize_, {}

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        # FSDP2 frees and allocates the memory of unsharded parameters so. The storage lives on without memory.
        if memory.knows(storage):
            memory.free(storage._cdata)
        result = resize(storage, size)
        if size:
            memory.allocate(storage)
        return result

    def wait(work: dist.Work, *timeout: Any) -> bool:
        # There is nothing to wait for but on the model's streams.
        _, launch = works.pop(id(work), (None, None))
        if launch is not None:
            timeline.current.wait_event(launch.end)
        return True

    def launching(call: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            watch.launched = None
            work = call(*args, **kwargs)
            if isinstance(watch.launched, Launch):
                # The work is kept, so that no other one gets its address.
                works[id(work)] = work, watch.launched
            return work

        return collective

    return {
        (torch.cpu, "Stream"): timeline.new_stream,
        (torch.cpu, "Event"): timeline.new_event,
        (torch.cpu, "current_stream"): lambda *device: timeline.current,
        (torch.cpu, "stream"): timeline.on,
        (torch.cpu, "synchronize"): timeline.synchronize,
        (torch.accelerator, "current_stream"): lambda *device: timeline.current,
        (torch.accelerator, "synchronize"): timeline.synchronize,
        (torch.Tensor, "record_stream"): lambda tensor, stream: memory.record_stream(tensor, stream),
        (torch.UntypedStorage, "resize_"): resize_,
        (FakeWork, "wait"): wait,
    } | {
        (dist.ProcessGroup, name): launching(getattr(dist.ProcessGroup, name))
        for name in COLLECTIVES
        if hasattr(dist.ProcessGroup, name)
    }


def has_streams(timeline: Timeline) -> dict[tuple[Any, str], Any]:
    """Return the package's answers for a device with streams."""
    return {(devices, "has_streams"): lambda device: True}


def steps_of_fsdp2(steps: list[str]) -> dict[tuple[Any, str], Any]:
    """Return FSDP2's profiler ranges, which name the step and the unit, as entries of ``steps``; and names for its streams."""
    lazy_init = _fsdp_param_group.FSDPCommContext.lazy_init

    @contextlib.contextmanager
    def record_function(name: str) -> Iterator[None]:
        steps.append(name)
        try:
            yield
        finally:
            steps.pop()

    def init_with_names(context: Any, device: torch.device) -> None:
        lazy_init(context, device)
        for name, value in vars(context).items():
            if isinstance(value, Stream):
                value.name = f"FSDP2's {name}"

    return {
        (_fsdp_param_group, "record_function"): record_function,
        (_fsdp_param_group.FSDPCommContext, "lazy_init"): init_with_names,
    }
