"""The settings that ``hf-zeropp tune`` tries, beside those of the user."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_zeropp.config import ZeroPPConfig

_TRIED = ("balanced", "exact", "half_model", "min_traffic")
_OF_PRESETS = ("qwz_mode", "qwz_bits", "hpz_bits", "qgz_bits")
"""The settings in which the presets that are tried differ. All other settings keep the user's values."""
NODE_HOPS: dict[str, dict[str, Any]] = {
    "native node hops": {"qwz_intra_bits": None, "qgz_intra_bits": None},
    "quantized node hops": {"qwz_intra_bits": 8, "qgz_intra_bits": 8},
}
"""Settings that are tried with the fastest candidate, where nodes have several ranks."""
ON_THE_RANK: dict[str, dict[str, Any]] = {"accumulation on the rank": {"qgz_accumulate": "rank"}}
"""The same, where steps have several micro-steps."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings under a name, which go over the user's own.

    Attributes:
        name: as it is printed.
        settings: None stands for stock FSDP2.
        ranks_per_node: with which the bytes of stock are counted; None where a trial has not found it yet.
    """

    name: str
    settings: dict[str, Any] | None
    ranks_per_node: int | None = None

    def over(self, own: ZeroPPConfig) -> ZeroPPConfig:
        """Return the user's settings with these over them.

        Raises:
            ValueError: they exclude each other, such as deltas where the user keeps no copies.
        """
        return dataclasses.replace(own, **(self.settings or {}))

    def with_others(self, name: str, settings: dict[str, Any]) -> Candidate:
        """Return this candidate with further settings over its own. ``name`` is added to its name."""
        return Candidate(f"{self.name}, {name}", {**(self.settings or {}), **settings})


STOCK = Candidate("stock FSDP2", None)
OWN = Candidate("your settings", {})


def presets() -> list[Candidate]:
    """Return the presets that are tried."""
    configs = {name: ZeroPPConfig.preset(name) for name in _TRIED}
    return [
        Candidate(name, {field: getattr(config, field) for field in _OF_PRESETS}) for name, config in configs.items()
    ]
