"""When two runs of one case agree.

Sums in another order are the only difference that unquantized fp32 may have. Quantized runs, and those in 16 bits, are held
to bounds that are loose beside that error but tight beside what a bug does: a lost micro-step, or weights of one step ago.
Their oracle is told their master weights after each update (``Plain.force``), so that the error does not add up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from differential.cases import Case
from differential.sides import Observation

DIVERGED = 1e3
"""Losses of the oracle beyond this, and NaN, end the comparison: nothing useful can be said of numbers that explode."""


def tolerances(case: Case) -> dict[str, float]:
    """Return the largest differences: of losses relative to the loss plus 0.1, of gradients relative to the largest gradient that
    any rank had, of weights relative to the largest weight plus 0.1."""
    if case.is_exact:
        return {"loss": 1e-4, "grad": 1e-4, "weight": 1e-4}
    if not any(dict(case.settings).get(name) for name in ("qwz_bits", "qgz_bits", "qgz_intra_bits")):
        return {"loss": 0.03, "grad": 0.06, "weight": 0.02}
    return {"loss": 0.1, "grad": 0.25, "weight": 0.02}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first thing in which a run differs from the oracle.

    Attributes:
        operation: index in the case.
        what: "loss", "grad 0.first.weight", "weight ...", "norm", or "silence" where an error is right.
        share: the difference, as a multiple of the tolerance.
    """

    operation: int
    what: str
    got: str
    expected: str
    share: float

    @property
    def kind(self) -> str:
        return self.what.split()[0]

    def __str__(self) -> str:
        return f"operation {self.operation}: {self.what} is {self.got}, expected {self.expected} ({self.share:.3g} x bound)"


def first_difference(
    case: Case,
    run: Sequence[Observation],
    oracle: Sequence[Observation],
    scales: Sequence[Mapping[str, float]],
    *,
    forced: bool,
) -> Difference | None:
    """Compare a run with the oracle's, in order.

    Args:
        scales: of each operation, what errors of gradients are measured by (``Plain.scales``).
        forced: whether the oracle was told the run's weights after optimizer steps, which then prove nothing.
    """
    tolerance = tolerances(case)
    for index, (seen, expected) in enumerate(zip(run, oracle, strict=True)):
        if any(not abs(value) <= DIVERGED for key, value in expected.items() if key.startswith("loss")):
            return None
        is_step = "step" in case.operations[index].name
        for key, value in expected.items():
            if forced and is_step and key.startswith("weight"):
                continue
            share = _share(key, seen[key], value, tolerance, scales[index])
            if not share <= 1:
                return Difference(index, key, _short(seen[key]), _short(value), share)
    return None


def same_bits(one: Sequence[Observation], other: Sequence[Observation]) -> bool:
    """Whether two runs saw the same in everything, bit for bit."""
    return all(
        ours.keys() == theirs.keys() and all(_is_same(ours[key], theirs[key]) for key in ours)
        for ours, theirs in zip(one, other, strict=True)
    )


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def _share(
    key: str, got: object, expected: object, tolerance: Mapping[str, float], scales: Mapping[str, float]
) -> float:
    if (got is None) != (expected is None):
        return math.inf
    if got is None or expected is None:
        return 0.0
    if isinstance(expected, float) and isinstance(got, float):
        return abs(got - expected) / (tolerance["loss"] * (abs(expected) + 0.1))
    assert isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)
    if not expected.numel():
        return 0.0
    error = (got - expected).abs().max().nan_to_num(math.inf).item()
    kind, name = key.split(" ", 1)
    if kind == "grad":
        return error / (tolerance["grad"] * scales[name] + 1e-7)
    return error / (tolerance["weight"] * (expected.abs().max().item() + 0.1))


def _short(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    numbers = ", ".join(f"{number:.4g}" for number in value.flatten()[:4].tolist())
    return f"[{numbers}{', ...' if value.numel() > 4 else ''}]"
