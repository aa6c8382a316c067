"""The happens-before checker itself, on programs written for it: what is a race on a GPU and what is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from happens_before import Checker, checked, checked_world

import hf_zeropp
from hf_zeropp import ops
from hf_zeropp.ops.format import Segment, WireLayout

N = 8


@pytest.fixture
def checker() -> Iterator[Checker]:
    with checked() as checker:
        yield checker


def current() -> torch.Stream:
    return torch.cpu.current_stream()


def races_of(checker: Checker) -> list[tuple[str, str]]:
    """Return the operators of each race."""
    return [(race.first.place.operator, race.second.place.operator) for race in checker.races]


# ------------------------------------------------------------------------------------------------------- the same memory


def write_and_read(order: Callable[[torch.Stream], None]) -> None:
    """Write on the default stream and read on another, with ``order`` between."""
    side = torch.cpu.Stream()
    x = torch.zeros(N)
    order(side)
    with torch.cpu.stream(side):
        x.add(1)


def test_two_streams_without_an_event_race(checker):
    write_and_read(lambda side: None)
    assert races_of(checker) == [("aten.zeros.default", "aten.add.Tensor")]
    assert "write on default stream: aten.zeros.default at fsdp/test_happens_before_model.py:" in str(checker.races[0])


@pytest.mark.parametrize(
    "order",
    [
        lambda side: side.wait_stream(current()),
        lambda side: side.wait_event(current().record_event()),
        lambda side: current().record_event().wait(side),
        lambda side: current().synchronize(),
        lambda side: current().record_event().synchronize(),
        lambda side: torch.cpu.synchronize(),
        lambda side: torch.ones(1).item(),
    ],
    ids=["wait_stream", "wait_event", "wait", "synchronize", "event", "device", "item"],
)
def test_whatever_waits_orders_two_streams(checker, order):
    write_and_read(order)
    assert checker.races == []


@pytest.mark.parametrize(
    "order",
    [
        lambda side: side.wait_event(torch.cpu.Event()),
        lambda side: current().wait_stream(side),
        lambda side: side.synchronize(),
    ],
    ids=["never recorded", "the other way round", "another stream"],
)
def test_waiting_for_something_else_orders_nothing(checker, order):
    write_and_read(order)
    assert len(checker.races) == 1


def test_an_event_orders_what_came_before_it_alone(checker):
    side = torch.cpu.Stream()
    x = torch.zeros(N)
    event = current().record_event()
    x.add_(1)
    side.wait_event(event)
    with torch.cpu.stream(side):
        x.mul(2)
    assert races_of(checker) == [("aten.add_.Tensor", "aten.mul.Tensor")]


def test_order_passes_through_a_third_stream(checker):
    first, second = torch.cpu.Stream(), torch.cpu.Stream()
    x = torch.zeros(N)
    first.wait_stream(current())
    second.wait_stream(first)
    with torch.cpu.stream(second):
        x.add_(1)
    assert checker.races == []


def test_two_reads_race_with_nothing_but_the_next_write(checker):
    side = torch.cpu.Stream()
    x = torch.zeros(N)
    side.wait_stream(current())
    with torch.cpu.stream(side):
        x.add(1)
    x.add(1)
    assert checker.races == []
    x.zero_()
    assert races_of(checker) == [("aten.add.Tensor", "aten.zero_.default")]


def test_parts_of_a_tensor_race_where_they_overlap(checker):
    side = torch.cpu.Stream()
    x = torch.zeros(N)
    side.wait_stream(current())
    x[: N // 2].add_(1)
    with torch.cpu.stream(side):
        x[N // 2 :].mul_(2)
        assert checker.races == []
        x[N // 2 - 1 :].mul_(2)
    assert len(checker.races) == 1


def test_views_touch_nothing(checker):
    side = torch.cpu.Stream()
    x = torch.zeros(N)
    with torch.cpu.stream(side):
        x.view(2, -1)[0].detach().t()
    assert checker.races == []


# ------------------------------------------------------------------------------------------------------- memory used again


def use_on(side: torch.Stream) -> torch.Tensor:
    """Return memory of the default stream, which the other one still reads."""
    x = torch.zeros(N)
    side.wait_stream(current())
    with torch.cpu.stream(side):
        x.add(1)
    return x


def test_freed_memory_is_used_again_too_early(checker):
    x = use_on(torch.cpu.Stream())
    del x
    torch.zeros(N)
    assert [race.is_reuse for race in checker.races] == [True]
    assert races_of(checker) == [("aten.add.Tensor", "aten.zeros.default")]


def test_memory_that_is_kept_is_not_used_again(checker):
    x = use_on(torch.cpu.Stream())
    torch.zeros(N)
    assert checker.races == []
    del x


def test_freed_memory_stays_with_its_stream(checker):
    """It was born on the default stream, so a third stream does not get it."""
    x = use_on(torch.cpu.Stream())
    del x
    with torch.cpu.stream(torch.cpu.Stream()):
        torch.zeros(N)
    assert checker.races == []


def test_freed_memory_may_be_used_again_after_a_wait(checker):
    side = torch.cpu.Stream()
    x = use_on(side)
    del x
    current().wait_stream(side)
    torch.zeros(N)
    assert checker.races == []


def test_record_stream_keeps_memory_until_the_stream_is_done(checker):
    side = torch.cpu.Stream()
    x = use_on(side)
    x.record_stream(side)
    del x
    torch.zeros(N)
    assert checker.races == []


def test_record_stream_speaks_for_its_stream_alone(checker):
    side = torch.cpu.Stream()
    x = use_on(side)
    x.record_stream(torch.cpu.Stream())
    del x
    torch.zeros(N)
    assert len(checker.races) == 1


def test_a_storage_without_memory_has_given_it_back(checker):
    """FSDP2 frees unsharded parameters so, and keeps the tensors."""
    x = use_on(torch.cpu.Stream())
    x.untyped_storage().resize_(0)
    torch.zeros(N)
    assert [race.is_reuse for race in checker.races] == [True]


# ------------------------------------------------------------------------------------------- collectives and our operators


def test_an_asynchronous_collective_ends_where_somebody_waits_for_it():
    for waits in (True, False):
        with checked_world(4) as checker:
            received, sent = torch.zeros(N), torch.ones(N)
            work = dist.all_to_all_single(received, sent, async_op=True)
            if waits:
                work.wait()
            received.add(1)
        assert races_of(checker) == ([] if waits else [("c10d.alltoall_base_.default", "aten.add.Tensor")])


def test_a_collective_that_nobody_waited_for_keeps_its_memory():
    with checked_world(4) as checker:
        received, sent = torch.zeros(N), torch.ones(N)
        work = dist.all_to_all_single(received, sent, async_op=True)
        del received, sent
        torch.zeros(N)
        assert checker.races == []
        del work


def test_a_synchronous_collective_runs_on_the_callers_stream():
    with checked_world(4) as checker:
        side = torch.cpu.Stream()
        received, sent = torch.zeros(4 * N), torch.ones(N)
        with torch.cpu.stream(side):
            dist.all_gather_into_tensor(received, sent)
    assert ("aten.ones.default", "c10d._allgather_base_.default") in races_of(checker)


def test_schemas_of_our_operators_say_what_is_written(checker):
    layout = WireLayout([Segment(64, 8)], 32, torch.float32)
    side = torch.cpu.Stream()
    x, wire = torch.zeros(64), torch.empty(layout.nbytes, dtype=torch.uint8)
    ops.quantize(x, layout, out=wire)
    with torch.cpu.stream(side):
        ops.dequantize(wire, layout, dtype=torch.float32)
    assert races_of(checker) == [("zeropp.quantize_out.default", "zeropp.dequantize.default")]


def test_a_collective_of_which_nothing_is_known_is_refused():
    with checked_world(4):
        with pytest.raises(NotImplementedError, match="c10d::reduce_ does not say what it writes"):
            dist.reduce(torch.zeros(N), 0)


# ------------------------------------------------------------------------------------------------------ the package's ways

ASKS_FOR_CPU = {
    "fsdp.weights.fingerprint": 1,  # page-locked memory, which there is for accelerators alone
    "devices": 1,  # the one question, which the checker answers
    "comm.topology": 1,  # the index of a device, for a broadcast before training
}


def test_every_place_that_asks_for_a_cpu_is_known():
    """One that does not ask ``devices.has_streams`` would take its way for CPU under the checker, and another on GPUs."""
    found = {}
    for path in (Path(hf_zeropp.__file__).parent).rglob("*.py"):
        module = ".".join(path.relative_to(Path(hf_zeropp.__file__).parent).with_suffix("").parts)
        asks = re.findall(r'[=!]= "cpu"', path.read_text())
        if asks and module.partition(".")[0] not in ("ops", "estimate", "integrations", "cli"):
            found[module] = len(asks)
    assert found == ASKS_FOR_CPU
