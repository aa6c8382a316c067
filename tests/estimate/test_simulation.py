"""Check the simulation of one step against schedules that were computed by hand, and against what no schedule can break."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zeropp.estimate.simulation import NETWORK, PROCESSOR, Stage, Task, simulate
from hf_zeropp.estimate.step_time import step_tasks
from hf_zeropp.estimate.unit_work import UnitWork


def task(stream: str, seconds: float, resource: str = "r", latency: float = 0.0, after: tuple[int, ...] = ()) -> Task:
    return Task(Stage("", ((resource, seconds),), latency), stream, after)


def stage(resource: str, seconds: float) -> Stage:
    return Stage("", ((resource, seconds),))


@pytest.mark.parametrize(
    ("tasks", "ends"),
    [
        ([task("a", 1), task("a", 2)], [1, 3]),  # one stream: one after the other
        ([task("a", 1, "x"), task("b", 2, "y")], [1, 2]),  # two streams, two resources
        ([task("a", 2), task("b", 2)], [4, 4]),  # two streams share one: each is half as fast
        ([task("a", 1), task("b", 3)], [2, 4]),  # when the shorter ends, the longer has 2 of 3 seconds left
        ([task("a", 1), task("b", 1, "y", after=(0,))], [1, 2]),  # it waits for another stream
        ([task("a", 1, latency=1), task("b", 1)], [2, 1]),  # latency uses nothing
        ([task("a", 0), task("a", 1)], [0, 1]),  # a task may be empty
    ],
)
def test_schedules_computed_by_hand(tasks: list[Task], ends: list[float]) -> None:
    assert simulate(tasks) == pytest.approx(ends)


def test_a_task_that_half_uses_a_resource_leaves_the_other_half() -> None:
    """A wire needs 4 s of the network and 2 s of the processor: alone it uses half of the processor."""
    wire = Task(Stage("wire", ((NETWORK, 4.0), (PROCESSOR, 2.0))), "a")
    half = Task(Stage("half", ((PROCESSOR, 1.0), ("other", 2.0))), "b")
    whole = Task(Stage("whole", ((PROCESSOR, 4.0),)), "b")
    assert simulate([wire, half]) == pytest.approx([4, 2])
    # Together they ask for 1.5 processors, so both run at 2/3: the wire for 6 s, and the other for as long.
    assert simulate([wire, whole]) == pytest.approx([6, 6])


def test_two_units_on_streams() -> None:
    """Gathers take 1 s, forward 2 s, backward 4 s, reductions 1 s, the optimizer 0.5 s.

    Gathers end at 1 and 2, forward passes at 3 and 5, the gathers for backward at 3 and 6, backward passes at 9 and 13. The
    first reduction hides behind the second backward pass; the last ends at 14, and the optimizer at 14.5.
    """
    gather, reduce = (stage(NETWORK, 1),), (stage(PROCESSOR, 0), stage(NETWORK, 1))
    copies = (stage(PROCESSOR, 0),)
    tasks = step_tasks(
        [UnitWork(2, 4, gather, gather, gather, reduce, reduce, copies=copies)] * 2, 1, 0.5, blocks=False
    )
    assert ends_of(tasks, "forward") == pytest.approx([3, 5])
    assert ends_of(tasks, "backward") == pytest.approx([9, 13])
    assert ends_of(tasks, "optimizer") == pytest.approx([14.5])
    # Without prefetching every gather adds its second: 6 s forward, 11 at the first backward pass. The gather that follows
    # shares the network with the reduction, so it ends at 13, the second backward pass at 17, the last reduction at 18.
    alone = UnitWork(2, 4, gather, gather, gather, reduce, reduce, prefetches=False)
    assert max(simulate(step_tasks([alone] * 2, 1, 0.5, blocks=False))) == pytest.approx(18.5)


def test_reductions_hold_up_the_next_copy() -> None:
    """A reduction of 9 s outlasts the next backward pass of 4 s: the copy behind that waits, and so does the optimizer."""
    reduce = (stage(PROCESSOR, 0), stage(NETWORK, 9))
    tasks = step_tasks([UnitWork(2, 4, reduce_last=reduce)] * 3, 1, 0, blocks=False)
    # Forward passes end at 6, backward passes at 10 and 14; the reductions follow each other and end at 19, 28, 37. The second
    # copy waits until 19, and the third backward pass stands behind it.
    assert ends_of(tasks, "backward")[-1] == pytest.approx(23)
    assert max(simulate(tasks)) == pytest.approx(37)


def test_two_units_that_block() -> None:
    """Under gloo FSDP2's collectives block: (1 + 2) twice, (1 + 4 + 1) twice, and the optimizer."""
    gather, reduce = (stage(NETWORK, 1),), (stage(NETWORK, 1),)
    units = [UnitWork(2, 4, gather, gather, gather, reduce, reduce)] * 2
    assert max(simulate(step_tasks(units, 1, 0.5, blocks=True))) == pytest.approx(18.5)


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for index in range(draw(st.integers(1, 12))):
        seconds = st.floats(0, 5)
        demands = tuple((name, draw(seconds)) for name in draw(st.sets(st.sampled_from("xyz"), max_size=3)))
        after = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        stage = Stage(f"{index}", demands, draw(seconds))
        tasks.append(Task(stage, draw(st.sampled_from("abc")), tuple(after)))
    return tasks


@settings(deadline=None, max_examples=150)
@given(programs())
def test_no_schedule_breaks_these(tasks: list[Task]) -> None:
    """Streams keep their order, waits are kept, no resource does more than it can, and nothing is slower than one by one."""
    all_ends = simulate(tasks)
    ends: dict[str, float] = {}
    for one, end in zip(tasks, all_ends, strict=True):
        ready = max([ends.get(one.stream, 0.0), *(all_ends[index] for index in one.after)])
        assert end >= ready + one.stage.latency + one.stage.work_s - 1e-6
        ends[one.stream] = end
    for resource in "xyz":
        needed = sum(seconds for one in tasks for name, seconds in one.stage.demands if name == resource)
        assert max(all_ends) >= needed - 1e-6
    # A wait for two resources may add up, but no more than all demands of all tasks.
    in_turns = sum(one.stage.latency + sum(seconds for _, seconds in one.stage.demands) for one in tasks)
    assert max(all_ends) <= in_turns + 1e-6


def ends_of(tasks: list[Task], name: str) -> list[float]:
    """Return when the tasks of that name end, in the order in which a rank issues them."""
    return [end for one, end in zip(tasks, simulate(tasks), strict=True) if one.stage.name == name]
