"""On GPUs no two streams touch the same memory unordered: every way through a step, under the happens-before checker.

One process stands for 2 nodes of 8 ranks, or for replicas on smaller nodes. ``tests/helpers/happens_before`` says what is looked
at, and what is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from checked_training import (
    FOUR_REPLICAS,
    NATIVE,
    QUANTIZED,
    RANKS_PER_NODE,
    REPLICAS,
    WHOLE_WIRES,
    Training,
    apply,
    training,
)
from happens_before import Checker, checked, checked_world, fake_world
from harness import run_ranks, selected
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from toy import EXACT, POLICIES, make_lm, shard
from ways_through_steps import (
    CONFIGURATIONS,
    decay_of_a_skipped_layer,
    hooks_on_all_reduces,
    one_loss_over_roots,
    passes_that_are_not_the_last,
    reentrant_checkpointing,
    roots_that_take_turns,
    secondary_shards_of_two_streams,
    steps,
    two_meshes,
)

from hf_zeropp.comm import collectives
from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import TwoHopReduce
from hf_zeropp.fsdp.gradients import backward_passes
from hf_zeropp.fsdp.gradients.drivers import StreamDriver
from hf_zeropp.fsdp.weights import copy, schedule

pytestmark = pytest.mark.one_rank

NUM_RANKS = 2 * RANKS_PER_NODE


class Outcome(NamedTuple):
    """The result of one run under the checker: the races as text, and the number of accesses that were checked."""

    races: list[str]
    num_accesses: int


def outcome_of_checker(checker: Checker) -> Outcome:
    return Outcome([str(race) for race in checker.races], checker.num_accesses)


# ---------------------------------------------------------------------------------------------------------------- faults


def forgetting(owner: Any, name: str, *fields: str) -> Callable[[], Any]:
    """Return a fault: FSDP2's record ``name`` is made without these fields, so that no stream waits for them."""
    make = getattr(owner, name)

    def forgetful(*args: Any) -> Any:
        # An event that was never recorded: torch 2.11 waits for the field without asking whether there is one.
        return make(*args)._replace(**{field: torch.cpu.Event() if "event" in field else None for field in fields})

    return lambda: mock.patch.object(owner, name, forgetful)


def no_wait_for_reductions() -> Any:
    """FSDP2's last callback lets the optimizer run into the reductions."""
    owner, name, context = FSDPParamGroup, "finalize_backward", "comm_ctx"
    if hasattr(FSDPState, "_end_backward_iteration"):  # since torch 2.15
        owner, name, context = FSDPState, "_end_backward_iteration", "_comm_ctx"
    finalize = getattr(owner, name)

    def finalize_at_once(self: Any) -> None:
        events = getattr(getattr(self, context), "_last_post_reduce_events", None)
        if events is None:  # torch 2.11, where each group waits for its own
            self._post_reduce_event = None
        else:
            events.clear()
        finalize(self)

    return mock.patch.object(owner, name, finalize_at_once)


def ahead_of_the_optimizer() -> None:
    """An event that was never recorded stands for the end of the optimizer's step."""
    train = training()
    for _ in range(2):
        train.step()
        train.model.set_post_optim_event(torch.cpu.Event())


class Fault(NamedTuple):
    """A mistake that must be reported.

    Attributes:
        plant: returns a context in which the mistake is made.
        run: a way through steps that meets it.
        operators: parts of the names of the two operators, or of their places, of one race that must be among those reported.
        is_reuse: whether that race is for memory that was freed.
    """

    plant: Callable[[], Any]
    run: Callable[[], None]
    operators: tuple[str, str]
    is_reuse: bool = False


@contextlib.contextmanager
def queue_at_once(ahead: schedule.GatherSchedule) -> Iterator[None]:
    """The stream of cross hops does not come behind the current one."""
    ahead._stream = ahead._stream or torch.cpu.Stream()
    with torch.cpu.stream(ahead._stream):
        yield


@contextlib.contextmanager
def ends_of_nested_passes() -> Iterator[None]:
    """A backward pass ends with the pass of autograd in which it reduces first, and forgets what is under way there."""
    with mock.patch.object(backward_passes.Backward, "enter", lambda passes: None), forgotten_memory():
        yield


