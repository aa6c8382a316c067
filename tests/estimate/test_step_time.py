"""Predicted step times: bytes are those of a run, bounds hold, and more of anything never costs time."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zeropp.config import PRESETS, ZeroPPConfig
from hf_zeropp.estimate.cluster import GPUS, Cluster, gpu_cluster
from hf_zeropp.estimate.memory_and_bytes import fsdp2, ours, paper_methods
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.simulation import simulate
from hf_zeropp.estimate.step_order import ALL_REDUCE, CROSS, GATHER, MAIN, REDUCE
from hf_zeropp.estimate.step_time import SETTINGS, StepTime, method_names, program_of, step_time, token_s
from hf_zeropp.estimate.step_time_report import Row, compare, memory_of, recommended
from hf_zeropp.estimate.training_job import Job, Setup

CONFIGS = {
    "balanced": {},
    "paper": {"preset": "paper"},
    "half_model": {"preset": "half_model"},
    "min_traffic": {"preset": "min_traffic"},
    "no secondary": {"hpz_size": None},
    "secondary of one rank": {"hpz_size": 1},
    "unquantized": {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None},
}
MODEL = ModelShape.of_count("350M")


def job(
    model: ModelShape = MODEL, micro_steps: int = 1, gbit: float = 100, config: dict | None = None, **kwargs
) -> Job:
    setup = Setup(16, 4, micro_steps, config=ZeroPPConfig.resolve(config or {}))
    return Job(model, setup, gpu_cluster(GPUS["h100"], 16, 4, gbit * 1e9 / 8), 2048, **kwargs)


@pytest.mark.parametrize("micro_steps", [1, 2, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_that_a_run_predicts(name: str, micro_steps: int) -> None:
    """``ours`` counts with the functions by which a run predicts its traffic; test_estimate.py compares it with runs."""
    one = job(micro_steps=micro_steps, config=CONFIGS[name])
    sent, line = program_of(one, SETTINGS).traffic, ours(MODEL, one.setup)
    # Counted are the bytes of one rank, and those of a node's N ranks.
    assert 4 * sent.cross_node == pytest.approx(line.cross_node, rel=1e-9)
    assert 4 * sent.intra_node == pytest.approx(line.intra_node, rel=1e-9)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_flat_methods_send_what_a_ring_sends(micro_steps: int) -> None:
    """A ring sends (W-1)/W of each gather over a node's network, where the least is (Y-1)/Y."""
    one = job(micro_steps=micro_steps)
    ring, least = 15 / 16, 3 / 4
    lines = {line.method: line for line in paper_methods(MODEL, one.setup)} | {"FSDP2": fsdp2(MODEL, one.setup)}
    for method in ("ZeRO-3", "FSDP2", "DDP", "hpZ"):
        sent = 4 * program_of(one, method).traffic.cross_node
        assert sent == pytest.approx(lines[method].cross_node * ring / least, rel=2e-3), method
    # HSDP all-reduces over the Y nodes alone.
    sent = 4 * program_of(one, "HSDP").traffic.cross_node
    assert sent == pytest.approx(lines["MiCS / HSDP"].cross_node, rel=2e-3)


def test_hsdp_with_one_rank_per_node_is_an_all_reduce() -> None:
    """Nothing is sharded then, and the gradients of all weights cross between the nodes."""
    setup = Setup(8, 1)
    one = Job(MODEL, setup, gpu_cluster(GPUS["h100"], 8, 1, 1e9), 2048)
    hsdp, ddp = (program_of(one, method).traffic.cross_node for method in ("HSDP", "DDP"))
    assert hsdp == pytest.approx(ddp, rel=1e-3) and step_time(one, "HSDP").exposed > 0.5


def test_frozen_base_is_gathered_within_the_node_in_its_bits() -> None:
    model = ModelShape.of_count("350M").with_lora(8)
    for bits in (None, 8, 4):
        one = job(model, config={"frozen_bits": bits})
        sent, line = program_of(one, SETTINGS).traffic, ours(model, one.setup)
        assert 4 * sent.cross_node == pytest.approx(line.cross_node, rel=1e-9)
        assert 4 * sent.intra_node == pytest.approx(line.intra_node, rel=1e-9)
    # A packed base is decoded in every forward and backward pass: codes are read, and 16-bit weights are written.
    one = job(model, micro_steps=2, config={"frozen_bits": 4})
    decoding = [task for task in program_of(one, SETTINGS).tasks if task.name.startswith("decode frozen")]
    num_bytes = sum(task.seconds_alone for task in decoding) * one.cluster.device.kernel_rate
    frozen = sum(param.numel for unit in model.frozen_units for param in unit.params)
    assert num_bytes == pytest.approx(2 * 2 * (2 + 0.5) * frozen, rel=0.02)  # and scales
    packed, plain = (token_s(job(model, config={"frozen_bits": bits}), SETTINGS) for bits in (4, None))
    assert packed < plain


