"""The gather of a frozen unit, which lies within a node, and the refusal of weights in it that thaw.

The ranks over which a gradient is averaged are chosen when a model is prepared: the world for what trains then, and nothing for
what is frozen. A frozen weight that is made trainable later (gradual unfreezing) would get the mean over its node alone, and the
copies of the nodes would go apart for good. So the next gather of such a weight raises an error.
Weights that were frozen and are sharded over the world may thaw (``weight_decisions.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from hf_zeropp.fsdp.comm_objects import CountedAllGather
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.traffic import GATHER_FROZEN, Traffic


class NodeGather(CountedAllGather):
    """FSDP2's own gather of a frozen unit within its node.

    Args:
        unit: the unit.
        names: of its parameters, in the order of the unit.
        traffic: counts its bytes.

    Attributes:
        names: as given.
        first_param: the name that tells the unit from others, since it is no module of the model.
        before_gather: called before each gather, where the model has trainable units.
    """

    before_gather: Callable[[NodeGather], None] | None = None

    def __init__(self, unit: Unit, names: Sequence[str], traffic: Traffic) -> None:
        super().__init__(unit, traffic, GATHER_FROZEN)
        self.names = names
        self.first_param = names[0]

    def begin(self) -> None:
        """Refuse weights that were made trainable, and call ``before_gather``, by which ranks agree that all of them gather.

        Raises:
            ValueError: a weight of the unit was made trainable. Ranks agreed on which before (``weight_decisions.py``).
        """
        self.refuse_thawed()
        if self.before_gather is not None:
            self.before_gather(self)

    def refuse_thawed(self) -> None:
        """Assert that no weight of the unit was made trainable.

        Raises:
            ValueError: one was.
        """
        if thawed := list(self.thawed()):
            size = self.unit.shard_group.size()
            raise ValueError(
                f"{', '.join(thawed)} was made trainable after the model was prepared (rank {dist.get_rank()}). It was frozen "
                f"then, and is sharded over the ranks of a node ({size}): gradients would be averaged over the node alone, "
                "and nodes would train different copies. Set requires_grad before `prepare` (or shard_frozen). To unfreeze "
                "later, save the model, load it anew, set requires_grad, and prepare that."
            )

    def thawed(self) -> Iterator[str]:
        """Iterate over the names of the unit's parameters that are trainable now."""
        if self.unit.trains:
            yield from (name for name, param in zip(self.names, self.unit.params, strict=True) if param.requires_grad)


def install_node_gathers(model: nn.Module, units: Sequence[Unit], traffic: Traffic) -> list[NodeGather]:
    """Let FSDP2 gather the frozen units of ``model`` through gathers of this kind, and return them."""
    # A frozen unit's modules are none of the model's: they do not tell where a parameter is used. Before the first
    # forward pass the model shows the sharded parameters themselves.
    found = {id(param): name for name, param in model.named_parameters()}
    gathers = []
    for unit in units:
        shards = zip(unit.params, unit.param_shards, strict=True)
        gathers.append(NodeGather(unit, [found.get(id(param), shard.name) for param, shard in shards], traffic))
        unit.set_all_gather(gathers[-1])
    return gathers


def refuse_thawed_before_forwards(model: nn.Module, gathers: Sequence[NodeGather]) -> None:
    """Assert before each forward pass that no frozen weight was made trainable, in a model that has no trainable unit.

    Such a model makes no agreements, which look for it elsewhere. On a node of one rank FSDP2 calls no gather either. Without
    frozen units there is nothing to look for, and the model gets no hook.
    """
    if not gathers:
        return

    @torch.compiler.disable
    def before_forward(module: nn.Module, args: object) -> None:
        for gather in gathers:
            gather.refuse_thawed()

    model.register_forward_pre_hook(before_forward, prepend=True)