def forgotten_memory() -> Any:
    """The end of a backward pass takes for granted that FSDP2 has waited."""
    return mock.patch.object(StreamDriver, "drain", StreamDriver.__init__)


@contextlib.contextmanager
def end_of_the_first_root() -> Iterator[None]:
    """A backward pass ends behind the callback of the root that it entered first, and forgets what is under way there."""

    def end(one: backward_passes._Pass) -> None:
        one.has_ended = True
        one._at_end()

    with mock.patch.object(backward_passes._Pass, "__call__", end), forgotten_memory():
        yield


def make_room_without_a_wait(driver: StreamDriver) -> None:
    driver._owner = torch.accelerator.current_stream()
    driver._held.clear()


def make_room_for_the_current_stream(driver: StreamDriver) -> None:
    """The stream that comes next waits for a cross hop, whosever memory it has."""
    driver._owner = torch.accelerator.current_stream()
    while driver._held:
        driver._owner.wait_event(driver._held.popleft()[0])


def no_wait_for_native(name: str) -> Any:
    """The collectives that this function of a node hop starts run on a stream of their own, which nothing waits for."""
    start = getattr(collectives, name)

    def start_only(output: torch.Tensor, rows: torch.Tensor, group: Any, async_op: bool) -> None:
        start(output, rows, group, True)

    return mock.patch.object(collectives, name, start_only)


no_wait_for_native_sums = functools.partial(no_wait_for_native, "reduce_scatter_rows")
no_wait_for_native_gathers = functools.partial(no_wait_for_native, "all_gather_rows")


def no_wait_before_replicas(index: int) -> Any:
    """A planted fault: replicas are added up from sums of a hop under way, the cross hop or the round before."""
    start = TwoHopReduce.start_replica_hop

    def start_at_once(hops: TwoHopReduce, this: int, flight: Flight, layouts: Any) -> Flight:
        return start(hops, this, flight if this != index else dataclasses.replace(flight, work=None), layouts)

    return mock.patch.object(TwoHopReduce, "start_replica_hop", start_at_once)


def no_wait_behind_replicas() -> Any:
    """The last hop is not waited for."""
    finish = TwoHopReduce.finish

    def finish_at_once(hops: TwoHopReduce, flight: Flight, *args: Any) -> None:
        finish(hops, dataclasses.replace(flight, work=None), *args)

    return mock.patch.object(TwoHopReduce, "finish", finish_at_once)


def no_wait_of_the_second_mesh() -> Any:
    """Words of experts are encoded on a stream of their own, before the host waits for the sizes of all others."""
    encode = schedule._encode

    def encode_on_two_streams(due: Sequence[schedule.WeightGather]) -> None:
        with torch.cpu.stream(torch.cpu.Stream()):
            encode([gather for gather in due if gather.hops is not due[0].hops])
        encode([gather for gather in due if gather.hops is due[0].hops])

    return mock.patch.object(schedule, "_encode", encode_on_two_streams)