@settings(deadline=None, max_examples=25)
@given(
    method=st.sampled_from(method_names()),
    micro_steps=st.integers(1, 3),
    gbits=st.tuples(st.floats(0.1, 4000), st.floats(0.1, 4000)),
    checkpointing=st.booleans(),
)
def test_bounds_and_monotony(method: str, micro_steps: int, gbits: tuple[float, float], checkpointing: bool) -> None:
    slow, fast = (
        step_time(job(SMALL, micro_steps, gbit, checkpointing=checkpointing), method) for gbit in sorted(gbits)
    )
    for one in (slow, fast):
        assert one.step_s >= one.compute_s and one.step_s >= one.network_s
        assert 0 <= one.exposed < 1
    assert fast.step_s <= slow.step_s * 1.001  # tasks that share resources may hinder each other by a little
    more = step_time(job(SMALL, micro_steps + 1, gbits[0], checkpointing=checkpointing), method)
    assert more.step_s > step_time(job(SMALL, micro_steps, gbits[0], checkpointing=checkpointing), method).step_s


SMALL = ModelShape.of_count("60M")


@pytest.mark.parametrize("method", method_names())
def test_alike_micro_steps_are_not_simulated_again(method: str) -> None:
    """The prediction of 8 micro-steps simulates 3 of them. The whole simulation says the same."""
    one = job(SMALL, micro_steps=8)
    assert step_time(one, method).step_s == pytest.approx(whole_s(one, method), rel=0.01)


def whole_s(one: Job, method: str) -> float:
    return max(span.end for span in simulate(program_of(one, method).tasks))


def test_checkpointing_costs_one_forward_pass() -> None:
    plain, recomputing = (step_time(job(gbit=1e6, checkpointing=flag), "FSDP2").compute_s for flag in (False, True))
    optimizer = plain - 3 * (recomputing - plain)  # forward and backward are three forward passes
    assert 0 < optimizer < 0.1 * plain


def test_mfu_counts_six_operations_per_weight_and_token() -> None:
    one = job(micro_steps=2)
    found = step_time(one, "FSDP2")
    assert found.mfu(one) == pytest.approx(6 * MODEL.num_params * 2048 * 2 / found.step_s / 989.5e12)
    assert found.tokens_per_s(one) == pytest.approx(2048 * 2 * 16 / found.step_s)


def test_half_of_the_experts_take_half_of_the_computation() -> None:
    models = (dataclasses.replace(MODEL, active=share) for share in (1.0, 0.5))
    whole, half = (step_time(job(model), "DDP").compute_s for model in models)
    assert half < 0.75 * whole


def test_405b_on_1024_gpus_takes_less_than_two_seconds() -> None:
    """The whole comparison, in processor time: other programs on the machine do not count."""
    start = time.process_time()
    model = ModelShape.of_count("405B")
    setup = Setup(1024, 8, micro_steps=8)
    one = Job(model, setup, gpu_cluster(GPUS["h100"], 1024, 8, 400e9 / 8), 2048)
    assert all(step_time(one, method).step_s > 0 for method in method_names())
    assert time.process_time() - start < 2


def test_the_recommendation_follows_the_network() -> None:
    """On a slow network fewer bytes win; on one without limits, where they do not matter, fewer kernels do."""
    for gbit, preset in ((1, "min_traffic"), (100_000, "balanced")):
        rows = compare(job(micro_steps=2, gbit=gbit), 80e9)
        row = recommended(rows)
        assert row is not None and row.method == preset
    assert recommended(compare(job(), 1e6)) is None  # nothing fits a megabyte


def test_exact_is_recommended_where_the_share_of_changes_is_known() -> None:
    rows = compare(job(gbit=1), 80e9)
    row = recommended(rows, knows_changes=True)
    assert row is not None and row.method == "exact"


@pytest.mark.parametrize(
    ("seconds", "unfit", "preset"),
    [
        ({"balanced": 1.02, "min_traffic": 1.0}, "", "balanced"),  # equally fast: the more exact one
        ({"balanced": 1.04, "min_traffic": 1.0}, "", "min_traffic"),
        ({"balanced": 1.02, "min_traffic": 1.0}, "balanced", "min_traffic"),
        ({"balanced": 1.0, "min_traffic": 2.0}, "balanced", "min_traffic"),
        ({"paper": 1.0, "FSDP2": 0.1}, "", "paper"),  # stock is not a preset; a sentence says that it is faster
    ],
)
def test_the_most_exact_of_the_fastest_that_fit(seconds: dict[str, float], unfit: str, preset: str) -> None:
    rows = [Row(name, StepTime(step_s, 0, 0), 1.0, name != unfit) for name, step_s in seconds.items()]
    row = recommended(rows)
    assert row is not None and row.method == preset


def test_memory_is_that_of_the_estimate() -> None:
    one = job(micro_steps=2)
    assert memory_of(one, "FSDP2") == (line := fsdp2(MODEL, one.setup)).total + line.gathered
    for preset in PRESETS:
        assert memory_of(one, preset) > MODEL.num_params  # more than a byte for each parameter on 16 ranks


def test_hops_run_on_streams_of_their_own() -> None:
    """With overlap the hops of gathers and of reductions have two streams each, beside that of the computation."""
    assert {task.stream for task in program_of(job(), "balanced").tasks} == {MAIN, GATHER, CROSS, REDUCE, ALL_REDUCE}


@pytest.mark.parametrize("method", ["nothing", "", "fsdp2"])
def test_unknown_methods_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match="expected a method of DDP, ZeRO-3"):
        step_time(job(), method)


def test_a_job_belongs_to_its_cluster() -> None:
    other: Cluster = gpu_cluster(GPUS["h100"], 8, 4, 1e9)
    with pytest.raises(ValueError, match="expected a cluster of 16 ranks, 4 per node, got one of 8 ranks, 4 per node"):
        dataclasses.replace(job(), cluster=other)
