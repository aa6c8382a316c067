"""Runs all families in all modes, and writes the table: ``bash scripts/zoo.sh [family ...]``.

Outcomes are kept in ``scripts/results/models.json`` as they come, so that a run that was interrupted goes on where it stopped.
With families named, these are run anew. The exit status is 1 if a case fails that is not expected to, or works against
expectation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accelerate
import peft
import torch
import transformers
from expected import ALL, NOT_BUILT, expected_failure
from modes import ALL_MODES, GENERATE, MODES, Outcome
from zoo import Case, cases_of, run

RESULTS = Path(__file__).parents[2] / "scripts" / "results"
OURS = tuple(mode for mode in ALL_MODES if not mode.startswith("stock"))


def main() -> None:
    """Run what is missing, or what the command line names, and write the page."""
    file = RESULTS / "models.json"
    results: dict[str, dict[str, list]] = json.loads(file.read_text()) if file.exists() else {}
    named = set(sys.argv[1:])
    families = [family for family in ALL if not named or family.name in named]
    todo = [case for case in cases_of(families, ALL_MODES) if named or case[1] not in results.get(case[0].name, {})]

    def report(case: Case, outcome: Outcome) -> None:
        family, mode = case
        is_ok = outcome.is_ok(mode)
        print(
            f"{family.name:28} {mode:12} {'ok' if is_ok else 'FAILS'} {outcome.gap:.1e} {outcome.error[:100]!r}",
            flush=True,
        )
        gap = None if outcome.error else outcome.gap
        results.setdefault(family.name, {})[mode] = [is_ok, gap, outcome.error.partition("\n")[0][:200]]
        file.write_text(json.dumps(results, indent=1) + "\n")

    try:
        run(todo, report)
    finally:
        (RESULTS / "models.md").write_text(page(results))
    sys.exit(1 if unexpected(results) else 0)


def unexpected(results: dict[str, dict[str, list]]) -> list[str]:
    """Return the cases that came out otherwise than ``expected.py`` says."""
    found = []
    for family, mode in cases_of(ALL, OURS):
        if mode in results.get(family.name, {}):
            is_ok = results[family.name][mode][0]
            if is_ok == bool(expected_failure(family, mode)):
                found.append(f"{family.name}, {mode}: {'works' if is_ok else results[family.name][mode]}")
    print("\n".join(found) or "All as expected.")
    return found


def page(results: dict[str, dict[str, list]]) -> str:
    """Return the page as Markdown."""
    families = [family for family in ALL if family.name in results]
    modes = [mode for mode in ALL_MODES if any(mode in results[family.name] for family in families)]
    lines = [
        "# Which models work",
        "",
        f"Every row is an architecture, built tiny from its config, on 4 ranks (2 nodes of 2, gloo, CPU). "
        f"transformers {transformers.__version__}, accelerate {accelerate.__version__}, peft {peft.__version__}, torch "
        f"{torch.__version__.partition('+')[0]}. `bash scripts/zoo.sh` repeats it.",
        "",
        "A cell is the largest difference of a loss to the unsharded model's, over three steps of SGD. `unquantized` and `LoRA` "
        f"must stay within {MODES['unquantized'].tolerance}. `default` quantizes weights and gradients: its cell is that "
        "difference as a share of what the steps changed in the last loss, at most "
        f"{MODES['default'].tolerance}. `stock` is FSDP2 as Accelerate runs it, without ZeRO++. LoRA adapts all linear layers "
        "and fused experts, over a base in 16 bits or packed in 4. `generate` is greedy, and counts tokens that differ. "
        "An empty cell was not run.",
        "",
        "| family | kind | " + " | ".join(modes) + " |",
        "|---|---|" + "---|" * len(modes),
    ]
    notes: dict[str, int] = {}
    for family in families:
        cells = [_cell(results[family.name].get(mode), family, mode, notes) for mode in modes]
        lines.append(f"| {family.name} | {family.kind} | " + " | ".join(cells) + " |")
    totals = []
    for mode in modes:
        found = [results[family.name][mode][0] for family in families if mode in results[family.name]]
        totals.append(f"**{sum(found)} of {len(found)}**")
    lines += [f"| **work** | | {' | '.join(totals)} |", "", "## Reasons", ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    lines += ["", "## Not built", "", *(f"- {name}: {reason}" for name, reason in NOT_BUILT.items())]
    return "\n".join(lines).rstrip() + "\n"


def _cell(result: list | None, family, mode: str, notes: dict[str, int]) -> str:
    if result is None:
        return ""
    is_ok, gap, error = result
    if is_ok:
        return f"{gap:.0f}" if mode == GENERATE else f"{gap:.0e}"
    reason = expected_failure(family, mode) or (f"`{error}`" if error else f"differs by {gap:.1e}")
    return f"fails ({notes.setdefault(reason, len(notes) + 1)})"


if __name__ == "__main__":
    main()
