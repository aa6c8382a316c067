"""The programs of the fuzz, and their text form.

A case holds everything that one run depends on: the world, the settings, the models, the optimizers and the operations.
Its text form is a list of calls, one a line, which a person can read and ``Case.parse`` turns back into the same case::

    world(size=4, ranks_per_node=2)
    model(width=5)
    block(kind='mlp', inner=3)
    optimizer(kind='sgd')
    set_last(last=False)
    train(data=1)
    step()

Only arguments that differ from their defaults are printed.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

BLOCK_KINDS = ("mlp", "bare", "nested", "tied", "unused", "doubled", "parts")
MESHES = ("replicas", "tp", "ep", "pp")
STATELESS = ("sgd", "sgd_foreach", "writes_data", "writes_memory")

# Routes by which weights are written, on all ranks or on one. The first group moves version counters of the DTensor or of
# its local tensor, the second moves none.
LOUD_ROUTES = ("in_place", "local", "detached")
SILENT_ROUTES = ("data", "numpy", "foreach")
LOAD_ROUTES = ("load_state_dict", "set_model_state_dict", "dcp_and_load_state_dict", "dcp_in_place")

# Every operation with its arguments and their defaults, in the order in which ``generate`` draws them. ``sides.Side`` has a
# method of the same name for each, which says what it does. ``which`` is None for all models, or the index of one; ``path`` is
# None for all blocks in order.
OPERATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "train": {"data": 0, "which": None, "path": None, "forwards": 1, "backwards": 1, "input_grad": False},
        "forward": {"data": 0, "which": None},
        "evaluate": {"data": 0, "which": None, "path": None, "times": 1},
        "generate": {"data": 0, "which": None, "times": 3, "budget": 0},
        "no_sync": {"data": 0, "which": None, "count": 1, "marks_last": False},
        "abort": {"data": 0, "which": None},
        "train_with_steps_inside": {"data": 0, "which": None},
        "train_apart": {"data": 0, "model": 0, "rank": 0, "block": 0, "other": None},
        "set_last": {"last": True},
        "zero_grad": {"optimizer": None, "keep": False},
        "discard": {},
        "clip": {"norm": 0.05, "foreach": None},
        "scale_grads": {"factor": 0.5},
        "read_grads": {},
        "step": {"optimizer": 0},
        "step_with_closure": {"optimizer": 0, "data": 0},
        "step_on_all_but_one": {"optimizer": 0, "rank": 0},
        "step_that_raises": {},
        "step_of_another_module": {"rank": 0},
        "freeze": {"param": 0, "count": 1},
        "unfreeze": {"param": 0, "count": 1},
        "replace": {"param": 0, "count": 1, "factor": 1.5},
        "edit": {"param": 0, "count": 1, "route": "in_place", "factor": 1.5},
        "edit_on_one_rank": {"param": 0, "rank": 0, "route": "in_place", "factor": 1.5},
        "save": {},
        "load": {"route": "load_state_dict"},
        "invalidate": {},
        "save_handle_state": {},
    }
)


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One block of a model.

    Attributes:
        kind: one of ``BLOCK_KINDS``, or "cut" with tensor parallelism, or "experts" on the mesh "ep".
        inner: rows of its widest matrix; 1 or 2 leave ranks without a shard.
        unit: whether ``fully_shard`` is called on it.
        reshards: its ``reshard_after_forward``.
        recomputes: whether its activations are computed again in the backward pass.
        reentrant: whether the call of it, FSDP2's hooks and all, runs inside reentrant checkpointing.
        frozen: indices of its parameters that do not train from the start.
    """

    kind: str = "mlp"
    inner: int = 3
    unit: bool = True
    reshards: bool = True
    recomputes: bool = False
    reentrant: bool = False
    frozen: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """One model: blocks between two matrices of the root.

    Attributes:
        width: features between blocks.
        ends: its first and last matrix: "both" (the root's), "tied" (one parameter of the root), "unit" (a unit of their own,
            and nothing is left to the root), or "none".
        policy: its mixed precision, a key of ``networks.MP_POLICIES``.
        root_reshards: ``reshard_after_forward`` of the root; None leaves it to FSDP2.
        meta: how a model without tied parameters, which is sharded on the meta device, gets memory behind that: "to_empty", or
            "replaced" by other parameters. "": it has memory from the start.
        frozen_units: under ZeRO++, what does not train from the start is sharded over the node, as the plugin does it.
    """

    width: int = 5
    ends: str = "both"
    policy: str = "fp32"
    root_reshards: bool | None = None
    meta: str = ""
    frozen_units: bool = False
    blocks: tuple[BlockSpec, ...] = ()


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of one of ``optimizers.KINDS`` over a part of the parameters: "all", or those of "even" or "odd" index."""

    kind: str = "sgd"
    part: str = "all"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call of the program. ``args`` holds what differs from the defaults in ``OPERATIONS``."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, **args: Any) -> Operation:
        defaults = OPERATIONS[name]
        return cls(name, tuple(sorted((key, value) for key, value in args.items() if value != defaults[key])))

    @property
    def all_args(self) -> dict[str, Any]:
        return {**OPERATIONS[self.name], **dict(self.args)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program and everything it depends on.

    Attributes:
        world: the ranks over which models are sharded, which are all ranks without ``mesh``.
        ranks_per_node: of those.
        mesh: one of ``MESHES`` (see ``meshes``), or "".
        groups: how many groups of ``world`` ranks the mesh has.
        joined: two models lie in one unsharded container, which ``apply_zeropp`` is called with.
        chained: the output of the first model goes into the second one, and the loss is that of both.
        settings: what ``apply_zeropp`` is given besides ``ranks_per_node``, over settings that quantize nothing.
    """

    world: int = 2
    ranks_per_node: int = 1
    mesh: str = ""
    groups: int = 1
    joined: bool = False
    chained: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    models: tuple[ModelSpec, ...] = (ModelSpec(),)
    optimizers: tuple[OptimizerSpec, ...] = (OptimizerSpec(),)
    operations: tuple[Operation, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.world * self.groups

    @property
    def has_neighbours(self) -> bool:
        """Whether ranks of the same place in all groups are neighbours, and share a node."""
        return self.mesh in ("tp", "ep")

    @property
    def stages(self) -> tuple[Case, ...]:
        """The cases that pipeline stages run, of which each has one block more than the one before it; else this one."""
        if self.mesh != "pp":
            return (self,)
        more = [(BlockSpec(),) * stage for stage in range(self.groups)]
        deeper = [[dataclasses.replace(model, blocks=model.blocks + each) for model in self.models] for each in more]
        return tuple(dataclasses.replace(self, models=tuple(models)) for models in deeper)

    @property
    def has_nodes(self) -> bool:
        """Whether a group has more than one node. With one FSDP2's own collectives stay."""
        return self.ranks_per_node < self.world

    @property
    def accumulates_on_rank(self) -> bool:
        """Whether ZeRO++ leaves gradients on the rank until the last micro-step."""
        return dict(self.settings).get("qgz_accumulate", "node") != "node"

    @property
    def is_exact(self) -> bool:
        """Whether ZeRO++ may differ from an unsharded model by the order of fp32 sums alone."""
        quantizes = any(dict(self.settings).get(name) for name in ("qwz_bits", "qgz_bits", "qgz_intra_bits"))
        return not quantizes and all(model.policy == "fp32" for model in self.models)

    def script(self) -> str:
        """The text form; see the module's docstring."""
        mesh = {"mesh": self.mesh, "groups": self.groups} if self.mesh else {}
        lines = [_call("world", size=self.world, ranks_per_node=self.ranks_per_node, **mesh)]
        if self.settings:
            lines.append(_call("settings", **dict(self.settings)))
        for model in self.models:
            lines.append(_call_of("model", model))
            lines += [_call_of("block", block) for block in model.blocks]
        lines += ["joined()"] * self.joined + ["chained()"] * self.chained
        lines += [_call_of("optimizer", optimizer) for optimizer in self.optimizers]
        lines += [_call(operation.name, **dict(operation.args)) for operation in self.operations]
        return "\n".join(lines)

    @classmethod
    def parse(cls, script: str) -> Case:
        """The case that a text form describes."""
        fields: dict[str, Any] = {"models": [], "optimizers": [], "operations": []}
        for statement in ast.parse(script).body:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError(
                    f"Line {statement.lineno} is not a call with keyword arguments: {ast.unparse(statement)}"
                )
            args = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            _add_call(fields, call.func.id, args)
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


def _add_call(fields: dict[str, Any], name: str, args: dict[str, Any]) -> None:
    if name == "world":
        fields |= {"world": args.pop("size"), **args}
    elif name == "settings":
        fields["settings"] = tuple(sorted(args.items()))
    elif name in ("joined", "chained"):
        fields[name] = True
    elif name == "model":
        fields["models"].append(ModelSpec(**args))
    elif name == "block":
        model = fields["models"].pop()
        fields["models"].append(dataclasses.replace(model, blocks=(*model.blocks, BlockSpec(**args))))
    elif name == "optimizer":
        fields["optimizers"].append(OptimizerSpec(**args))
    else:
        fields["operations"].append(Operation.of(name, **args))


def _call(name: str, **args: Any) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"


def _call_of(name: str, spec: Any) -> str:
    return _call(name, **{field.name: getattr(spec, field.name) for field in differing(spec)})


def differing(spec: Any) -> list[dataclasses.Field]:
    """The fields of a dataclass that differ from their defaults, but for blocks."""
    fields = [field for field in dataclasses.fields(spec) if field.name != "blocks"]
    return [field for field in fields if getattr(spec, field.name) != field.default]