native_steps = functools.partial(steps, **NATIVE)
steps_of_replicas = functools.partial(steps, **REPLICAS)
FREED_WIRES = (("dequantize_sum_out", "FSDP2's reduce_scatter_stream"), True)
"""The race of a reduction that gets the memory of a cross hop under way, as a ``Fault`` has it."""
STOCK_WITH_HOOKS = "stock FSDP2, hooks on all-reduces"
FAULTS = {
    "no work.wait()": Fault(
        lambda: mock.patch.object(Flight, "land", lambda flight, buffers: flight.received),
        steps,
        ("alltoall_base_", "dequantize_sum"),
    ),
    "no wait of the optimizer for gradients": Fault(no_wait_for_reductions, steps, ("dequantize_sum", "_foreach_")),
    "no wait of gathers for the optimizer": Fault(
        contextlib.nullcontext, ahead_of_the_optimizer, ("_foreach_addcdiv_", "_foreach_copy_")
    ),
    "the reduction's input is freed early": Fault(
        forgetting(_fsdp_param_group, "ReduceScatterState", "reduce_scatter_input", "event"),
        functools.partial(steps, **QUANTIZED),
        ("quantize_out", "post_backward"),
        is_reuse=True,
    ),
    "the input of native sums is freed early": Fault(
        forgetting(_fsdp_param_group, "ReduceScatterState", "reduce_scatter_input", "event"),
        native_steps,
        ("reduce_scatter_tensor_coalesced_", "post_backward"),
        is_reuse=True,
    ),
    "no wait for native sums": Fault(
        no_wait_for_native_sums, native_steps, ("reduce_scatter_tensor_coalesced_", "zeropp.quantize_out")
    ),
    "the gather's output is freed early": Fault(
        forgetting(_fsdp_param_group, "AllGatherState", "all_gather_result"),
        steps,
        ("split_with_sizes_copy", "all_gather_copy_in"),
        is_reuse=True,
    ),
    "no wait for a gather": Fault(
        forgetting(_fsdp_collectives, "AllGatherResult", "all_gather_event"),
        functools.partial(steps, **QUANTIZED),
        ("dequantize_out", "split_with_sizes_copy"),
    ),
    "no wait for the collectives of a native gather": Fault(
        no_wait_for_native_gathers, native_steps, ("allgather_into_tensor_coalesced_", "split_with_sizes_copy")
    ),
    "no wait of changed words for native gathers": Fault(
        no_wait_for_native_gathers,
        functools.partial(native_steps, sizes=WHOLE_WIRES, qwz_mode="exact"),
        ("allgather_into_tensor_coalesced_", "apply_changes"),
    ),
    "no wait of cross hops for the optimizer": Fault(
        lambda: mock.patch.object(schedule.GatherSchedule, "_queue", queue_at_once),
        steps,
        ("_foreach_add", "_foreach_copy_"),
    ),
    "no wait of the optimizer for cross hops": Fault(
        lambda: mock.patch.object(schedule.GatherSchedule, "wait_before_writes", lambda ahead: None),
        decay_of_a_skipped_layer,
        ("_foreach_copy_", "write on default stream: aten._foreach_mul_"),
    ),
    "no wait of reductions for cross hops": Fault(
        lambda: mock.patch.object(StreamDriver, "make_room", make_room_without_a_wait),
        steps,
        ("FSDP2's all_reduce_stream", "FSDP2's reduce_scatter_stream"),
        is_reuse=True,
    ),
    "the memory of cross hops is not held": Fault(
        lambda: mock.patch.object(StreamDriver, "_hold", lambda driver, tensors: None),
        steps,
        *FREED_WIRES,
    ),
    "nested passes end the backward pass": Fault(ends_of_nested_passes, reentrant_checkpointing, *FREED_WIRES),
    "a pass that is not the last forgets its memory": Fault(
        forgotten_memory, passes_that_are_not_the_last, *FREED_WIRES
    ),
    "another root's stream waits for memory": Fault(
        lambda: mock.patch.object(StreamDriver, "make_room", make_room_for_the_current_stream),
        roots_that_take_turns,
        *FREED_WIRES,
    ),
    "the end of the first root ends the backward pass": Fault(end_of_the_first_root, one_loss_over_roots, *FREED_WIRES),
    "no wait of replicas for cross hops": Fault(
        lambda: no_wait_before_replicas(0), steps_of_replicas, ("alltoall_base_", "dequantize_sum_quantize_out")
    ),
    "no wait of a round of replicas for the one before": Fault(
        lambda: no_wait_before_replicas(1),
        functools.partial(steps, **FOUR_REPLICAS),
        ("_allgather_base_", "dequantize_sum_quantize_out"),
    ),
    "no wait for the last round of replicas": Fault(
        no_wait_behind_replicas, steps_of_replicas, ("_allgather_base_", "zeropp.dequantize_sum_out")
    ),
    "no wait of an all-reduce for cross hops": Fault(
        lambda: no_wait_before_replicas(0),
        functools.partial(steps, **FOUR_REPLICAS, **EXACT),
        ("alltoall_base_", "zeropp.dequantize_sum_out"),
    ),
    "no wait for an all-reduce of replicas": Fault(
        no_wait_behind_replicas, functools.partial(steps, **FOUR_REPLICAS, **EXACT), ("allreduce_", "aten.copy_")
    ),
    "no wait of the second mesh's words for the optimizer": Fault(
        no_wait_of_the_second_mesh, functools.partial(two_meshes, qwz_mode="exact"), ("_foreach_add", "_foreach_copy_")
    ),
    "no wait for a secondary shard": Fault(
        lambda: mock.patch.object(copy, "record_event", lambda device: None),
        secondary_shards_of_two_streams,
        ("_allgather_base_", "read on FSDP2's all_gather_stream"),
    ),
}


