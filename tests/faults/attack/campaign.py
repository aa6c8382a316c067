"""Many faults, some at a time, and their table."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import tempfile
from collections.abc import Callable, Sequence

from harness import preload, run_ranks

from attack import jobs
from attack.fault import BLOWS, POINTS, draw
from attack.verdict import Verdict, judge

_ENDS = ("struck", "ended in time", "of these went on", "same bits", "nothing left")
COLUMNS = ("blow", "point", "faults", *_ENDS, "seconds")
"""The last one is the time from the strike to the end of the last rank, the largest of a row."""
AT_A_TIME = 2


def run_campaign(seeds: Sequence[int], show: Callable[[list[Verdict]], None]) -> list[Verdict]:
    """Run the faults of these seeds; ``show`` is called with all verdicts so far after each, the newest last."""
    preload("attack.jobs", "transformers.models.llama.modeling_llama")
    models = os.path.join(tempfile.gettempdir(), "models")
    run_ranks(jobs.prepare, 1, models, init=False)
    verdicts: list[Verdict] = []
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = [pool.submit(judge, draw(seed), models) for seed in seeds]
        for future in concurrent.futures.as_completed(futures):
            verdicts.append(future.result())
            show(verdicts)
    return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table with a row per blow and point, and a last row with the sums."""
    by_cell = collections.defaultdict(list)
    for verdict in verdicts:
        by_cell[verdict.fault.blow, verdict.fault.point].append(verdict)
    order = [(blow, point) for blow in BLOWS for point in POINTS]
    rows = [[*cell, *_counts(by_cell[cell])] for cell in order if cell in by_cell]
    rows.append(["**all**", "", *_counts(verdicts)])
    lines = [COLUMNS, ("---", "---", *["---:"] * (len(COLUMNS) - 2)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counts(verdicts: Sequence[Verdict]) -> list[str]:
    counts = [len(verdicts), sum(bool(verdict.where) for verdict in verdicts)]
    counts += [sum(not verdict.ended for verdict in verdicts), sum(verdict.went_on for verdict in verdicts)]
    counts += [sum(not (verdict.resumed or "bits" in verdict.ended) for verdict in verdicts)]
    counts += [sum(not verdict.left for verdict in verdicts)]
    return [*map(str, counts), f"{max(verdict.seconds for verdict in verdicts):.1f}"]
