"""Random programs, each from one integer.

A program is a few rounds of a training loop (micro-steps, clipping, a step, ``zero_grad``) into which other operations are
thrown: evaluation, edits of weights, freezing, checkpoints, events on one rank. It ends with a plain round, so that whatever
went wrong before has a chance to show.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from differential.cases import (
    BLOCK_KINDS,
    LOAD_ROUTES,
    LOUD_ROUTES,
    OPERATIONS,
    SILENT_ROUTES,
    BlockSpec,
    Case,
    ModelSpec,
    Operation,
    OptimizerSpec,
)
from differential.extension import EXTENSION_KINDS
from differential.hazards import FOR_NODE, MAY_RAISE, MUST_RAISE, Walk
from differential.optimizers import KINDS

WORLDS = (2, 4, 2, 3, 2, 4, 2, 6, 2, 4, 3, 2, 4, 2, 3, 8)
"""The world of seed n is ``WORLDS[n % len(WORLDS)]``. Small ones are quick, and most of what goes wrong shows in them."""

NEVER = ("skipped where gathers wait", "waits on the rank")
"""Hazards that are generated on request only. Ranks that wait in a gather for one that runs another pass are documented to end
after the time-out, as in stock FSDP2, which takes long. Gradients that wait on the rank are dropped by the handle alone, and an
optimizer's step before they are reduced is refused."""

_OTHER_PARALLELISM = ("tp", "ep", "pp")
"""Meshes whose groups wait for each other within a pass, or for nobody: an error of one rank does not end all of them."""

_DIVIDED = {"tp": "cut", "ep": "experts"}
"""The kind of blocks that the groups of a mesh divide."""

_TRIES = 12


def generate(seed: int, without: Collection[str] = NEVER, mesh: str = "") -> Case:
    """The case of a seed; ``without`` names hazards to leave out, and ``mesh`` one of ``MESHES``: each makes it another case."""
    if mesh in _OTHER_PARALLELISM:
        without = {*without, *MUST_RAISE, *MAY_RAISE}
    rng = random.Random(seed)
    world = WORLDS[seed % len(WORLDS)]
    ranks_per_node = rng.choice(
        [size for size in range(1, world + 1) if world % size == 0 and (size < world or rng.random() < 0.1)]
    )
    policy = _pick(rng, {"fp32": 0.76, "bf16": 0.12, "bf16 reduce": 0.06, "fp16 reduce": 0.06})
    models = tuple(_model(rng, policy, without) for _ in range(_pick(rng, {1: 0.75, 2: 0.25})))
    if mesh in _DIVIDED:
        models = tuple(_divided(model, _DIVIDED[mesh]) for model in models)
    joined = len(models) == 2 and rng.random() < 0.5 and "models in one container" not in without
    chained = len(models) == 2 and rng.random() < 0.4 and "one loss of two roots" not in without
    case = Case(
        world=world,
        ranks_per_node=ranks_per_node,
        mesh=mesh,
        groups=2 if mesh else 1,
        joined=joined,
        chained=chained,
        settings=tuple(sorted(_fitting(_settings(rng, world, ranks_per_node), models).items())),
        models=models,
        optimizers=_optimizers(rng),
    )
    # Drawn apart, so that seeds keep the rest of their programs.
    settings = dict(case.settings)
    if random.Random(f"{seed} gathers natively").random() < 0.4:
        settings["qwz_intra_bits"] = None
    if (drawn := random.Random(f"{seed} accumulates").random()) < 0.25:
        settings["qgz_accumulate"] = "rank" if drawn < 0.15 else "whole"
        if "waits on the rank" in without:
            without = {*without, *FOR_NODE}
    case = dataclasses.replace(case, settings=tuple(sorted(settings.items())))
    program = Program(rng, case, frozenset(without))
    return dataclasses.replace(case, operations=program.write())


