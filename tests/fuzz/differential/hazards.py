"""Names for what a program does that is easy to get wrong: the fuzz groups its failures by them, and can leave them out.

``hazards(case)`` walks the operations and keeps track of what a careful user would: whether gradients wait for the last
micro-step, whether units were left unsharded, and whether weights changed in a way that no counter and no hook shows.
"""

from __future__ import annotations

import dataclasses

from differential.cases import LOUD_ROUTES, Case, Operation
from differential.extension import EXTENSION_KINDS
from differential.networks import parameters_of, skipped_blocks

HAZARDS = {
    "pending at step": "an optimizer steps while micro-steps wait for a last one that did not come",
    "pending in a closure": "the backward pass within an optimizer's step is no last micro-step",
    "pending at clip": "gradients are clipped while micro-steps wait",
    "pending at read": "gradients are read or scaled by hand while micro-steps wait",
    "pending and zeroed": "zero_grad(set_to_none=False) while micro-steps wait",
    "pending and part dropped": "an optimizer over a part of the parameters drops its gradients while micro-steps wait",
    "pending and refrozen": "requires_grad changes while micro-steps wait",
    "waits on the rank": "gradients are dropped while they wait on the rank, which FSDP2 keeps whatever becomes of .grad",
    "frozen before step": "parameters are frozen between backward and step",
    "silent write": "weights change through .data, numpy, foreach, or a checkpoint loaded in place, and invalidate() follows",
    "step that raises": "an optimizer raises after a part of its updates",
    "changed while unsharded": "weights change while a forward without backward left units unsharded",
    "frozen while unsharded": "requires_grad changes while a forward without backward left units unsharded",
    "trained late": "in mixed precision, parameters begin to train that did not at the first forward",
    "optimizer on one rank": "an optimizer of another module steps on one rank alone",
    "step skipped on one rank": "one rank skips an optimizer step",
    "edit on one rank": "one rank changes its shard of a weight",
    "models in one container": "two sharded models in one unsharded container",
    "one loss of two roots": "the output of one sharded model goes into another, and one backward pass runs through both",
    "reentrant": "reentrant checkpointing around the call of a unit",
    "extension": "a parameter gathers itself (fsdp_pre_all_gather)",
    "from meta": "a model is sharded on the meta device",
    "replaced before the first pass": "parameters are replaced by others after a model is sharded",
    "thawed": "frozen weights that ZeRO++ has sharded over the node begin to train",
    "skipped on one rank": "one rank skips a unit that the others train, and a step or a forward pass follows",
    "skipped where gathers wait": "the same, where the others wait for that rank in a gather within the pass",
}
STOCK_IS_WRONG = ("frozen while unsharded", "trained late")
"""Hazards that FSDP2 itself does not stand, and for which the package makes no promise."""
BETTER_THAN_STOCK = frozenset({"changed while unsharded"})
"""Hazards that FSDP2 itself does not stand, and the package does."""

FOR_NODE = frozenset({"waits on the rank", *(name for name in HAZARDS if name.startswith("pending"))})
"""Hazards that only ``qgz_accumulate="node"`` stands. On the rank, FSDP2 promises nothing before the last micro-step."""

MUST_RAISE = frozenset({"skipped on one rank", "skipped where gathers wait"})
"""Hazards that must end in an error on all ranks: there are no right numbers."""
MAY_RAISE = frozenset({"thawed", "pending in a closure"})
"""Hazards that may end in an error on all ranks: right numbers are as good."""

CURED_BY_INVALIDATE = frozenset(
    {
        "silent write",
        "frozen before step",
        "step that raises",
        "optimizer on one rank",
        "step skipped on one rank",
        "edit on one rank",
    }
)
"""Hazards that a user who calls ``handle.invalidate()`` before the next forward avoids."""

_BACKWARDS = {"train", "train_apart", "no_sync", "abort", "train_with_steps_inside", "step_with_closure"}
_FORWARDS = {"forward", "evaluate", "generate", *_BACKWARDS}
_STEPS = {"step", "step_with_closure", "step_on_all_but_one", "step_that_raises"}


