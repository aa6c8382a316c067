"""The models of the fuzz: a few parameters each, none of whose sizes a world divides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from differential.cases import BlockSpec, Case, ModelSpec
from differential.extension import EXTENSION_KINDS, Extension
from differential.meshes import mesh_of_model, rows_of
from hf_zeropp.comm.topology import get_topology
from hf_zeropp.frozen.units import frozen_parameters, shard_frozen

MP_POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "fp16 reduce": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}


class Mlp(nn.Module):
    """x + down(tanh(up(scale * x))), where ``scale`` is a bare 1-D parameter."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.5 + torch.rand(width))
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.scale * x)))


class Bare(nn.Module):
    """Parameters in containers, and no submodule that owns one."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(inner, width) / width) for _ in range(2))
        self.vectors = nn.ParameterDict({"gain": nn.Parameter(torch.rand(width))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.vectors["gain"] * (torch.tanh(x @ self.matrices[0].t()) @ self.matrices[1])


class Nested(nn.Module):
    """A block with a block inside, which is a unit of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.child = Mlp(width, inner)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.child(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Unused(Mlp):
    """A block with a parameter that never gets a gradient."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.idle = nn.Parameter(torch.randn(inner, 2))


class Cut(Mlp):
    """A block that tensor parallelism cuts; two ranks divide its rows."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, 2 * inner)


class Experts(nn.Module):
    """A block that computes with the matrices that this rank's group holds, of which two groups hold ``inner`` each.

    Attributes:
        group: on the unsharded model, the number of the group, and of how many.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2 * inner, width, width) / width)
        self.group = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index, num_groups = self.group
        is_sharded = isinstance(self.weights, DTensor)
        weights = self.weights.to_local() if is_sharded else self.weights.chunk(num_groups)[index]
        return x + torch.tanh(x @ weights).mean(0)


BLOCKS: dict[str, type[nn.Module]] = {"mlp": Mlp, "bare": Bare, "nested": Nested, "tied": Tied, "unused": Unused}
BLOCKS |= dict.fromkeys(EXTENSION_KINDS, Mlp)  # see ``shard``
BLOCKS |= {"cut": Cut, "experts": Experts}


class Net(nn.Module):
    """The root: a matrix, the blocks in the order of ``path``, and another matrix."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        has_ends = spec.ends != "none"
        self.first = nn.Linear(spec.width, spec.width) if has_ends else nn.Identity()
        self.blocks = nn.ModuleList(_build_block(block, spec.width) for block in spec.blocks)
        self.last = nn.Linear(spec.width, spec.width, bias=False) if has_ends else nn.Identity()
        if spec.ends == "tied":
            self.last.weight = self.first.weight
        self.reentrant = [block.reentrant for block in spec.blocks]
        self.checkpoints = False  # set where the model is sharded

    def forward(self, x: torch.Tensor, path: Sequence[int] | None = None) -> torch.Tensor:
        x = self.first(x)
        for index in range(len(self.blocks)) if path is None or not len(self.blocks) else path:
            x = self._block(index % len(self.blocks), x)
        return self.last(x)

    def _block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[index]
        if not self.reentrant[index]:
            return block(x)
        if self.checkpoints:
            return checkpoint(block, x, use_reentrant=True)
        # Reentrant checkpointing gives no gradients where its input has none.
        return block(x) if x.requires_grad else block(x).detach()


class Container(nn.Module):
    """An unsharded module around two models. Its output is a list of theirs."""

    def __init__(self, nets: Sequence[Net], chained: bool) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self.chained = chained

    def forward(self, inputs: Sequence[torch.Tensor | None], path: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Run each model that has an input."""
        return run_models([functools.partial(net, path=path) for net in self.nets], inputs, self.chained)


def run_models(
    models: Sequence[Callable[[torch.Tensor], torch.Tensor]], inputs: Sequence[torch.Tensor | None], chained: bool
) -> list[torch.Tensor]:
    """Run each model that has an input; ``chained``, the mean of what one gives is added to what the next one gets."""
    outputs: list[torch.Tensor] = []
    for model, x in zip(models, inputs, strict=True):
        if x is not None:
            outputs.append(model(x + outputs[-1].float().mean() if chained and outputs else x))
    return outputs


def build(spec: ModelSpec, seed: int) -> Net:
    """The model with the same weights on every rank and every side."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(spec)


class Parameter(NamedTuple):
    """A parameter of one of the models, as the generator of programs sees it.

    Attributes:
        model: the number of its model.
        name: its name in that.
        is_used: whether every forward without a path uses it.
        trains: whether it trains at the start.
        is_on_node: whether ZeRO++ shards it over the node.
    """

    model: int
    name: str
    is_used: bool
    trains: bool
    is_on_node: bool


def parameters_of(case: Case) -> list[Parameter]:
    """Return the parameters of all models, as ``freeze`` counts them."""
    return [
        Parameter(index, name, not name.endswith("idle"), trains, spec.frozen_units and case.has_nodes and not trains)
        for index, spec in enumerate(case.models)
        for name, trains in _names_and_training(spec)
    ]


@functools.cache
def _names_and_training(spec: ModelSpec) -> list[tuple[str, bool]]:
    return [(name, param.requires_grad) for name, param in build(spec, 0).named_parameters()]


@functools.cache
def units_of(spec: ModelSpec) -> dict[str, str]:
    """Return the unit that each parameter is in, by its name."""

    def unit_of(name: str) -> str:
        first, _, rest = name.partition(".")
        if first != "blocks":
            return "ends" if spec.ends == "unit" else "root"
        index = rest.partition(".")[0]
        block = spec.blocks[int(index)]
        if not block.unit:
            return "root"
        is_child = block.kind == "nested" and rest.startswith(f"{index}.child.")
        return f"{index}.child" if is_child else index

    return {name: unit_of(name) for name, _ in _names_and_training(spec)}


def unused_in(case: Case, params: Mapping[str, torch.Tensor], fresh: Collection[str]) -> list[torch.Tensor]:
    """Return the trainable parameters that got no gradient in a pass, of units that have one of its ``fresh`` gradients.

    ZeRO++ gives them gradients of zeros, where there are several nodes.
    """
    if not case.has_nodes:
        return []
    of_models = enumerate(map(units_of, case.models))
    units = {f"{index}.{name}": (index, unit) for index, of_model in of_models for name, unit in of_model.items()}
    reduced = {units[name] for name in fresh}
    return [
        param for name, param in params.items() if param.requires_grad and name not in fresh and units[name] in reduced
    ]


def fill_in_zeros(params: Iterable[torch.Tensor]) -> None:
    """Give gradients of zeros to those without one."""
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)


def blocks_that_are_units(spec: ModelSpec) -> list[int]:
    return [index for index, block in enumerate(spec.blocks) if block.unit]


def skipped_blocks(
    case: Case, trained: Iterable[str], which: int, block: int, other: int | None
) -> tuple[set[int], set[int]] | None:
    """Return the blocks that one rank skips and those that the others skip (``Side.train_apart``); None where none may.

    That is on one node, where no block is a unit, and where the skipped block does not train or a rank would train nothing
    beside what it skips: a rank without a backward pass steps without a word, and the others meet its next forward pass.

    Args:
        trained: the parameters that train, as ``"0.blocks.1.weight"``.
        which: the model.
        block: the block that one rank skips, counted among those that are units.
        other: the same of the others; None, or the same block, for none.
    """
    units = blocks_that_are_units(case.models[which])
    if not units or not case.has_nodes:
        return None
    of_one = {units[block % len(units)]}
    of_others = set() if other is None else {units[other % len(units)]} - of_one
    used = [name for name in trained if name.startswith(f"{which}.") and not name.endswith("idle")]

    def are_in(blocks: Collection[int]) -> list[bool]:
        prefixes = tuple(f"{which}.blocks.{index}." for index in blocks)
        return [name.startswith(prefixes) for name in used]

    all_train = any(are_in(of_one)) and not all(are_in(of_one)) and not all(are_in(of_others))
    return (of_one, of_others) if all_train else None


def shard(net: Net, spec: ModelSpec, case: Case, mesh: DeviceMesh, *, frozen_units: bool) -> Net:
    """Call ``fully_shard`` as the specification says, inner modules first; and recompute activations where it says so.

    Args:
        frozen_units: whether frozen parameters are sharded over the node first.
    """
    net.checkpoints = True
    if starts_on_meta(net, spec):
        net = net.to("meta")
    else:  # an extension must have values
        _make_extensions(net, spec)
    if case.has_neighbours:
        _divide_over_groups(net, spec, mesh[case.mesh])
    settings = {"mesh": mesh_of_model(case, mesh), "mp_policy": MP_POLICIES[spec.policy]}
    units = [net.blocks[index] for index in blocks_that_are_units(spec)]
    if frozen_units:
        node_mesh = get_topology(case.ranks_per_node, "cpu").mesh["node"]
        shard_frozen(net, units, node_mesh, param_dtype=MP_POLICIES[spec.policy].param_dtype)
        settings["ignored_params"] = set(frozen_parameters(net))
    for block, block_spec in zip(net.blocks, spec.blocks, strict=True):
        if block_spec.recomputes:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if not block_spec.unit:
            continue
        if block_spec.kind == "experts" and case.mesh == "ep":
            fully_shard(block, reshard_after_forward=block_spec.reshards, **settings | {"mesh": mesh["shard"]})
            # The mean over all ranks, as that of dense weights. gloo has no sums with a factor, which FSDP2 asks for otherwise.
            block.set_gradient_divide_factor(float(case.num_ranks))
            block.set_force_sum_reduction_for_comms(True)
            continue
        if block_spec.kind == "nested":
            fully_shard(block.child, reshard_after_forward=block_spec.reshards, **settings)
        fully_shard(block, reshard_after_forward=block_spec.reshards, **settings)
    if spec.ends == "unit":
        fully_shard([net.first, net.last], reshard_after_forward=False, **settings)
    fully_shard(net, reshard_after_forward=spec.root_reshards, **settings)
    return net


def starts_on_meta(net: Net, spec: ModelSpec) -> bool:
    """Whether the model is sharded on the meta device. ``to_empty`` would part tied parameters, so none of those is."""
    return bool(spec.meta) and len(list(net.parameters())) == len(list(net.named_parameters(remove_duplicate=False)))


def leave_meta(net: Net, way: str, whole: Net, mesh: DeviceMesh) -> None:
    """Give a sharded model on the meta device memory, and the values of the whole model."""
    if way == "to_empty":
        net.to_empty(device="cpu")
    values = dict(whole.named_parameters())
    for name, param in list(net.named_parameters()):
        if way == "replaced":
            new = nn.Parameter(torch.empty_like(param.detach(), device="cpu"), requires_grad=param.requires_grad)
            put(net, name, new)
            param = new
        shards = mesh.ndim - 1  # behind the dimension of replicas, if there is one
        param.detach().to_local().copy_(rows_of(values[name].detach(), mesh.get_local_rank(shards), mesh.size(shards)))


def put(net: Net, name: str, param: nn.Parameter) -> None:
    """Put a parameter in the place of another one."""
    module, _, attribute = name.rpartition(".")
    setattr(net.get_submodule(module), attribute, param)


def _divide_over_groups(net: Net, spec: ModelSpec, groups: DeviceMesh) -> None:
    """Leave each group its part of the blocks of kinds "cut" and "experts"."""
    for block, block_spec in zip(net.blocks, spec.blocks, strict=True):
        if block_spec.kind == "cut":
            parallelize_module(block, groups, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if block_spec.kind == "experts":
            part = distribute_tensor(block.weights.detach(), groups, [Shard(0)])
            block.weights = nn.Parameter(part, requires_grad=block.weights.requires_grad)


def _make_extensions(net: Net, spec: ModelSpec) -> None:
    """Let one weight of a block gather itself."""
    for block, block_spec in zip(net.blocks, spec.blocks, strict=True):
        if block_spec.kind in EXTENSION_KINDS:
            weight = block.up.weight
            extension = Extension(weight.detach(), block_spec.kind)
            block.up.weight = nn.Parameter(extension, requires_grad=weight.requires_grad)


def _build_block(spec: BlockSpec, width: int) -> nn.Module:
    block = BLOCKS[spec.kind](width, spec.inner)
    params = list(block.parameters())
    for index in spec.frozen:
        params[index % len(params)].requires_grad_(False)
    return block
