"""Make every mistake and write ``scripts/results/mistakes.md``: ``bash scripts/mistakes.sh``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/helpers")]

import torch  # noqa: E402
from catalogue import Mistake, Outcome, outcome_alone  # noqa: E402
from command_mistakes import COMMANDS  # noqa: E402
from harness import run_ranks  # noqa: E402
from job_mistakes import HUNG, JOBS  # noqa: E402
from rank_mistakes import RANKS, make_all  # noqa: E402
from settings_mistakes import SETTINGS  # noqa: E402

PAGE = ROOT / "scripts/results/mistakes.md"
KINDS = {
    "Settings": "A mapping, a file or a variable is wrong. The seconds are those of reading it.",
    "Command line": "Nothing is started. The seconds are those of the command, without Python's imports.",
    "Ranks": "Four ranks. All of them raise the message. The seconds are those of the slowest rank.",
    "Jobs": "Two ranks under a launcher. The seconds begin with the launcher, imports of all processes included.",
}
MAX_MESSAGE = 400  # characters of a message that the page shows

Row = tuple[Mistake, Outcome]


def main() -> None:
    """Make all mistakes, write the page, and fail if a message is not as the lists say."""
    kinds = dict(zip(KINDS, ([*alone(SETTINGS)], [*alone(COMMANDS)], on_ranks(), [*in_jobs()]), strict=True))
    PAGE.write_text("\n".join(page(kinds)) + "\n")
    wrong = [mistake.name for rows in kinds.values() for mistake, outcome in rows if not is_said(mistake, outcome)]
    print(f"{sum(map(len, kinds.values()))} mistakes, {len(wrong)} without their message: {wrong}")
    raise SystemExit(bool(wrong))


def alone(mistakes: list[Mistake]) -> Iterator[Row]:
    """Make mistakes in this process, each in a folder of its own."""
    for mistake in mistakes:
        with tempfile.TemporaryDirectory() as folder:
            yield mistake, outcome_alone(mistake, Path(folder))


def on_ranks() -> list[Row]:
    """Make the mistakes of ranks, and take for each the outcome of the rank that was last."""
    outcomes = run_ranks(make_all, 4, timeout_s=60, limit_s=600)
    of_mistakes = zip(RANKS, zip(*outcomes, strict=True), strict=True)
    return [(mistake, max(of_ranks, key=lambda outcome: outcome.seconds)) for mistake, of_ranks in of_mistakes]


def in_jobs() -> Iterator[Row]:
    """Run the jobs, one after the other."""
    here = os.getcwd()
    for mistake in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            yield mistake, mistake.make()
            os.chdir(here)


def is_said(mistake: Mistake, outcome: Outcome) -> bool:
    """Whether the message holds all words that it must hold."""
    return all(word in outcome.message for word in mistake.words)


def page(kinds: dict[str, list[Row]]) -> Iterator[str]:
    """Yield the lines of the page."""
    rows = [row for each in kinds.values() for row in each]
    hung = sum(outcome.message == HUNG for _, outcome in rows)
    yield "# Mistakes and their messages"
    yield ""
    yield f"{len(rows)} mistakes, {hung} of which hang. `bash scripts/mistakes.sh` makes all of them again and writes this page;"
    yield "`tests/mistakes/` holds the lists, and the words that each message must contain. Messages are cut off at"
    yield f"{MAX_MESSAGE} characters. CPU and gloo, torch {torch.__version__}, {os.cpu_count()} cores, busy with other work."
    yield ""
    yield "| kind | mistakes | longest time to the message | hang |"
    yield "|---|---:|---:|---:|"
    for kind, each in kinds.items():
        longest = max(outcome.seconds for _, outcome in each)
        yield f"| {kind} | {len(each)} | {longest:.2f} s | {sum(outcome.message == HUNG for _, outcome in each)} |"
    for kind, each in kinds.items():
        yield from (
            "",
            f"## {kind}",
            "",
            KINDS[kind],
            "",
            "| mistake | message | said by | seconds |",
            "|---|---|---|---:|",
        )
        for mistake, outcome in each:
            yield f"| {_cell(mistake.name)} | {_cell(first_line(outcome.message))} | {mistake.said_by} | {outcome.seconds:.2f} |"


def first_line(message: str) -> str:
    """Return the line of a message that says what is wrong. argparse prints the usage before it."""
    lines = [line for line in message.splitlines() if line.strip()]
    line = next((line for line in lines if "error: " in line), lines[0])
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").strip()


if __name__ == "__main__":
    main()