# ---------------------------------------------------------------------------------------------------------- the tests


def outcome_of(run: Callable[[], None], plant: Callable[[], Any] = contextlib.nullcontext) -> Outcome:
    with checked_world(NUM_RANKS) as checker, plant():
        run()
    return outcome_of_checker(checker)


def outcomes_of(rank: int, names: list[str]) -> dict[str, Outcome]:
    """Run all that have these names in one process, since a start takes longer than a run."""
    outcomes = {name: outcome_of(run) for name, run in CONFIGURATIONS.items() if name in names}
    outcomes |= {name: outcome_of(fault.run, fault.plant) for name, fault in FAULTS.items() if name in names}
    return outcomes | {STOCK_WITH_HOOKS: outcome_of(lambda: hooks_on_all_reduces(lambda model: None))}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """The outcomes of the ways and faults that this run of pytest has selected, by name."""
    return run_ranks(outcomes_of, 1, selected(request, "name"), init=False, limit_s=300)[0]


@pytest.mark.thorough(
    "replicas, *",
    "two meshes, *",
    "values, *",
    "delta, *",
    "native sums, *",
    "native, *",
    "quantized within the node, *",
    "hops on one stream, *",
    "generation, *",
    "a copy on *",
    "accumulation on the rank, *",
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_way_through_a_step_has_a_race(outcomes, name):
    assert not outcomes[name].races, "\n".join(outcomes[name].races)
    assert outcomes[name].num_accesses > 1000


@pytest.mark.thorough(
    "no wait of replicas for cross hops",
    "no wait of a round of replicas for the one before",
    "no wait for the last round of replicas",
    "no wait for an all-reduce of replicas",
    "the input of native sums is freed early",
    "no wait for native sums",
    "no wait for the collectives of a native gather",
    "no wait of changed words for native gathers",
)
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_reported(outcomes, name):
    """The checker can fail: each order that is taken away makes a race of the two operators that it kept apart."""
    fault, races = FAULTS[name], outcomes[name].races
    kind = "freed memory" if fault.is_reuse else "the same memory"
    assert any(kind in race and all(part in race for part in fault.operators) for race in races), "\n".join(races)


LAYERS_70B = 80


def step_of_70b(rank: int) -> Outcome:
    """Run a step with as many units as a 70B model has, on 16 nodes of 8 ranks."""
    with fake_world(16 * 8) as host_groups:
        # FSDP2 cuts each parameter into 128 pieces when it shards. That takes longer than the step, and runs on one stream.
        model = shard(make_lm(depth=LAYERS_70B), POLICIES["bf16"])
        with checked(host_groups) as checker:
            handle = apply(model)
            # DTensor plans an operation on n parameters at once in n * n steps, so there is a group for each unit.
            groups = [{"params": unit.trainable} for unit in handle.units]
            Training(model, handle, torch.optim.AdamW(groups, foreach=True)).step()
        assert len(handle.units) == LAYERS_70B + 1
        return outcome_of_checker(checker)


def test_a_step_with_the_units_of_a_70b_model_has_no_race():
    [outcome] = run_ranks(step_of_70b, 1, init=False, limit_s=300)
    assert not outcome.races, "\n".join(outcome.races)
    assert outcome.num_accesses > 100 * LAYERS_70B


def test_fsdp2_has_a_race_up_to_torch_2_14_that_the_package_mends(outcomes):
    """With a hook on all-reduces FSDP2 adds a second micro-step's gradients on the hook's stream, and frees them too early.

    The memory was born on the stream of reductions, where the next reduction may get it before the addition has read it. The
    package keeps it (``ZeroPPReduceScatter._shown_output``). FSDP2 of torch 2.15 keeps it as well, and has no race.
    """
    races = outcomes[STOCK_WITH_HOOKS].races
    if torch.__version__ >= "2.15":
        assert not races
        return
    assert races
    assert all("freed memory" in race and "add_.Tensor at _fully_shard/_fsdp_collectives.py" in race for race in races)
