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
from modes import ALL_MODES, GENERATING_MODES, MAY_DIFFER, MODES, Outcome
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
        results.setdefault(family.name, {})[mode] = [
            is_ok,
            gap,
            outcome.error.partition("\n")[0][:200],
            outcome.num_other_tokens,
        ]
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
        *_columns_explained(),
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
    lines += ["", "## LoRA", "", *_lora_beside_stock(results)]
    lines += ["", "## Not built", "", *(f"- {name}: {reason}" for name, reason in NOT_BUILT.items())]
    return "\n".join(lines).rstrip() + "\n"


def _columns_explained() -> list[str]:
    exact, default, tokens = MODES["unquantized"], MODES["default"], GENERATING_MODES[MAY_DIFFER]
    return [
        "**Training.** The yardstick is the unsharded model, trained for three steps of SGD in plain data parallelism. A cell is "
        "the largest difference of a loss to it on any rank (relative, for losses over 1). The change of all trained parameters "
        "must be that of the unsharded model too, so that no model passes that learned nothing, or something else. What must "
        "hold:",
        "",
        "- `stock` (`zeropp=False`: the same units on FSDP2's own collectives), `unquantized` (ZeRO++ with exact exchanges), "
        f"`stock LoRA`, and `LoRA` over a base in 16 bits or packed in 4: losses within {exact.tolerance}, and the change of the "
        f"parameters within {exact.update_tolerance} of its length. LoRA adapts all linear layers and fused experts, and "
        "exchanges its adapters exactly.",
        f"- `default` quantizes weights and gradients: losses within {default.tolerance}, and the change within "
        f"{default.update_tolerance} of its length, which is the noise of INT4 gradients.",
        "",
        "**Generation** is greedy, three tokens for each sequence. A cell is the largest difference of a logit to the unsharded "
        "model's (packed too, where the base is), in standard deviations of the logits. `generate` (the whole model) and "
        "`generate LoRA 4 bit` exchange exactly: every token on every rank must be equal. `generate LoRA INT8` gathers adapters "
        f"in INT8, as is the default: a logit may move by {tokens.tolerance} standard deviations. The number behind the plus "
        "sign counts tokens that differ, of all ranks. Logits of random models lie close together, and the adapters' weights "
        "here are large from the start, so tokens change more easily than in a trained model.",
        "",
        "An empty cell was not run: the family generates nothing. A number in parentheses is the reason below.",
    ]


def _lora_beside_stock(results: dict[str, dict[str, list]]) -> list[str]:
    """Return the sentences that compare LoRA over packed weights with stock FSDP2."""
    stock = {name for name, modes in results.items() if modes.get("stock LoRA", [False])[0]}
    packed = {name for name, modes in results.items() if modes.get("LoRA 4 bit", [False])[0]}
    lost = ", ".join(sorted(stock - packed)) or "none"
    more = ", ".join(sorted(packed - stock)) or "none"
    return [
        f"LoRA over a base packed in 4 bits works on {len(packed)} families, and stock LoRA on {len(stock)}.",
        "",
        f"- Stock LoRA works and LoRA over packed weights does not: {lost}.",
        f"- LoRA over packed weights works and stock LoRA does not: {more}.",
    ]


def _cell(result: list | None, family, mode: str, notes: dict[str, int]) -> str:
    if result is None:
        return ""
    is_ok, gap, error, num_other_tokens = result
    if is_ok:
        return f"{gap:.0e}" + (f" + {num_other_tokens}" if num_other_tokens else "")
    found = f"`{error}`" if error else f"differs by {gap:.1e}, {num_other_tokens} tokens"
    return f"fails ({notes.setdefault(expected_failure(family, mode) or found, len(notes) + 1)})"


if __name__ == "__main__":
    main()
