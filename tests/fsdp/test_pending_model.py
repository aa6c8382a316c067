"""No order of events loses a gradient, counts one twice, or shows a wrong one: explored exhaustively, on the real objects.

FSDP2's part is written down in `Model.post_backward` (what ``FSDPParamGroup.post_backward`` and ``foreach_reduce`` do with
``.grad``), the user's part in EVENTS, what must come out in `Model.expected` (plain numbers: what stock FSDP2, reducing at every
micro-step, would hold). The comm objects, the two hops, the drivers, the decisions and the pending gradients are the real
ones, over a process group of one rank, inside a real autograd backward pass.

The search is breadth-first over states: a sequence that leads to a state seen before is not continued.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hf_zeropp.comm.agreement import Agreement, Channel
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.topology import ShardMesh, WorldGroups, get_topology, whole_world
from hf_zeropp.comm.two_hops import TwoHopReduce
from hf_zeropp.comm.wire_buffers import WireBuffers
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.dtensors import local_tensor_of
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.backward_passes import Backward as BackwardPasses
from hf_zeropp.fsdp.gradients.gradient_decisions import GradientDecisions
from hf_zeropp.fsdp.gradients.pending import PendingGradient
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.gradients.unit_gradients import ReducedShard
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.param_shard import ParamShard
from hf_zeropp.fsdp.weights.copy import Copy
from hf_zeropp.fsdp.weights.freshness import Change
from hf_zeropp.fsdp.weights.gather import WeightGather
from hf_zeropp.fsdp.weights.weight_decisions import Entrance
from hf_zeropp.traffic import Traffic

pytestmark = pytest.mark.one_rank

UNITS = {"first": ("a", "b"), "second": ("c",)}
CONTRIBUTION = {"a": 1.0, "b": 10.0, "c": 100.0}


class FakeUnit:
    """Stands for a unit in reductions, and for its gradients, without FSDP2."""

    are_looked_at = have_all_reduce_hook = puts_off_replicas = False
    dtype = torch.float32
    divide_factor = None
    modules: tuple[torch.nn.Module, ...] = ()

    def __init__(self, name: str, params: dict[str, DTensor]) -> None:
        self.name = name
        self.named = params
        self.with_gradient: set[str] = set()
        self.is_unsharded = False

    @property
    def gradients(self) -> FakeUnit:
        return self

    @property
    def params(self) -> list[DTensor]:
        return list(self.named.values())

    @property
    def trainable(self) -> list[DTensor]:
        return [param for param in self.params if param.requires_grad]

    @property
    def trains(self) -> bool:
        return bool(self.trainable)

    def structure(self) -> tuple:
        return tuple((param.requires_grad, param.dtype) for param in self.params)

    def reduced_shards(self) -> tuple[ReducedShard, ...]:
        names = [name for name in self.named if name in self.with_gradient]
        return tuple(
            ReducedShard(ParamShard(name, 1, 1, 1), self.named[name], start) for start, name in enumerate(names)
        )

    def divisor_after_reduce(self, dtype: torch.dtype) -> float:
        return 1.0


class AlwaysFresh:
    def change(self) -> Change:
        return Change.NONE


class NoGather(WeightGather):
    """Weights are not part of this model."""

    def __call__(self, *args) -> None:
        raise AssertionError("this test gathers nothing")

    def predict(self, micro_steps: int) -> dict:
        return {}


class Raised(Exception):
    """A backward pass that raises on purpose."""


class Model:
    """Two units, their comm objects, and the gradients that stock FSDP2 would hold."""

    def __init__(self, mesh, overlap: bool, accumulator: str = "float32") -> None:
        names = [name for unit in UNITS.values() for name in unit]
        self.params = {
            name: torch.nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Replicate()])) for name in names
        }
        self.expected: dict[str, float | None] = dict.fromkeys(names)
        self.units = [FakeUnit(unit, {name: self.params[name] for name in own}) for unit, own in UNITS.items()]
        world = dist.group.WORLD
        config = ZeroPPConfig(qgz_bits=None, qgz_intra_bits=None, overlap=overlap, qgz_accumulator=accumulator)
        groups = WorldGroups(whole_world(), whole_world(), ())
        mesh_of_shards = ShardMesh(get_topology(1, "cpu"), groups, hpz_size=None, replicas=None)
        run = ModelRun(config, mesh_of_shards, Traffic(1, 1))
        self.micro_steps, self.driver = run.micro_steps, run.driver
        self.decisions = Decisions(run, Agreement(Channel(world)), [], torch.nn.Module())
        self.num_ends = 0
        self.decisions.gradients.backward = BackwardPasses(self._end_backward)
        hops = TwoHopReduce(Hop("node", world, run.traffic), Hop("cross", world, run.traffic), WireBuffers())
        for unit in self.units:
            reduce = ZeroPPReduceScatter(unit, run, self.decisions.gradients, hops)
            gather = NoGather(unit, run, self.decisions.weights.before_gather)
            gather.copy = Copy(unit, AlwaysFresh())
            self.decisions.add_unit(gather, reduce)
        self.reduces = self.decisions.gradients.reduces

    def _end_backward(self) -> None:
        self.num_ends += 1
        self.decisions.gradients.end_backward()

    # FSDP2's part.

    def post_backward(self, index: int, names: tuple[str, ...]) -> None:
        unit, reduce = self.units[index], self.reduces[index]
        used = {name for name in names if self.params[name].requires_grad}
        unit.with_gradient = {name for name in unit.named if used and self.params[name].requires_grad}  # zeros fill in
        before = [(param, param.grad) for param in unit.params if param.grad is not None]
        reduce.drop_unwanted()
        if unit.with_gradient:
            present = [name for name in unit.named if name in unit.with_gradient]
            flat = torch.tensor([CONTRIBUTION[name] if name in used else 0.0 for name in present])
            output = torch.empty(len(present))
            reduce(output, flat, dist.group.WORLD, ReduceOp.SUM)
            for place, name in enumerate(present):
                self._add_to_grad(self.params[name], output[place : place + 1].clone())
                self.expected[name] = (self.expected[name] or 0.0) + (CONTRIBUTION[name] if name in used else 0.0)
        reduce.after_post_backward()
        assert all(param.grad is grad for param, grad in before), "a gradient became another object"

    def _add_to_grad(self, param: DTensor, value: torch.Tensor) -> None:
        if param.grad is None:
            param.grad = DTensor.from_local(value, param.device_mesh, [Replicate()])
        else:
            assert not isinstance(local_tensor_of(param.grad), PendingGradient), "FSDP2 would add to a pending gradient"
            param.grad._local_tensor += value

    # The user's part.

    def backward(self, *used: tuple[str, ...], last: bool, raises_behind: int = 0) -> None:
        """Run a backward pass of one tuple of parameters per unit, which may raise behind so many units."""
        entrance = Entrance("the model", frozenset())
        self.decisions.weights.enter_forward(entrance)
        self.decisions.weights.leave_forward(entrance)
        self.micro_steps.ask_is_last = lambda: last
        num_ends = self.num_ends
        try:
            Backward.apply(
                torch.zeros(1, requires_grad=True), lambda: self._reduce(used, raises_behind)
            ).sum().backward()
        except Raised:
            return
        has_reduced = any(unit.with_gradient for unit in self.units)
        assert self.num_ends - num_ends == has_reduced, "the end of a backward pass comes once"

    def _reduce(self, used: tuple[tuple[str, ...], ...], raises_behind: int) -> None:
        for index, names in enumerate(used):
            self.post_backward(index, names)
            if index + 1 == raises_behind:
                raise Raised
        for index in range(len(used), len(self.units)):
            self.post_backward(index, ())

    def drop(self, *names: str, to_none: bool = True) -> None:
        for name in names:
            param = self.params[name]
            if param.grad is None:
                continue
            if to_none:
                param.grad = self.expected[name] = None
            else:
                param.grad.zero_()
                self.expected[name] = 0.0

    def replace(self, name: str) -> None:
        self.params[name].grad = DTensor.from_local(torch.tensor([7.0]), self.params[name].device_mesh, [Replicate()])
        self.expected[name] = 7.0

    def scale(self, name: str) -> None:
        """In place, as a loss scaler does it."""
        grad = self.params[name].grad
        if grad is not None and not self._refuses(grad, lambda: grad.mul_(2)):
            self.expected[name] *= 2

    def step(self) -> None:
        """An optimizer through pointers: its pre-hook delivers, then it reads memory."""
        self.decisions.gradients.deliver()
        for name, param in self.params.items():
            if param.grad is not None:
                assert not isinstance(local_tensor_of(param.grad), PendingGradient)
                assert local_tensor_of(param.grad).item() == self.expected[name], name

    def read(self, name: str) -> None:
        """A gradient has the right number, or says that it is not complete."""
        grad = self.params[name].grad
        if grad is None:
            assert self.expected[name] is None, name
        elif not self._refuses(grad, lambda: grad.to_local().item()):
            assert grad.to_local().item() == self.expected[name], name

    def _refuses(self, grad: DTensor, use: Callable[[], object]) -> bool:
        """Use a gradient, which must raise if it is pending, and not otherwise. Return whether it is."""
        if not isinstance(local_tensor_of(grad), PendingGradient):
            use()
            return False
        with pytest.raises(RuntimeError, match="a gradient that is not complete"):
            use()
        return True

    def check(self) -> None:
        for name in self.params:
            self.read(name)
        self.step()

    def freeze(self, name: str) -> None:
        self.params[name].requires_grad_(not self.params[name].requires_grad)

    def state(self) -> tuple:
        """Everything that the future depends on."""
        own = []
        for reduce in self.reduces:
            partial = reduce._partial
            names = None if partial is None else [part.shard.name for part in partial.form.parts]
            own.append((names, None if partial is None else partial.sums.flatten().tolist(), reduce._num_late))
        grads = []
        for param in self.params.values():
            local = None if param.grad is None else local_tensor_of(param.grad)
            is_pending = isinstance(local, PendingGradient)
            plain = local.plain if is_pending else local
            grads.append((None if plain is None else plain.item(), is_pending))
        frozen = [param.requires_grad for param in self.params.values()]
        return repr((own, grads, frozen, self.expected, len(self.driver)))


class Backward(torch.autograd.Function):
    """Runs a function in the middle of an autograd backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ctx.action()
        return grad, None


