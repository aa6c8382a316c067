"""The shape of a model, as far as an estimate needs it: its parameters, and the FSDP2 units they are gathered in.

A shape comes from a parameter count (``ModelShape.of_count``) or from a Hugging Face config
(``integrations/pretrained_shape.py``). Neither takes weights or a process group.
"""

from __future__ import annotations

import dataclasses
import math

from hf_zeropp.sizes import parse_count


@dataclasses.dataclass(frozen=True)
class ParamShape:
    """Shape of one parameter, and whether it is trainable."""

    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def padded_shard_numel(self, world_size: int) -> int:
        """Return the elements of each rank's shard: FSDP2 cuts dimension 0 in equal chunks and pads the last ones."""
        # ``-(-a // b)`` rounds up. A matrix of 101 rows on 4 ranks takes 26 rows on each: padding is sent like weights.
        return -(-self.shape[0] // world_size) * math.prod(self.shape[1:])


@dataclasses.dataclass(frozen=True)
class UnitShape:
    """The parameters of one FSDP2 unit.

    Args:
        name: for reading alone.
        params: all parameters of the unit, in the order of its flat shard.
        reshards: whether the unit is resharded after the forward pass, and so gathered again for the backward pass.
    """

    name: str
    params: tuple[ParamShape, ...]
    reshards: bool = True

    @property
    def trainable(self) -> tuple[ParamShape, ...]:
        """The trainable parameters of the unit."""
        return tuple(param for param in self.params if param.trainable)

    def frozen(self) -> UnitShape:
        """Return the same unit with all parameters frozen."""
        params = tuple(dataclasses.replace(param, trainable=False) for param in self.params)
        return dataclasses.replace(self, params=params)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The units of a model, under the name that a report shows."""

    name: str
    units: tuple[UnitShape, ...]

    @classmethod
    def of_count(cls, text: str) -> ModelShape:
        """Return a transformer of usual proportions with as many parameters as ``text`` says.

        It has L blocks of width 128 L with 12 width^2 parameters each (7 B: 33 blocks), and no parameter outside of them.

        Args:
            text: a parameter count such as "7B" or "350M".

        Raises:
            ValueError: ``text`` is no count.
        """
        count = parse_count(text)
        if not count:
            raise ValueError(
                f"expected a positive parameter count such as 7B or 350M, got {text!r}. Units are K, M, B and T; a model is "
                "named by its hub name (organization/model) or its folder."
            )
        # A block of width w = 128 L has 12 w^2 parameters: 4 w^2 in attention and 8 w^2 in the feed-forward layer. L
        # of them make 12 * 128^2 * L^3 parameters, which is solved for L. The remainder goes to the first blocks, one
        # parameter each.
        num_blocks = max(1, round((count / (12 * 128**2)) ** (1 / 3)))
        sizes = [count // num_blocks + (index < count % num_blocks) for index in range(num_blocks)]
        return cls(text, tuple(_matrix_unit(f"block {index}", size) for index, size in enumerate(sizes)))

    def with_adapters(self, num_trainable: int) -> ModelShape:
        """Return the model with its own parameters frozen, and ``num_trainable`` trained beside them (LoRA)."""
        frozen = (unit.frozen() for unit in self.units)
        return dataclasses.replace(self, units=(*frozen, _matrix_unit("adapters", num_trainable)))

    @property
    def num_params(self) -> int:
        """Number of parameters, frozen and trainable."""
        return sum(param.numel for unit in self.units for param in unit.params)

    @property
    def num_trainable(self) -> int:
        """Number of trainable parameters."""
        return sum(param.numel for unit in self.units for param in unit.trainable)


def _matrix_unit(name: str, numel: int) -> UnitShape:
    """Return a unit of one parameter with two dimensions, since one of 1-D would travel unquantized."""
    return UnitShape(name, (ParamShape((numel, 1)),))