@dataclasses.dataclass
class Walk:
    """The state of a program behind some of its operations.

    Attributes:
        is_last: what ``set_last`` said.
        pending: the models whose gradients wait for a last micro-step.
        has_grads: whether there are gradients that a step would use.
        froze_with_grads: whether ``requires_grad`` changed while there were.
        unsharded: the models with units that a forward without backward left unsharded.
        changes: hazards that take effect at the next forward.
        is_apart: whether one rank has skipped a unit.
        settled: the models whose weights have all crossed nodes since they changed.
        trainable: indices of the parameters that train and are used, as ``freeze`` counts them.
        frozen_at_start: indices of those that did not at the first forward; None before it.
        found: the hazards so far.
    """

    case: Case
    is_last: bool = True
    pending: set[int] = dataclasses.field(default_factory=set)
    has_grads: bool = False
    froze_with_grads: bool = False
    is_apart: bool = False
    settled: set[int] = dataclasses.field(default_factory=set)
    unsharded: set[int] = dataclasses.field(default_factory=set)
    changes: set[str] = dataclasses.field(default_factory=set)
    trainable: set[int] = dataclasses.field(default_factory=set)
    frozen_at_start: set[int] | None = None
    found: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def start(cls, case: Case) -> Walk:
        trainable = {index for index, param in enumerate(parameters_of(case)) if param.is_used and param.trains}
        return cls(case, trainable=trainable, found={name for name, is_there in _in_models(case).items() if is_there})

    def copy(self) -> Walk:
        sets = {name: set(value) for name, value in vars(self).items() if isinstance(value, set)}
        return dataclasses.replace(self, **sets)

    def _used(self, args: dict) -> set[int]:
        """The models that an operation runs."""
        every = set(range(len(self.case.models)))
        if "model" in args:
            return {args["model"] % len(every)}
        return every if args.get("which") is None else {args["which"] % len(every)}

    def _surely_trains(self, args: dict) -> bool:
        """Whether every model that an operation runs has a backward pass: something in it trains, and is on the path."""
        params = parameters_of(self.case)
        for model in self._used(args):
            own = [index for index, param in enumerate(params) if param.model == model]
            has_end = self.case.models[model].ends != "none"
            is_on_path = args.get("path") is None or (has_end and own[0] in self.trainable)
            if not (is_on_path and self.trainable.intersection(own)):
                return False
        return True

    def take(self, operation: Operation) -> None:
        """Go one operation on."""
        name, args = operation.name, operation.all_args
        if name in _FORWARDS:
            if self.frozen_at_start is None:
                self.frozen_at_start = set(range(len(parameters_of(self.case)))) - self.trainable
            self.found |= self.changes
            self.changes.clear()
            self.unsharded |= self._used(args)
        if name in ("train", "forward", "evaluate") and args.get("path") is None:
            self.settled |= self._used(args)
        if name == "train_apart" and self._skips(args):
            self.is_apart = True
            self.changes.add("skipped where gathers wait" if self._gathers_wait(args) else "skipped on one rank")
        if name in _BACKWARDS:
            self._backward(name, args)
        if name in _STEPS:
            self._step(name)
        if name in ("edit", "edit_on_one_rank", "load"):
            self._write(name, args)
        if name in ("freeze", "unfreeze"):
            self._refreeze(name, args)
        if name == "replace" and self.frozen_at_start is None:
            self.found.add("replaced before the first pass")
        if name in ("zero_grad", "discard"):
            self._zero_grad(name, args)
        if name == "set_last":
            self.is_last = args["last"]
        if name == "step_of_another_module":
            self.changes.add("optimizer on one rank")
        if name == "invalidate":
            self.changes -= CURED_BY_INVALIDATE
        if name in ("invalidate", "save", "save_handle_state"):
            self.settled.clear()
        if name in ("clip", "read_grads", "scale_grads") and self.pending:
            self.found.add("pending at clip" if name == "clip" else "pending at read")

    def _backward(self, name: str, args: dict) -> None:
        if name == "abort":
            # The pass that raised has left gradients on the rank as well, where it was not the last micro-step.
            if self.case.accumulates_on_rank and (self.pending or not self.is_last):
                self.found.add("waits on the rank")
            self.has_grads = False
            self.pending.clear()
            self.unsharded -= self._used(args)
            return
        if name == "step_with_closure":  # the closure begins with the optimizer's zero_grad
            self._zero_grad("zero_grad", {"optimizer": args["optimizer"], "keep": False})
        is_sure = self._surely_trains(args)
        if is_sure:
            self.unsharded -= self._used(args)
        self.is_last = self.is_last or name == "train_with_steps_inside"
        self.has_grads = True
        if not self.is_last:
            self.pending |= self._used(args)
        elif is_sure:  # one handle serves both models of a container, and delivers all that waits
            delivers_all = self.case.joined and not self.case.accumulates_on_rank
            self.pending -= set(range(len(self.case.models))) if delivers_all else self._used(args)

    def _skips(self, args: dict) -> bool:
        """Whether one rank skips a block: see ``sides.Side.train_apart``."""
        which = args["model"] % len(self.case.models)
        params = parameters_of(self.case)
        trained = [f"{params[index].model}.{params[index].name}" for index in self.trainable]
        return self.is_last and skipped_blocks(self.case, trained, which, args["block"], args["other"]) is not None

    def _gathers_wait(self, args: dict) -> bool:
        """Whether ranks meet in gathers within a pass. They wait there for a rank that runs another one, until the time-out."""
        settings, models = dict(self.case.settings), self.case.models
        size = settings.get("hpz_size", "node")
        keeps_copies = size is not None and size != self.case.world
        has_extension = any(block.kind in EXTENSION_KINDS for model in models for block in model.blocks)
        # Weights that move in 16 bits within the node are gathered by gloo, whatever memory the ranks share.
        reads_peers = settings.get("shared_memory", True) and settings.get("qwz_intra_bits", 8) is not None
        # Ranks that read copies in each other's memory wait for each other where weights arrive.
        share_copies = (self.case.ranks_per_node if size == "node" else size) != 1
        lands = share_copies and not self._used(args) <= self.settled
        return not (keeps_copies and reads_peers) or has_extension or lands

    def _step(self, name: str) -> None:
        self.found |= self.changes & MUST_RAISE
        if self.pending:
            self.found.add("pending at step")
            if name == "step_with_closure" and not self.is_last:
                self.found.add("pending in a closure")
        if name == "step_that_raises" and self.has_grads:
            self.changes.add("step that raises")
        if name == "step_on_all_but_one":
            self.changes.add("step skipped on one rank")
        if self.froze_with_grads:
            self.changes.add("frozen before step")
        self._weights_changed()

    def _write(self, name: str, args: dict) -> None:
        route = args["route"]
        if name == "edit_on_one_rank":
            self.changes.add("edit on one rank")
        if name != "load" and route not in LOUD_ROUTES or route == "dcp_in_place":
            self.changes.add("silent write")
        self._weights_changed()

    def _weights_changed(self) -> None:
        self.settled.clear()
        if self.unsharded:
            self.changes.add("changed while unsharded")

    def _refreeze(self, name: str, args: dict) -> None:
        params = parameters_of(self.case)
        chosen = {(args["param"] + offset) % len(params) for offset in range(args["count"])}
        chosen = {index for index in chosen if params[index].is_used}
        is_mixed = any(model.policy != "fp32" for model in self.case.models)
        if name == "unfreeze" and is_mixed and self.frozen_at_start and chosen & self.frozen_at_start:
            self.found.add("trained late")
        self.trainable = self.trainable - chosen if name == "freeze" else self.trainable | chosen
        if name == "unfreeze" and any(params[index].is_on_node for index in chosen):
            self.changes.add("thawed")
        if self.pending:
            self.found.add("pending and refrozen")
        self.froze_with_grads = self.froze_with_grads or self.has_grads
        if self.unsharded:
            self.changes.add("frozen while unsharded")

    def _zero_grad(self, name: str, args: dict) -> None:
        if self.pending and name == "zero_grad" and args["keep"]:
            self.found.add("pending and zeroed")
        if self.pending and name == "zero_grad" and args["optimizer"] is not None and self._is_partial(args):
            self.found.add("pending and part dropped")
            return
        if self.pending and name == "zero_grad" and self.case.accumulates_on_rank:
            self.found.add("waits on the rank")
        self.has_grads = self.froze_with_grads = False
        self.pending.clear()

    def _is_partial(self, args: dict) -> bool:
        return self.case.optimizers[args["optimizer"] % len(self.case.optimizers)].part != "all"