class Program:
    """Writes the operations of one case.

    Args:
        without: hazards that no operation may add.
    """

    def __init__(self, rng: random.Random, case: Case, without: frozenset[str]) -> None:
        self._rng = rng
        self._case = case
        self._without = without
        self._walks = [Walk.start(stage) for stage in case.stages]
        self._operations: list[Operation] = []
        self._data = 0

    def write(self) -> tuple[Operation, ...]:
        if self._rng.random() < 0.08:
            self._add_random("replace")
        for _ in range(_pick(self._rng, {1: 0.4, 2: 0.4, 3: 0.2})):
            self._round()
        self._end()
        return tuple(self._operations)

    def _round(self) -> None:
        rng = self._rng
        micro_steps = _pick(rng, {1: 0.5, 2: 0.25, 3: 0.15, 4: 0.1})
        tells = micro_steps > 1 and rng.random() < 0.85
        for number in range(micro_steps):
            if rng.random() < 0.2:
                self._interject()
            if tells:
                self._add("set_last", last=number == micro_steps - 1)
            self._micro_step()
        for name, likelihood in (("clip", 0.2), ("scale_grads", 0.05), ("read_grads", 0.1)):
            if rng.random() < 0.25:
                self._interject()
            if rng.random() < likelihood:
                self._add_random(name)
        self._add_random(
            _pick(rng, {"step": 0.82, "step_with_closure": 0.06, "step_on_all_but_one": 0.06, "step_that_raises": 0.06})
        )
        if rng.random() < 0.3:
            self._interject()
        if rng.random() < 0.85:
            self._add_random("zero_grad")
        if any(model.frozen_units for model in self._case.models) and rng.random() < 0.4:
            self._add("unfreeze", count=99)  # all at once
        if rng.random() < 0.3:
            self._interject()

    def _micro_step(self) -> None:
        kinds = {
            "train": 0.82,
            "forward": 0.06,
            "no_sync": 0.04,
            "abort": 0.03,
            "train_with_steps_inside": 0.02,
            "train_apart": 0.03,
        }
        self._add_random(_pick(self._rng, kinds))

    def _interject(self) -> None:
        kinds = {
            "evaluate": 0.24,
            "generate": 0.06,
            "edit": 0.16,
            "edit_on_one_rank": 0.05,
            "freeze": 0.1,
            "unfreeze": 0.06,
            "step_of_another_module": 0.04,
            "save": 0.03,
            "load": 0.07,
            "invalidate": 0.04,
            "save_handle_state": 0.03,
            "discard": 0.04,
            "set_last": 0.05,
            "zero_grad": 0.03,
        }
        self._add_random(_pick(self._rng, kinds))

    def _end(self) -> None:
        """One plain round, whose numbers are all compared."""
        self._add("set_last", last=True)
        self._add("train", data=self._next_data())
        self._add("read_grads")
        self._add("step")
        self._add("evaluate", data=self._next_data())

    def _add_random(self, name: str) -> None:
        """An operation of this name with random arguments, or nothing where all that were tried add a hazard to avoid."""
        for _ in range(_TRIES):
            if self._add(name, **self._arguments(name)):
                return

    def _add(self, name: str, **args: Any) -> bool:
        operation = Operation.of(name, **args)
        walks = [walk.copy() for walk in self._walks]
        for walk in walks:
            walk.take(operation)
            if (walk.found | walk.changes) & self._without:
                return False
        self._walks = walks
        self._operations.append(operation)
        return True

    def _arguments(self, name: str) -> dict[str, Any]:
        """Draw the arguments of an operation that have a way to be drawn, in their order in ``OPERATIONS``."""
        draws = {argument: _DRAWS.get(f"{name}.{argument}") or _DRAWS.get(argument) for argument in OPERATIONS[name]}
        return {argument: draw(self, self._rng) for argument, draw in draws.items() if draw is not None}

    def _next_data(self) -> int:
        self._data += 1
        return self._data

    def _which(self, rng: random.Random) -> int | None:
        return rng.choice([None, None, 0, 1]) if len(self._case.models) > 1 else None

    def _path(self, rng: random.Random) -> list[int] | None:
        """Blocks left out, taken twice, or taken in another order."""
        if rng.random() < 0.85:
            return None
        return [rng.randrange(3) for _ in range(rng.randint(1, 3))]


_DRAWS: dict[str, Callable[[Program, random.Random], Any]] = {
    "data": lambda program, rng: program._next_data(),
    "which": Program._which,
    "path": Program._path,
    "forwards": lambda program, rng: _pick(rng, {1: 0.9, 2: 0.1}),
    "backwards": lambda program, rng: _pick(rng, {1: 0.96, 2: 0.04}),
    "input_grad": lambda program, rng: rng.random() < 0.15,
    "evaluate.times": lambda program, rng: _pick(rng, {1: 0.7, 2: 0.3}),
    "generate.times": lambda program, rng: rng.randint(1, 4),
    "budget": lambda program, rng: rng.choice([0, 0, 300, 10_000]),
    "no_sync.count": lambda program, rng: rng.randint(1, 2),
    "marks_last": lambda program, rng: rng.random() < 0.3,
    "model": lambda program, rng: rng.randrange(2),
    "rank": lambda program, rng: rng.randrange(program._case.world),
    "block": lambda program, rng: rng.randrange(3),
    "other": lambda program, rng: rng.choice([None, *range(3)]),
    "last": lambda program, rng: rng.random() < 0.5,
    "zero_grad.optimizer": lambda program, rng: rng.choice([None, None, 0, 1]),
    "keep": lambda program, rng: rng.random() < 0.25,
    "foreach": lambda program, rng: rng.choice([None, True, False]),
    "optimizer": lambda program, rng: rng.randrange(2),
    "param": lambda program, rng: rng.randrange(16),
    "count": lambda program, rng: _pick(rng, {1: 0.5, 4: 0.3, 99: 0.2}),
    "route": lambda program, rng: rng.choice(LOUD_ROUTES + SILENT_ROUTES),
    "load.route": lambda program, rng: _pick(rng, dict(zip(LOAD_ROUTES, (0.6, 0.2, 0.1, 0.1), strict=True))),
}
"""How arguments are drawn, by name; of one operation alone where its name stands before it. Others keep their defaults."""