ALL = (("a", "b"), ("c",))
EVENTS: dict[str, Callable[[Model], None]] = {
    "micro-step": lambda model: model.backward(*ALL, last=False),
    "last micro-step": lambda model: model.backward(*ALL, last=True),
    "micro-step without b": lambda model: model.backward(("a",), ("c",), last=False),
    "last micro-step without b": lambda model: model.backward(("a",), ("c",), last=True),
    "last micro-step that skips the second unit": lambda model: model.backward(("a", "b"), last=True),
    "micro-step that raises": lambda model: model.backward(*ALL, last=False, raises_behind=1),
    "last micro-step that raises behind both units": lambda model: model.backward(*ALL, last=True, raises_behind=2),
    "zero_grad": lambda model: model.drop("a", "b", "c"),
    "zero_grad(set_to_none=False)": lambda model: model.drop("a", "b", "c", to_none=False),
    "a.grad = None": lambda model: model.drop("a"),
    "a.grad.zero_()": lambda model: model.drop("a", to_none=False),
    "b.grad = another": lambda model: model.replace("b"),
    "c.grad.mul_(2)": lambda model: model.scale("c"),
    "read a.grad": lambda model: model.read("a"),
    "step": lambda model: model.step(),
    "freeze or unfreeze b": lambda model: model.freeze("b"),
}