def _in_models(case: Case) -> dict[str, bool]:
    """Return which hazards there are whatever a program does."""
    blocks = [block for model in case.models for block in model.blocks]
    return {
        "models in one container": case.joined,
        "one loss of two roots": case.chained,
        "reentrant": any(block.reentrant and block.unit for block in blocks),
        "extension": any(block.kind in EXTENSION_KINDS for block in blocks),
        "from meta": any(bool(model.meta) for model in case.models),
    }


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An error on all ranks that is right.

    Attributes:
        first: the operation in which it may be raised at the earliest.
        last: the one in which it must have been raised.
        is_due: whether silence is wrong.
    """

    first: int
    last: int
    is_due: bool


def refusal(case: Case) -> Refusal | None:
    """Return when an error on all ranks is right; None where it never is."""
    walk, first, last = Walk.start(case), None, len(case.operations) - 1
    for index, operation in enumerate(case.operations):
        walk.take(operation)
        if first is None and (walk.is_apart or walk.found & MAY_RAISE):
            first = index
        if walk.found & MUST_RAISE:
            last = index
            break
    if first is None or not walk.found & (MUST_RAISE | MAY_RAISE):
        return None
    return Refusal(first, last, bool(walk.found & MUST_RAISE))


def hazards(case: Case) -> frozenset[str]:
    """The names, among ``HAZARDS``, of what the program does, on any group of its mesh."""
    found: set[str] = set()
    for walk in map(Walk.start, case.stages):
        for operation in case.operations:
            walk.take(operation)
        found |= walk.found
    return frozenset(found)
