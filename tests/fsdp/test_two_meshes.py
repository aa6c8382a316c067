"""Units on two meshes in one model, with FSDP2 alone: dense weights over all ranks, experts over those that hold the same ones.

Four ranks, as two nodes or as four. Each rank holds two of four experts, which are sharded over two ranks of different nodes. So
a rank exchanges dense weights with other ranks than experts. The oracle is stock FSDP2 on the same meshes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from harness import Scenarios, run_ranks, scenarios_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from toy import POLICIES, full_weights, logged_messages

from hf_zeropp import ZeroPPHandle, apply_zeropp, generation_mode
from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.fsdp.weights import schedule
from hf_zeropp.traffic import FSDP2_REDUCE, GATHER_CROSS, GATHER_RESYNC

WORLD, WIDTH, NUM_EXPERTS, DEPTH, STEPS = 4, 24, 4, 2, 3
UNQUANTIZED = {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None}
EXACT_WEIGHTS = UNQUANTIZED | {"qwz_mode": "exact"}
# Two hops and one reduction add up in different orders, and AdamW makes the roundings of small gradients larger.
TOLERANCE = 2e-5


class Experts(nn.Module):
    """The experts that this rank holds, each on its part of the tokens.

    Attributes:
        used: those that get tokens. The others get none, and compute with empty tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / 5)
        self.used: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights.to_local() if isinstance(self.weights, DTensor) else self.weights
        outputs = []
        for index, (tokens, weight) in enumerate(zip(x.chunk(len(weights)), weights, strict=True)):
            num_used = len(tokens) if index in self.used else 0
            computed = (tokens[:num_used] @ weight).tanh()
            outputs.append(torch.cat([computed, torch.zeros_like(tokens[num_used:])]))
        return torch.cat(outputs)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.dense(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for layer in self.layers:
            layer.experts.used = used
            x = layer(x)
        return self.head(x)


def sharded(policy: MixedPrecisionPolicy) -> Model:
    """Return the model with experts over two ranks, and with all else over four."""
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("efsdp", "ep"))
    model = placed(policy, mesh["ep"], mesh["efsdp"])
    for layer in model.layers:
        # The mean over all ranks, as that of dense weights.
        layer.experts.set_gradient_divide_factor(float(WORLD))
    return model


