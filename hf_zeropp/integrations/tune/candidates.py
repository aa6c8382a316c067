"""The settings that ``hf-zeropp tune`` tries, beside those of the user."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_zeropp.config import AUTO, PRESETS, ZeroPPConfig
from hf_zeropp.fsdp.weights.low_rates import lowest_rate

_TRIED = {name: ZeroPPConfig(**PRESETS[name]) for name in ("balanced", "exact", "half_model", "min_traffic")}
_OF_PRESETS = ("qwz_mode", "qwz_bits", "hpz_bits", "qgz_bits")
"""The settings in which the presets that are tried differ. The user's own values of all others stay."""
_NODE_HOPS: dict[str, dict[str, Any]] = {
    "native node hops": {"qwz_intra_bits": None, "qgz_intra_bits": None},
    "quantized node hops": {"qwz_intra_bits": 8, "qgz_intra_bits": 8},
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings under a name, which go over the user's own. None stands for stock FSDP2."""

    name: str
    settings: dict[str, Any] | None

    def over(self, own: ZeroPPConfig) -> ZeroPPConfig:
        """Return the user's settings with these over them."""
        return dataclasses.replace(own, **(self.settings or {}))

    def is_worth_a_trial(self, own: ZeroPPConfig, learning_rate: float) -> bool:
        """Return whether these settings fit to the user's others, change something, and train at this learning rate."""
        try:
            config = self.over(own)
        except ValueError:  # such as deltas, where the user keeps no copies
            return False
        return config != own and learning_rate >= lowest_rate(config)

    def with_others(self, name: str, settings: dict[str, Any]) -> Candidate:
        """Return this candidate with further settings, which ``name`` tells in its own name."""
        return Candidate(f"{self.name}, {name}", {**(self.settings or {}), **settings})


STOCK = Candidate("stock FSDP2", None)
OWN = Candidate("your settings", {})


def presets() -> list[Candidate]:
    """Return the presets that are tried."""
    return [Candidate(name, _sent_by(config)) for name, config in _TRIED.items()]


def other_node_hops(best: Candidate, own: ZeroPPConfig, *, on_accelerator: bool) -> list[Candidate]:
    """Return the fastest candidate with the node hops that it does not have, native or quantized."""
    default = None if on_accelerator else 8  # what "auto" stands for
    now = {name: getattr(best.over(own), name) for name in ("qwz_intra_bits", "qgz_intra_bits")}
    now = {name: default if bits == AUTO else bits for name, bits in now.items()}
    return [best.with_others(name, settings) for name, settings in _NODE_HOPS.items() if settings != now]


def accumulation_on_the_rank(best: Candidate, micro_steps: float) -> list[Candidate]:
    """Return the fastest candidate with gradients that stay on the rank until the last micro-step, if there are several."""
    return [best.with_others("accumulation on the rank", {"qgz_accumulate": "rank"})] if micro_steps > 1 else []


def name_of(config: ZeroPPConfig) -> str | None:
    """Return the preset whose weights and gradients these settings send, None if it is none of those that are tried."""
    return next((name for name, preset in _TRIED.items() if _sent_by(preset) == _sent_by(config)), None)


def _sent_by(config: ZeroPPConfig) -> dict[str, Any]:
    return {field: getattr(config, field) for field in _OF_PRESETS}
