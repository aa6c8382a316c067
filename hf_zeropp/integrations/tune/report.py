"""The table of a search, its verdict in a sentence, and the lines to paste."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import yaml
from rich.console import Console

from hf_zeropp.config import BLOCK, ENV_ENABLED, ENV_PREFIX, PRESETS, ZeroPPConfig
from hf_zeropp.integrations.tune.search import Search
from hf_zeropp.integrations.tune.verdict import TOLERANCE, Measured, best_of, difference, is_faster, refusal

COLUMNS = {"s": 10, "middle half": 17, "x stock": 9, "across": 12, "within": 12, "peak": 9, "off by": 8}
"""The figures of a candidate, and how wide they are printed. They stand below its name, so that 80 columns are enough."""
NOTE = (
    "s: median seconds of a step; between the next two lies the middle half of the steps. across, within: MB that a node "
    "receives per step from other nodes, and its ranks from each other; of stock as rings carry them. peak: MB of the rank that "
    f"holds most. off by: the largest difference of the loss to stock, which must be at most {TOLERANCE:.0%} of the largest. "
    "faster: three of four steps are shorter than three of four of stock's."
)


def show(search: Search, console: Console, *, has_file: bool) -> None:
    """Print everything. ``has_file`` says that the job is launched with a config file, into which settings can be pasted."""
    best = best_of(search.others, search.stocks)

    def write(text: str, style: str = "", *, wraps: bool = True) -> None:
        # ``soft_wrap`` leaves long lines whole, so that they can be pasted. Names may look like markup.
        console.print(text, style=style, soft_wrap=not wraps, highlight=False, markup=False)

    steps = len(search.stocks[0].seconds)
    write(f"hf-zeropp tune: {steps} steps of each, and as many again of the fastest", "italic")
    write(_in_columns(COLUMNS), "bold", wraps=False)
    for one in (*search.stocks, *sorted(search.others, key=lambda other: other.median)):
        style = "bold" if one is best else ""
        verdict = _verdict(one, best, search)
        write(f"{one.candidate.name}: {verdict}" if verdict else one.candidate.name, style)
        write(_in_columns(_figures(one, search.stocks[0])), style, wraps=False)
    for name, why in search.failed.items():
        write(f"{name}: failed: {why}")
    write(f"\n{NOTE}")
    write(f"\n{sentence(search, best)}\n", "bold")
    write(block(best, has_file=has_file), wraps=False)


def to_json(search: Search, *, has_file: bool) -> dict[str, Any]:
    """Return what ``show`` prints, and the figures of all ranks behind it."""
    best = best_of(search.others, search.stocks)
    trials = [
        {
            "name": one.candidate.name,
            "median": one.median,
            "difference": difference(one, search.stocks[0]),
            "verdict": _verdict(one, best, search),
            **dataclasses.asdict(one),
        }
        for one in (*search.stocks, *search.others)
    ]
    return {
        "recommended": best and best.candidate.name,
        "settings": best and best.config and settings_of(best.config),
        "why": sentence(search, best),
        "paste": block(best, has_file=has_file),
        "trials": trials + [{"name": name, "failed": why} for name, why in search.failed.items()],
    }


def sentence(search: Search, best: Measured | None) -> str:
    """Return the verdict, and why."""
    stock = min(search.stocks, key=lambda one: one.median)
    if best is not None:
        times = f"{best.median:.3g} s per step where stock FSDP2 takes {stock.median:.3g} s"
        return f"{best.candidate.name}: {times} ({stock.median / best.median:.2f} x){_moved(best, stock)}."
    if not search.passing:
        return "Leave it off: every candidate is refused."
    nearest = min(search.passing, key=lambda one: one.median)
    return (
        f"Leave it off: no candidate that is not refused is faster than stock FSDP2 beyond the spread of the steps "
        f"({stock.median:.3g} s; {nearest.candidate.name}: {nearest.median:.3g} s)."
    )


def _moved(best: Measured, stock: Measured) -> str:
    """Return the bytes as a part of the sentence. They are the reason only where they are fewer."""
    word = "since" if best.cross_node < stock.cross_node else "while"
    return f", {word} {best.cross_node / 1e6:.2f} MB enter a node per step in place of {stock.cross_node / 1e6:.2f}"


def block(best: Measured | None, *, has_file: bool) -> str:
    """Return what to paste, in the form in which the job gets its settings."""
    if best is None or best.config is None:
        return f"export {ENV_ENABLED}=0"
    settings = settings_of(best.config)
    if best.about["in_python"]:  # settings of the script are used alone
        return f"zeropp={settings!r}"
    if has_file:
        return yaml.safe_dump({BLOCK: settings}, sort_keys=False).rstrip()
    values = {name: "none" if value is None else value for name, value in settings.items()}
    return "\n".join(f"export {ENV_PREFIX}{name.upper()}={value}" for name, value in values.items())


def settings_of(config: ZeroPPConfig) -> dict[str, Any]:
    """Return the shortest settings that give this config: the nearest preset, and what goes over it."""

    def beside(preset: str) -> dict[str, Any]:
        base = ZeroPPConfig.preset(preset).to_dict()
        return {name: value for name, value in config.to_dict().items() if value != base[name]}

    preset = min(PRESETS, key=lambda name: (len(beside(name)), name != "balanced"))
    return {"preset": preset, **beside(preset)}


def _figures(one: Measured, stock: Measured) -> Sequence[str]:
    low, high = one.quartiles
    return (
        f"{one.median:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{stock.median / one.median:.2f}",
        f"{one.cross_node / 1e6:.2f}",
        f"{one.intra_node / 1e6:.2f}",
        f"{one.memory / 1e6:.0f}",
        f"{difference(one, stock):.2%}" if one is not stock else "",
    )


def _in_columns(texts: Iterable[str]) -> str:
    return "".join(text.rjust(width) for text, width in zip(texts, COLUMNS.values(), strict=True))


def _verdict(one: Measured, best: Measured | None, search: Search) -> str:
    if one in search.stocks:
        return ""
    if why := refusal(one, search.stocks[0]):
        return f"refused, since {why}"
    return "recommended" if one is best else "faster" if is_faster(one, search.stocks) else "not faster"