def run(sequence: tuple[str, ...], mesh, *settings) -> Model:
    model = Model(mesh, *settings)
    for event in sequence:
        EVENTS[event](model)
    return model


def explore(
    rank: int, overlap: bool, depth: int, has_node_hop: bool = False, accumulator: str = "float32"
) -> tuple[int, list[str]]:
    """Return the number of sequences that were run, and those that failed. Every sum is a number that bf16 holds."""
    TwoHopReduce.has_node_hop = has_node_hop  # type: ignore[assignment]  # with one rank both can be run
    mesh = init_device_mesh("cpu", (1,))
    seen, frontier, failures, num_runs = set(), [()], [], 0
    for _ in range(depth):
        following = []
        for sequence in frontier:
            for event in EVENTS:
                longer = (*sequence, event)
                num_runs += 1
                try:
                    model = run(longer, mesh, overlap, accumulator)
                    if (state := model.state()) in seen:
                        continue
                    model.check()
                except Exception as error:  # noqa: BLE001 - every failure is shown, with what led to it
                    failures.append(f"{' -> '.join(longer)}: {type(error).__name__}: {error}")
                    continue
                seen.add(state)
                following.append(longer)
        frontier = following
        if failures:
            break
    return num_runs, failures


@pytest.mark.thorough("*3-False-float32")
@pytest.mark.parametrize(
    ("overlap", "depth", "has_node_hop", "accumulator"),
    [
        (True, 3, True, "float32"),
        (True, 3, True, "bfloat16"),
        (True, 3, False, "float32"),
        (False, 3, False, "float32"),
        pytest.param(True, 5, True, "float32", marks=pytest.mark.long),
        pytest.param(True, 5, False, "float32", marks=pytest.mark.long),
        pytest.param(False, 5, False, "float32", marks=pytest.mark.long),
    ],
)
def test_every_order_of_events(overlap, depth, has_node_hop, accumulator):
    (num_runs, failures), *_ = run_ranks(explore, 1, overlap, depth, has_node_hop, accumulator, limit_s=900)
    assert failures == [], f"{len(failures)} of {num_runs} sequences failed:\n" + "\n".join(failures[:10])
    assert num_runs > (1000 if depth > 3 else 100)


def zero_what_was_taken(rank: int) -> None:
    """Two buffers of gradients in turn: the one that is put aside is zeroed while sums for the other one wait."""
    for overlap in (True, False):
        model = run(("micro-step",), init_device_mesh("cpu", (1,)), overlap)
        taken = model.params["a"].grad
        model.drop("a")
        EVENTS["micro-step"](model)
        taken.zero_()
        model.check()


def test_what_the_events_have_no_words_for():
    run_ranks(zero_what_was_taken, 1)


def test_the_search_finds_a_lost_contribution():
    """Without delivery before a step, sequences with a pending gradient fail."""
    (_, failures), *_ = run_ranks(explore_without_delivery, 1)
    assert any(failure.startswith("micro-step:") for failure in failures)


def explore_without_delivery(rank: int) -> tuple[int, list[str]]:
    GradientDecisions.deliver = lambda self: None
    return explore(rank, False, 2)
