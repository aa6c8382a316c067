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


WAITS: dict[str, tuple[Callable[[torch.Stream], object], bool]] = {
    "wait_stream": (lambda side: side.wait_stream(current()), True),
    "wait_event": (lambda side: side.wait_event(current().record_event()), True),
    "wait": (lambda side: current().record_event().wait(side), True),
    "synchronize": (lambda side: current().synchronize(), True),
    "event": (lambda side: current().record_event().synchronize(), True),
    "device": (lambda side: torch.cpu.synchronize(), True),
    "item": (lambda side: torch.ones(1).item(), True),
    "event that was never recorded": (lambda side: side.wait_event(torch.cpu.Event()), False),
    "the other way round": (lambda side: current().wait_stream(side), False),
    "another stream": (lambda side: side.synchronize(), False),
}
"""Ways to wait, and whether each orders the two streams."""


@pytest.mark.parametrize("way", WAITS)
def test_whatever_waits_orders_two_streams(checker, way):
    order, is_enough = WAITS[way]
    write_and_read(order)
    assert len(checker.races) == (0 if is_enough else 1)


def test_an_event_orders_what_came_before_it_alone(checker):
    side = torch.cpu.Stream()
    x = torch.zeros(N)
    event = current().record_event()
    x.add_(1)
    side.wait_event(event)
    with torch.cpu.stream(side):
        x.mul(2)
    assert races_of(checker) == [("aten.add_.Tensor", "aten.mul.Tensor")]


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


# ------------------------------------------------------------------------------------------------------- memory used again


def use_on(side: torch.Stream) -> torch.Tensor:
    """Return memory of the default stream, which the other one still reads."""
    x = torch.zeros(N)
    side.wait_stream(current())
    with torch.cpu.stream(side):
        x.add(1)
    return x


@pytest.mark.parametrize(
    "before, is_early",
    [
        (lambda x, side: None, True),
        (lambda x, side: current().wait_stream(side), False),
        (lambda x, side: x.record_stream(side), False),
        (lambda x, side: x.record_stream(torch.cpu.Stream()), True),
    ],
    ids=["at once", "behind a wait", "record_stream", "record_stream of another"],
)
def test_freed_memory_is_used_again_on_its_stream(checker, before, is_early):
    side = torch.cpu.Stream()
    x = use_on(side)
    before(x, side)
    del x
    with torch.cpu.stream(torch.cpu.Stream()):
        torch.zeros(N)  # on a third stream, which does not get that memory
    assert checker.races == []
    torch.zeros(N)
    assert all(race.is_reuse for race in checker.races)
    assert races_of(checker) == ([("aten.add.Tensor", "aten.zeros.default")] if is_early else [])


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
