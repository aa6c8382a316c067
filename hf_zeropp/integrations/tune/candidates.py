"""The settings that ``hf-zeropp tune`` tries, beside those of the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from hf_zeropp.config import AUTO, PRESETS, ZeroPPConfig

DELTA_2_BITS = "min_traffic"
MIN_RATE_OF_2_BITS = 1e-5
"""The least learning rate at which deltas of 2 bits are tried. At 1e-6 they lose half of the progress."""
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


STOCK = Candidate("stock FSDP2", None)
OWN = Candidate("your settings", {})


def presets_beside(own: ZeroPPConfig, learning_rate: float) -> Iterator[Candidate]:
    """Yield the presets that are worth a trial, without the one that the user has."""
    for name in ("balanced", "exact", "half_model", DELTA_2_BITS):
        if name == DELTA_2_BITS and learning_rate < MIN_RATE_OF_2_BITS:
            continue
        preset = ZeroPPConfig(**PRESETS[name])
        yield from _allowed(own, [Candidate(name, {field: getattr(preset, field) for field in _OF_PRESETS})])


def other_node_hops(best: Candidate, own: ZeroPPConfig, *, on_accelerator: bool) -> Iterator[Candidate]:
    """Yield the fastest candidate with the node hops that it does not have, native or quantized."""
    default = None if on_accelerator else 8  # what "auto" stands for
    now = {name: getattr(_over(own, best), name) for name in ("qwz_intra_bits", "qgz_intra_bits")}
    for name, settings in _NODE_HOPS.items():
        if settings != {field: default if bits == AUTO else bits for field, bits in now.items()}:
            yield from _allowed(own, [Candidate(f"{best.name}, {name}", {**(best.settings or {}), **settings})])


def accumulation_on_the_rank(best: Candidate, own: ZeroPPConfig, micro_steps: float) -> Iterator[Candidate]:
    """Yield the fastest candidate with gradients that stay on the rank until the last micro-step, if there are several."""
    if micro_steps > 1:
        settings = {**(best.settings or {}), "qgz_accumulate": "rank"}
        yield from _allowed(own, [Candidate(f"{best.name}, accumulation on the rank", settings)])


def name_of(config: ZeroPPConfig) -> str | None:
    """Return the preset whose weights and gradients these settings send, None if it is none of those that are tried."""
    for name in ("balanced", "exact", "half_model", DELTA_2_BITS):
        preset = ZeroPPConfig(**PRESETS[name])
        if all(getattr(config, field) == getattr(preset, field) for field in _OF_PRESETS):
            return name
    return None


def _allowed(own: ZeroPPConfig, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield those that fit to the user's other settings and change something."""
    for candidate in candidates:
        try:
            config = _over(own, candidate)
        except ValueError:  # such as deltas, where the user keeps no copies
            continue
        if config != own:
            yield candidate


def _over(own: ZeroPPConfig, candidate: Candidate) -> ZeroPPConfig:
    return dataclasses.replace(own, **(candidate.settings or {}))