def replicated(policy: MixedPrecisionPolicy) -> Model:
    """Return the model in two replicas. Experts are whole on a rank of each, and so stay within a node."""
    mesh = init_device_mesh("cpu", (2, 1, WORLD // 2), mesh_dim_names=("replicate", "efsdp", "ep"))
    dense = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    return placed(policy, mesh["ep"], mesh["replicate", "efsdp"], dense)


def placed(policy: MixedPrecisionPolicy, ep: DeviceMesh, over: DeviceMesh, dense: DeviceMesh | None = None) -> Model:
    """Return the model with experts that are cut over ``ep`` and sharded ``over`` a mesh, and with all else over ``dense``."""
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        experts = layer.experts
        experts.weights = nn.Parameter(distribute_tensor(experts.weights.detach(), ep, [Shard(0)]))
        fully_shard(experts, mesh=over, mp_policy=policy)
        # gloo has no sums with a factor, which FSDP2 asks for otherwise.
        experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=dense, mp_policy=policy)
    return fully_shard(model, mesh=dense, mp_policy=policy)


def used_by(rank: int, step: int) -> list[int]:
    """Return the experts that get tokens on a rank: none, one, the other, or both."""
    return [[], [0], [1], [0, 1]][(rank + step) % 4]


def train(
    model: Model, handle: ZeroPPHandle | None, rank: int, *, steps: int = STEPS, micro_steps: int = 1
) -> list[float]:
    """Train with AdamW, and return the losses."""
    # One operator takes no tensors of two meshes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(steps):
        for micro_step in range(micro_steps):
            if handle is not None:
                handle.set_last_micro_step(micro_step == micro_steps - 1)
            index = step * micro_steps + micro_step
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * index + rank))
            loss = model(x, used_by(rank, index)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def beside_stock(
    rank: int, ranks_per_node: int, settings: dict, relative: float, *, policy: str = "fp32", micro_steps: int = 1
) -> list[float]:
    """Train with and without ZeRO++. Compare losses, full weights and bytes, and return the losses."""
    stock, model = sharded(POLICIES[policy]), sharded(POLICIES[policy])
    handle = apply_zeropp(model, {"ranks_per_node": ranks_per_node} | settings)
    assert len(handle.gathers) == 2 * DEPTH + 1
    ours = train(model, handle, rank, micro_steps=micro_steps)
    expected = train(stock, None, rank, micro_steps=micro_steps)
    assert ours == pytest.approx(expected, rel=relative), (ours, expected)
    bound = 1e-4 if relative == TOLERANCE else 1e-2
    torch.testing.assert_close(full_weights(model), full_weights(stock), rtol=0, atol=bound)
    # The optimizer's step is behind all counts, so the steps that follow cross once each.
    handle.traffic.reset()
    train(model, handle, rank, micro_steps=micro_steps)
    counted = handle.traffic.counts
    if handle.config.sends_changes:
        # The mean is that of all steps since the start.
        assert counted[GATHER_CROSS].cross_node < 1.2 * STEPS * handle.predict(micro_steps)[GATHER_CROSS].cross_node
    for name, one in handle.predict(micro_steps).items():
        assert one.is_measured or counted[name].cross_node == STEPS * one.cross_node, (name, counted[name], one)
    assert GATHER_RESYNC not in counted
    return ours


def scenario_unquantized(rank: int, ranks_per_node: int) -> None:
    beside_stock(rank, ranks_per_node, UNQUANTIZED, TOLERANCE, micro_steps=2)


def scenario_exact_weights(rank: int, ranks_per_node: int) -> None:
    """Changed words give the bits of whole weights, with every way of overlapping and sharing memory."""
    for policy, relative, ways in (
        ("fp32", TOLERANCE, ({},)),
        ("bf16", 0.02, ({}, {"overlap": False}, {"shared_memory": False}, {"qwz_intra_bits": None})),
    ):
        whole = beside_stock(rank, ranks_per_node, UNQUANTIZED, relative, policy=policy)
        for way in ways:
            assert beside_stock(rank, ranks_per_node, EXACT_WEIGHTS | way, relative, policy=policy) == whole, way


def scenario_presets(rank: int, ranks_per_node: int) -> None:
    for settings in ({}, {"preset": "exact"}, {"preset": "half_model"}, {"preset": "min_traffic"}):
        beside_stock(rank, ranks_per_node, settings, 0.05, policy="bf16", micro_steps=2)


def scenario_accumulation_on_the_rank(rank: int, ranks_per_node: int) -> None:
    on_rank = {"qgz_accumulate": "rank"}
    beside_stock(rank, ranks_per_node, EXACT_WEIGHTS | on_rank, TOLERANCE, micro_steps=3)
    beside_stock(rank, ranks_per_node, on_rank, 0.05, micro_steps=3)


def scenario_generation(rank: int, ranks_per_node: int) -> None:
    """Weights of both meshes are brought up to date once, and then nothing crosses nodes."""
    model = sharded(POLICIES["bf16"])
    handle = apply_zeropp(model, {"ranks_per_node": ranks_per_node, "preset": "exact"})
    train(model, handle, rank, steps=2)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        expected = model(x, [0, 1])
        with generation_mode(model):
            handle.traffic.reset()
            assert torch.equal(model(x, [0, 1]), expected)
            assert handle.traffic.cross_node_bytes == 0


def scenario_what_zero3_sends(rank: int, ranks_per_node: int) -> None:
    """A node gathers the experts that its ranks hold, of which half lie on another node, and of dense weights all parts."""
    handle = apply_zeropp(sharded(POLICIES["bf16"]), {"ranks_per_node": ranks_per_node})
    dense, experts = DEPTH * WIDTH * (WIDTH + 1) + 3 * (WIDTH + 1), DEPTH * NUM_EXPERTS * WIDTH**2
    # Two gathers in bf16 and a reduction in fp32 are 8 bytes of each element. One rank holds half of the experts, two hold all.
    of_node, num_nodes = ranks_per_node * experts / 2, WORLD // ranks_per_node
    expected = 8 * (dense * (num_nodes - 1) / num_nodes + of_node / 2)
    assert handle.traffic.zero3_bytes(1) == pytest.approx(expected)
    assert handle.traffic.zero3_bytes(3) == pytest.approx(3 * expected)
    assert handle.traffic.model_bytes == 2 * (dense + experts)
    assert handle.traffic.trainable_bytes == 4 * (dense + experts)


def scenario_a_fault_of_some_experts(rank: int, ranks_per_node: int) -> None:
    """A write that nothing tells of is named on all ranks, also on those that hold other experts."""
    model = sharded(POLICIES["bf16"])
    apply_zeropp(model, {"ranks_per_node": ranks_per_node})
    x = torch.ones(6, WIDTH)
    model(x, [0, 1])
    if rank == 3:
        model.layers[1].experts.weights.data.mul_(2)
    with pytest.raises(RuntimeError, match="unit layers.1.experts on rank 3"):
        model(x, [0, 1])


SCENARIOS = scenarios_of(__name__)
WAYS = {
    "4 nodes x 1": Scenarios(WORLD, SCENARIOS, 1, limit_s=300),
    # Right copies pass the check in all of them.
    "2 nodes x 2": Scenarios(WORLD, SCENARIOS, 2, limit_s=300, env={"ZEROPP_CHECK": "1"}),
}


@pytest.mark.thorough
@Scenarios.parametrize_ways(WAYS)
def test_two_meshes(scenario, way):
    WAYS[way].check(scenario)


def replicas_of_nodes(rank: int) -> list[str]:
    """Train with and without ZeRO++, and return the warnings."""
    stock, model = replicated(POLICIES["bf16"]), replicated(POLICIES["bf16"])
    with logged_messages() as logs:
        handle = apply_zeropp(model, {"ranks_per_node": 1, "preset": "exact"} | UNQUANTIZED)
    ours, expected = train(model, handle, rank, micro_steps=2), train(stock, None, rank, micro_steps=2)
    assert ours == pytest.approx(expected, rel=0.02)
    torch.testing.assert_close(full_weights(model), full_weights(stock), rtol=0, atol=1e-2)
    counted, predicted = handle.traffic.counts[FSDP2_REDUCE], handle.predict(2)[FSDP2_REDUCE]
    # An all-reduce between two ranks receives as many bytes as it sums: half of the experts, in fp32.
    assert predicted.cross_node == 2 * DEPTH * 4 * NUM_EXPERTS // 2 * WIDTH**2
    assert (counted.calls, counted.cross_node) == (STEPS * predicted.calls, STEPS * predicted.cross_node)
    model.set_requires_all_reduce(False)
    handle.traffic.reset()
    train(model, handle, rank, steps=1)
    assert handle.traffic.counts[FSDP2_REDUCE].cross_node == 0
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.randn(6, WIDTH), used_by(rank, 0))
    assert all(unit.is_unsharded for unit in find_units(model))
    handle.reshard()
    assert not any(unit.is_unsharded for unit in find_units(model))
    return logs


def test_whole_gradients_of_experts_within_nodes_are_counted_and_named():
    logs, *others = run_ranks(replicas_of_nodes, WORLD)
    [warning] = [line for line in logs if "unquantized and in every micro-step" in line]
    assert "layers.0.experts, layers.1.experts." in warning and "ep_size" in warning
    assert not any("unquantized and in every micro-step" in line for lines in others for line in lines)


class Due:
    """A gather that is due, and has encoded words or not."""

    def __init__(self, hops: object, words: object) -> None:
        self.hops, self._words = hops, words

    def encode(self) -> object:
        return self._words


def test_sizes_are_exchanged_mesh_by_mesh_in_the_order_of_what_is_due(monkeypatch):
    """Not in that of the units that send words."""
    exchanged = []
    monkeypatch.setattr(schedule, "exchange_sizes", exchanged.append)
    dense, experts = object(), object()
    schedule._encode([Due(dense, None), Due(experts, "a"), Due(dense, "b"), Due(experts, "c")])
    assert exchanged == [["b"], ["a", "c"]]
