"""Counted bytes equal predicted bytes: by default 0.75 M (Y-1)/Y per node and step for any number of micro-steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import Scenarios, run_ranks, scenarios_of
from rich.console import Console
from toy import EXACT, POLICIES, backward, make_lm, shard, tokens_of, train

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.comm.topology import get_topology
from hf_zeropp.traffic import (
    GATHER_CROSS,
    GATHER_NODE,
    REDUCE_CROSS,
    REDUCE_NODE,
    Bytes,
    MeshBytes,
    Peers,
    Traffic,
    total,
    with_noun,
)

NODES = {"ranks_per_node": 2}


def steps(model, handle: ZeroPPHandle, rank: int, num_steps: int, micro_steps: int = 1) -> None:
    parameters = [param for unit in handle.units for param in unit.trainable]
    train(model, torch.optim.SGD(parameters, lr=0.01), rank, range(num_steps), handle, micro_steps)


def times(predicted: dict[str, Bytes], factor: int) -> dict[str, Bytes]:
    return {name: count.times(factor) for name, count in predicted.items()}


def scenario_counted_is_predicted(rank: int) -> None:
    """Counts and predictions are equal, by collective, in bytes and in calls."""
    settings = [{}, {"hpz_size": None}, {"qwz_bits": None}, {"qwz_bits": 4, "hpz_size": 1}, EXACT, {"overlap": False}]
    settings += [{"qwz_bits": None, "hpz_size": None}, {"shared_memory": False}, {"qgz_bits": 3}]
    # The defaults are first, and run in all three shapes of a step; the other settings in one shape and dtype each, in turn.
    shapes = itertools.cycle([(1, 2), (3, 2), (2, 1)])
    cases = zip([{}, {}, *settings], shapes, itertools.cycle(POLICIES.values()), strict=False)
    for choice, (micro_steps, ranks_per_node), policy in cases:
        model = shard(make_lm(), policy)
        handle = apply_zeropp(model, choice | {"ranks_per_node": ranks_per_node})
        before = handle.predict(micro_steps)  # when FSDP2 does not know its root yet
        steps(model, handle, rank, 2, micro_steps)
        counted, predicted = handle.traffic.counts, times(handle.predict(micro_steps), 2)
        assert before == handle.predict(micro_steps), (choice, micro_steps, ranks_per_node)
        assert counted == predicted, (choice, micro_steps, ranks_per_node, counted, predicted)
        assert (handle.traffic.steps, handle.traffic.micro_steps) == (2, 2 * micro_steps)


def scenario_three_quarters_of_the_model(rank: int) -> None:
    """The default sends 0.75 M (Y-1)/Y per step, within 4 %: scales are 1.6 %, the rest is norms and padding."""
    sent = {}
    for micro_steps in (1, 4):
        # So large that norms, scales and padding weigh what they do in a small real model.
        model = shard(make_lm(depth=4, hidden=128, inner=512), POLICIES["bf16 reduce"])
        handle = apply_zeropp(model, NODES)
        steps(model, handle, rank, 2, micro_steps)
        sent[micro_steps] = handle.traffic.cross_node_bytes_per_step
        goal = 0.75 * handle.traffic.model_bytes / 2
        assert goal <= sent[micro_steps] <= 1.04 * goal, sent[micro_steps] / goal
        assert handle.traffic.zero3_bytes_per_step() == 3 * micro_steps * handle.traffic.model_bytes / 2
    assert sent[1] == sent[4]


def scenario_half_of_the_model(rank: int) -> None:
    """0.5 M (Y-1)/Y with INT4 deltas and 0.375 M with 2 bits, within 5 %, behind a step in which whole weights cross."""
    for bits, share in ((4, 0.5), (2, 0.375)):
        sent = set()
        for micro_steps in (1, 4):
            # So wide that norms and biases, which travel raw, weigh as little as in a real model.
            model = shard(make_lm(depth=1, hidden=768, inner=3072), POLICIES["bf16 reduce"])
            handle = apply_zeropp(model, NODES | {"qwz_mode": "delta", "qwz_bits": bits})
            steps(model, handle, rank, 1)
            handle.traffic.reset()
            steps(model, handle, rank, 2, micro_steps)
            assert handle.traffic.counts == times(handle.predict(micro_steps), 2)
            sent.add(handle.traffic.cross_node_bytes_per_step / (handle.traffic.model_bytes / 2))
        assert len(sent) == 1 and share <= min(sent) <= 1.05 * share, (bits, sent)


def scenario_the_model_is_counted_in_its_dtypes(rank: int) -> None:
    model = make_lm()
    numel = sum(param.numel() for param in model.parameters())
    model.blocks[0].requires_grad_(False)
    frozen = sum(param.numel() for param in model.blocks[0].parameters())
    handle = apply_zeropp(shard(model, POLICIES["bf16"]), NODES)
    assert handle.traffic.model_bytes == 2 * numel
    assert handle.traffic.trainable_bytes == 4 * (numel - frozen)


def scenario_weights_cross_once_per_step(rank: int) -> None:
    """They do not cross in backward, in later micro-steps or in evaluation, and again after the optimizer stepped."""
    model = shard(make_lm())
    handle = apply_zeropp(model, NODES)
    units = len(handle.gathers)

    def crossings() -> int:
        return handle.traffic.counts.get(GATHER_CROSS, Bytes()).calls

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        loss = model(tokens_of(rank)).square().mean()
        assert crossings() == step * units
        loss.backward()
        handle.set_last_micro_step(False)
        backward(model, rank)
        with torch.no_grad():
            model(tokens_of(rank, 9))
        handle.set_last_micro_step(True)
        backward(model, rank)
        assert crossings() == step * units
        optimizer.step()


def scenario_frozen_units_cross_once(rank: int) -> None:
    """They cross once in a run, before the steps that ``predict`` tells of."""
    model = make_lm(depth=3)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    handle = apply_zeropp(shard(model), NODES)
    steps(model, handle, rank, 1)
    assert handle.traffic.counts[GATHER_CROSS].calls == 4
    handle.traffic.reset()
    steps(model, handle, rank, 3)
    counted, predicted = handle.traffic.counts, times(handle.predict(), 3)
    assert counted[GATHER_CROSS].calls == 3 * 2  # the trainable block and the root
    assert counted == predicted, (counted, predicted)


def scenario_a_frozen_root_does_not_stop_the_count(rank: int) -> None:
    """With adapters the embedding, the norm and the head are frozen, and so is the unit in front."""
    model = make_lm(depth=3)
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)
    handle = apply_zeropp(shard(model), NODES)
    steps(model, handle, rank, 2, 2)
    assert (handle.traffic.steps, handle.traffic.micro_steps) == (2, 4)
    assert handle.traffic.zero3_bytes_per_step() > 0


def scenario_one_node_is_left_to_fsdp2(rank: int) -> None:
    model = shard(make_lm())
    handle = apply_zeropp(model, {"ranks_per_node": 4})
    backward(model, rank)
    assert not handle.is_active
    assert handle.predict() == {} and handle.traffic.counts == {}


def scenario_optimizers_in_backward(rank: int) -> None:
    """With an optimizer for each parameter, a unit crosses once per step if one of its own stepped, and a step is one step."""
    model = shard(make_lm())
    handle = apply_zeropp(model, EXACT | NODES | {"hpz_size": "node"})
    for block, lr in zip(model.blocks, (0.01, None), strict=True):
        for param in block.parameters() if lr else ():
            optimizer = torch.optim.SGD([param], lr=lr)
            param.register_post_accumulate_grad_hook(lambda param, optimizer=optimizer: optimizer.step())
    backward(model, rank)
    assert handle.traffic.counts[GATHER_CROSS].calls == len(handle.units)
    for step in range(1, 4):
        assert handle.traffic.steps == step
        backward(model, rank, step)
        model.zero_grad()
        assert handle.traffic.counts[GATHER_CROSS].calls == len(handle.units) + step


SCENARIOS = Scenarios(4, scenarios_of(__name__))


@pytest.mark.thorough("half_of_the_model")
@SCENARIOS.parametrize
def test_traffic(scenario):
    SCENARIOS.check(scenario)


def peers_of_three_nodes(rank: int) -> None:
    topology, whole = get_topology(2, "cpu"), torch.distributed.group.WORLD
    groups = topology.node_group, topology.cross_group, whole
    assert [Peers.of(group, 2) for group in groups] == [Peers(1, 0), Peers(0, 2), Peers(1, 4)]


def test_peers_of_three_nodes_of_two():
    run_ranks(peers_of_three_nodes, 6)
    assert Peers(1, 4).bytes_of(10) == Bytes(1, 10, 40)


def test_totals_are_per_node_and_step():
    traffic = Traffic(ranks_per_node=2, num_nodes=4, model_bytes=1000, trainable_bytes=500)
    traffic.record(GATHER_CROSS, Bytes(1, 0, 30))
    traffic.record(GATHER_CROSS, Bytes(1, 0, 30))
    traffic.record(REDUCE_NODE, Bytes(1, 7, 0))
    traffic.steps, traffic.micro_steps = 2, 4
    assert traffic.cross_node_bytes == 2 * 60 and traffic.intra_node_bytes == 2 * 7
    assert traffic.cross_node_bytes_per_step == 60
    assert traffic.zero3_bytes_per_step() == (2 * 1000 + 500) * 2 * 3 / 4
    traffic.counts[GATHER_CROSS].cross_node = 0  # a copy
    assert total(traffic.counts.values()) == Bytes(3, 7, 60)
    traffic.reset()
    assert traffic.counts == {} and traffic.steps == 0 and traffic.cross_node_bytes == 0


def test_zero3_is_counted_mesh_by_mesh():
    """Dense weights in two replicas of two nodes; experts within a node, of which replicas are averaged; whole experts."""
    dense = MeshBytes(1000, 600, num_nodes=2, num_replicas=2)
    within_node = MeshBytes(400, 200, num_nodes=1, num_replicas=4)
    whole = MeshBytes(300, 300, num_nodes=1)
    assert dense.zero3_bytes(3) == 3 * 2600 / 2 + 2 * 300 / 2
    assert within_node.zero3_bytes(3) == 2 * 200 * 3 / 4
    assert whole.zero3_bytes(3) == 0
    traffic = Traffic(2, 4, 1700, 1100, [dense, within_node, whole])
    assert traffic.zero3_bytes(3) == 3 * 1300 + 300 + 300


def test_rollouts_are_counted_beside_the_collectives_they_belong_to():
    traffic = Traffic(ranks_per_node=2, num_nodes=2)
    traffic.record(GATHER_CROSS, Bytes(1, 0, 5_000_000))
    assert "rollouts" not in shown(traffic)
    with pytest.raises(RuntimeError), traffic.in_rollout():
        traffic.record(GATHER_CROSS, Bytes(1, 0, 3_000_000))
        traffic.record(GATHER_NODE, Bytes(1, 2_000_000, 0))
        raise RuntimeError
    traffic.record(GATHER_NODE, Bytes(1, 7_000_000, 0))
    assert traffic.rollouts == Bytes(2, 2_000_000, 3_000_000)
    assert total(traffic.counts.values()) == Bytes(4, 9_000_000, 8_000_000)
    row = next(line for line in shown(traffic).splitlines() if "rollouts" in line)
    assert "4.000" in row and "6.000" in row  # of both ranks of the node
    traffic.reset()
    assert traffic.rollouts == Bytes()


def shown(traffic: Traffic, predicted: dict[str, Bytes] | None = None) -> str:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))
    console.print(traffic.table(predicted))
    return console.export_text()


@pytest.mark.parametrize("predicted", [None, {GATHER_CROSS: Bytes(2, 0, 1_500_000), REDUCE_CROSS: Bytes(1, 0, 9)}])
def test_table_shows_counts_prediction_and_saving(predicted):
    traffic = Traffic(ranks_per_node=2, num_nodes=2, model_bytes=8_000_000, trainable_bytes=8_000_000)
    traffic.record(GATHER_CROSS, Bytes(2, 0, 3_000_000))
    traffic.steps = traffic.micro_steps = 1
    text = shown(traffic, predicted)
    assert "6.000" in text and "12.000" in text and "2.00x" in text  # 2 ranks x 3 MB; 3 x 8 MB x 1/2
    assert ("3.000" in text) == (predicted is not None)


def test_a_single_thing_is_named_in_the_singular():
    said = [with_noun(number, "step") for number in (1, 1.0, 2.5, 1234567)]
    assert said == ["1 step", "1 step", "2.5 steps", "1234567 steps"]
