"""What is to be trained, as far as arithmetic needs it: parameter shapes, and the units FSDP2 will make of them.

From a parameter count, or from a Hugging Face config on the meta device: no weights, no process group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from hf_zeropp.sizes import parse_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class ParamShape:
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def padded_shard_numel(self, world_size: int) -> int:
        """FSDP2 cuts dimension 0 in equal chunks and pads the last ones."""
        return -(-self.shape[0] // world_size) * math.prod(self.shape[1:])


@dataclasses.dataclass(frozen=True)
class UnitShape:
    """The parameters of one FSDP2 unit. `reshards`: gathered again for the backward pass."""

    name: str
    params: tuple[ParamShape, ...]
    reshards: bool = True

    @property
    def trainable(self) -> tuple[ParamShape, ...]:
        return tuple(param for param in self.params if param.trainable)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    name: str
    units: tuple[UnitShape, ...]

    @classmethod
    def of(cls, source: str, num_trainable: int | None = None) -> ModelShape:
        """A parameter count (`7B`, `350M`), or a hub name or path of a Hugging Face config.

        Args:
            num_trainable: parameters trained beside the model's own, which are then frozen (LoRA).

        Raises:
            ValueError: neither a count nor a model that Transformers finds.
        """
        count = parse_count(source)
        units = _units_of_pretrained(source) if count is None else _blocks(count)
        if num_trainable is not None:
            units = (*_frozen(units), _matrix("adapters", num_trainable))
        return cls(source, tuple(units))

    @property
    def num_params(self) -> int:
        return sum(param.numel for unit in self.units for param in unit.params)

    @property
    def num_trainable(self) -> int:
        return sum(param.numel for unit in self.units for param in unit.trainable)


def units_of(model: PreTrainedModel) -> tuple[UnitShape, ...]:
    """The units Accelerate makes of a Transformers model: each block; the embeddings; final norm and head; the rest.

    The head, with the final norm, and the rest are not resharded after the forward pass.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    blocks = {name: module for name, module in model.named_modules() if _is_block(model, module)}
    taken: set[int] = set()
    units = [_unit(name, block.parameters(), taken) for name, block in blocks.items()]
    norms = [module for name, module in _outside(model, blocks) if "norm" in name.rpartition(".")[2]]
    if head is None or head.weight is not embedding.weight:
        units.append(_unit("embeddings", embedding.parameters(), taken))
    tail = [*norms[-1:], *(() if head is None else (head,))]
    units.append(_unit("head", (param for module in tail for param in module.parameters()), taken, reshards=False))
    units.append(_unit("rest", model.parameters(), taken, reshards=False))
    return tuple(unit for unit in units if unit.params)


def _units_of_pretrained(source: str) -> tuple[UnitShape, ...]:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source!r} is neither a parameter count (7B, 350M) nor a model Transformers finds: {error}"
        ) from error
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config)
        except ValueError:  # no language model
            model = AutoModel.from_config(config)
    return units_of(model)


def _is_block(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    return type(module).__name__ in (getattr(model, "_no_split_modules", None) or ())


def _outside(model: torch.nn.Module, blocks: Iterable[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    prefixes = tuple(f"{name}." for name in blocks)
    return ((name, module) for name, module in model.named_modules() if not f"{name}.".startswith(prefixes))


def _unit(name: str, params: Iterable[torch.nn.Parameter], taken: set[int], *, reshards: bool = True) -> UnitShape:
    """A unit of those parameters that no earlier unit has taken (tied weights belong to the first)."""
    own = [param for param in params if id(param) not in taken]
    taken.update(map(id, own))
    return UnitShape(name, tuple(ParamShape(tuple(param.shape), param.requires_grad) for param in own), reshards)


def _blocks(count: int) -> tuple[UnitShape, ...]:
    """A transformer of usual proportions: L blocks of width 128 L, with 12 width^2 parameters each (7 B: 33 blocks)."""
    num_blocks = max(1, round((count / (12 * 128**2)) ** (1 / 3)))
    sizes = [count // num_blocks + (i < count % num_blocks) for i in range(num_blocks)]
    return tuple(_matrix(f"block {i}", size) for i, size in enumerate(sizes))


def _matrix(name: str, numel: int) -> UnitShape:
    return UnitShape(name, (ParamShape((numel, 1)),))


def _frozen(units: Iterable[UnitShape]) -> Iterator[UnitShape]:
    for unit in units:
        params = tuple(dataclasses.replace(param, trainable=False) for param in unit.params)
        yield dataclasses.replace(unit, params=params)