def _pick(rng: random.Random, likelihoods: dict[Any, float]) -> Any:
    return rng.choices(list(likelihoods), list(likelihoods.values()))[0]


def _model(rng: random.Random, policy: str, without: Collection[str]) -> ModelSpec:
    ends = _pick(rng, {"both": 0.5, "tied": 0.18, "none": 0.18, "unit": 0.14})
    num_blocks = rng.randint(1 if ends == "none" else 0, 3)
    start = _pick(rng, {"": 0.82, "to_empty": 0.03, "replaced": 0.05, "frozen units": 0.1})
    blocks = [_block(rng, ends, without) for _ in range(num_blocks)]
    if rng.random() < 0.35:
        blocks = blocks[:1] * num_blocks  # as in a transformer: ranks that take one for another send equal sizes
    if start == "frozen units" and blocks:
        blocks[-1] = dataclasses.replace(blocks[-1], frozen=tuple(range(8)))
    return ModelSpec(
        width=rng.choice([3, 5, 8]),
        ends=ends,
        policy=policy,
        root_reshards=_pick(rng, {None: 0.7, True: 0.2, False: 0.1}),
        meta=start if start in ("to_empty", "replaced") and "from meta" not in without else "",
        # FSDP2 cannot gather an extension over one rank, which a node may have.
        frozen_units=start == "frozen units" and not any(block.kind in EXTENSION_KINDS for block in blocks),
        blocks=tuple(blocks),
    )


def _divided(model: ModelSpec, kind: str) -> ModelSpec:
    """Let groups divide the first block, if need be an added one, and some others.

    DTensors are neither extended nor put on the meta device or a node here.
    """
    blocks = [
        dataclasses.replace(block, kind=kind, unit=True)
        if index == 0 or block.kind in ("bare", *EXTENSION_KINDS)
        else block
        for index, block in enumerate(model.blocks or (BlockSpec(),))
    ]
    return dataclasses.replace(model, meta="", frozen_units=False, blocks=tuple(blocks))


def _block(rng: random.Random, ends: str, without: Collection[str]) -> BlockSpec:
    frozen = _pick(rng, {(): 0.8, (0,): 0.1, tuple(range(8)): 0.1})
    kinds = [kind for kind in BLOCK_KINDS if kind not in EXTENSION_KINDS or "extension" not in without]
    return BlockSpec(
        kind=rng.choice(kinds),
        inner=rng.choice([1, 2, 9]),
        unit=rng.random() < 0.85,
        reshards=rng.random() < 0.75,
        recomputes=rng.random() < 0.12,
        # Without a matrix in front of the blocks, the input of the first one has no gradient.
        reentrant=rng.random() < 0.08 and ends != "none" and "reentrant" not in without,
        frozen=frozen,
    )


def _fitting(settings: dict[str, Any], models: Sequence[ModelSpec]) -> dict[str, Any]:
    """Leave out deltas where a parameter gathers itself: they are refused there."""
    has_extension = any(block.kind in EXTENSION_KINDS for model in models for block in model.blocks)
    if has_extension and settings.get("qwz_mode") == "delta":
        return {name: value for name, value in settings.items() if name not in ("qwz_mode", "qwz_bits")}
    return settings


def _optimizers(rng: random.Random) -> tuple[OptimizerSpec, ...]:
    if rng.random() < 0.75:
        return (OptimizerSpec(rng.choice(list(KINDS))),)
    return tuple(OptimizerSpec(rng.choice(list(KINDS)), part) for part in ("even", "odd"))


def _settings(rng: random.Random, world: int, ranks_per_node: int) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    copies = [
        size
        for size in range(1, world + 1)
        if world % size == 0 and not (ranks_per_node % size and size % ranks_per_node)
    ]
    settings["hpz_size"] = _pick(rng, {"node": 0.6, None: 0.15, rng.choice(copies): 0.25})
    for name, likelihood in (("overlap", 0.3), ("shared_memory", 0.3)):
        if rng.random() < likelihood:
            settings[name] = False
    way = _pick(rng, {"exact": 0.75, "values": 0.1, "delta": 0.15})
    if way == "values":
        settings |= {"qwz_bits": 8, "qgz_bits": 8, "qgz_intra_bits": 8}
    if way == "delta":
        settings |= {"qwz_mode": "delta", "qwz_bits": 8}
        if settings["hpz_size"] is None or settings["hpz_size"] == world > ranks_per_node:
            settings["hpz_size"] = "node"
    keeps_copies = settings["hpz_size"] is not None and not settings["hpz_size"] == world > ranks_per_node
    # Nothing is rounded here either. Drawn last, so that older seeds keep the rest of their programs.
    if way == "exact" and keeps_copies and rng.random() < 0.35:
        settings["qwz_mode"] = "exact"
    return settings
