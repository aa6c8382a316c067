"""The shape of a model, as far as an estimate needs it: its parameters, and the FSDP2 units they are gathered in.

A shape comes from a parameter count (``ModelShape.of_count``) or from a Hugging Face config
(``integrations/pretrained_shape.py``). Neither takes weights or a process group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.ops.frozen_format import FrozenFormat
from hf_zeropp.sizes import parse_count


@dataclasses.dataclass(frozen=True)
class ParamShape:
    """Shape of one parameter.

    Args:
        shape: the sizes of its dimensions.
        trainable: whether the optimizer updates it.
        packable: whether it can be packed where it is frozen: matrices and embeddings, but no norms and biases.
        is_embedding: whether that takes ``pack_embeddings``: embeddings and heads.
    """

    shape: tuple[int, ...]
    trainable: bool = True
    packable: bool = False
    is_embedding: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def padded_shard(self, num_ranks: int) -> tuple[int, ...]:
        """Return the shape of each rank's shard: FSDP2 cuts dimension 0 in equal chunks and pads the last ones."""
        # ``-(-a // b)`` rounds up. A matrix of 101 rows on 4 ranks takes 26 rows on each: padding is sent like weights.
        return (-(-self.shape[0] // num_ranks), *self.shape[1:])

    def padded_shard_numel(self, num_ranks: int) -> int:
        """Return the elements of each rank's shard, padding included."""
        return math.prod(self.padded_shard(num_ranks))


class Packing(NamedTuple):
    """How frozen weights are packed.

    Args:
        format: bits and block.
        embeddings: whether embeddings and heads are packed too.
    """

    format: FrozenFormat
    embeddings: bool = False

    def packs(self, param: ParamShape) -> bool:
        """Whether a frozen parameter is packed."""
        return param.packable and (self.embeddings or not param.is_embedding)


def slice_numel(params: Iterable[ParamShape], num_ranks: int) -> int:
    """Return the elements of each rank's slice of parameters, padding included."""
    return sum(param.padded_shard_numel(num_ranks) for param in params)


@dataclasses.dataclass(frozen=True)
class UnitShape:
    """The parameters of one FSDP2 unit.

    Args:
        name: for reading alone.
        params: all parameters of the unit, in the order of its flat shard.
        reshards: whether the unit is resharded after the forward pass, and so gathered again for the backward pass.
        spans_model: whether the unit stays gathered during the whole forward pass of the model, and the whole backward pass.
    """

    name: str
    params: tuple[ParamShape, ...]
    reshards: bool = True
    spans_model: bool = False

    @property
    def numel(self) -> int:
        """Number of parameters of the unit."""
        return sum(param.numel for param in self.params)

    @property
    def trainable(self) -> tuple[ParamShape, ...]:
        """The trainable parameters of the unit."""
        return tuple(param for param in self.params if param.trainable)

    def with_lora(self, rank: int) -> tuple[UnitShape, UnitShape]:
        """Return the unit frozen, and the same with the two matrices of a LoRA adapter beside each of its own matrices."""
        frozen = tuple(dataclasses.replace(param, trainable=False) for param in self.params)
        matrices = (param.shape for param in self.params if param.packable)
        adapters = (ParamShape(shape) for rows, columns in matrices for shape in ((rank, columns), (rows, rank)))
        return dataclasses.replace(self, params=frozen), dataclasses.replace(self, params=(*frozen, *adapters))


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The units of a model.

    Args:
        name: what a report shows.
        units: all parameters, as FSDP2 gathers them by itself.
        frozen_units: the frozen ones among them, as this package's Accelerate plugin groups them (``frozen/units.py``).
        packed: how a checkpoint was packed that was saved so. Its weights stay as they are, whatever ``frozen_bits``.
        active: share of the parameters that one token meets; under 1 for mixtures of experts.
    """

    name: str
    units: tuple[UnitShape, ...]
    frozen_units: tuple[UnitShape, ...] = ()
    packed: Packing | None = None
    active: float = 1.0

    @classmethod
    def of_count(cls, text: str) -> ModelShape:
        """Return a transformer of usual proportions with as many parameters as ``text`` says.

        It has L blocks of width 128 L with 12 width^2 parameters each (7 B: 33 blocks), and no parameter outside of them.

        Raises:
            ValueError: ``text`` is no count such as "7B" or "350M".
        """
        count = parse_count(text)
        if not count:
            raise ValueError(
                f"expected a positive parameter count such as 7B or 350M, got {text!r}. Units are K, M, B and T; a model is "
                "named by its hub name (organization/model) or its folder."
            )
        # L blocks of 12 w^2 parameters with w = 128 L make 12 * 128^2 * L^3 parameters, which is solved for L. The
        # remainder goes to the first blocks, one parameter each.
        num_blocks = max(1, round((count / (12 * 128**2)) ** (1 / 3)))
        sizes = [count // num_blocks + (index < count % num_blocks) for index in range(num_blocks)]
        return cls(text, tuple(_block(f"block {index}", size) for index, size in enumerate(sizes)))

    def with_lora(self, rank: int) -> ModelShape:
        """Return the model frozen, with LoRA adapters of this rank on all matrices of its blocks."""
        frozen, units = zip(*(unit.with_lora(rank) for unit in self.units), strict=True)
        return dataclasses.replace(self, units=units, frozen_units=frozen)

    def packing(self, config: ZeroPPConfig) -> Packing | None:
        """Return how frozen weights are packed under these settings; None where they stay in 16 bits."""
        if self.packed is not None:
            return self.packed._replace(embeddings=self.packed.embeddings or config.pack_embeddings)
        return None if config.frozen_bits is None else Packing(FrozenFormat(config.frozen_bits), config.pack_embeddings)

    @property
    def without_frozen(self) -> ModelShape:
        """The model without its frozen parameters, and without those units that train nothing."""
        units = (dataclasses.replace(unit, params=unit.trainable) for unit in self.units if unit.trainable)
        return dataclasses.replace(self, units=tuple(units), frozen_units=())

    @property
    def num_params(self) -> int:
        """Number of parameters, frozen and trainable."""
        return sum(unit.numel for unit in self.units)

    @property
    def num_trainable(self) -> int:
        """Number of trainable parameters."""
        return sum(param.numel for unit in self.units for param in unit.trainable)


def _block(name: str, numel: int) -> UnitShape:
    """Return a transformer block of ``numel`` parameters: 4 w^2 in attention, 8 w^2 in the feed-forward layer."""
    width = math.isqrt(numel // 12)
    if width == 0:  # fewer than 12 parameters
        return UnitShape(name, (ParamShape((numel, 1), packable=True),))
    width = max(width // 128 * 128, min(width, 128))  # multiples of 128 have no padding on usual worlds
    hidden, norms = divmod(numel - 4 * width**2, 2 * width)
    matrices = [(width, width)] * 4 + [(hidden, width), (width, hidden)]
    params = [ParamShape(shape, packable=True) for shape in matrices] + ([ParamShape((norms,))] if norms else [])
    return UnitShape(name, tuple(params))
