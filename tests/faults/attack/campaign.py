"""Many faults, some at a time, and their table."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata

from harness import preload, run_ranks

from attack import jobs
from attack.fault import BLOWS, POINTS, draw
from attack.verdict import CONNECT_S, MARGIN_S, TIMEOUT_S, Verdict, judge

COLUMNS = (
    "blow",
    "point",
    "faults",
    "struck",
    "ended in time",
    "of these went on",
    "same bits",
    "nothing left",
    "seconds",
)


def run_campaign(seeds: Sequence[int], workers: int, show: Callable[[list[Verdict]], None]) -> list[Verdict]:
    """Run the faults of these seeds, ``workers`` at a time.

    Args:
        seeds: of the faults.
        workers: how many faults happen at a time.
        show: called with all verdicts so far after each, the newest last.
    """
    preload("attack.jobs", "transformers.models.llama.modeling_llama")
    models = "/tmp/models"
    run_ranks(jobs.prepare, 1, models, init=False)
    verdicts: list[Verdict] = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
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


def page(verdicts: Sequence[Verdict], command: str, seconds: float) -> str:
    """Return the page of a campaign, which ``command`` started."""
    packages = ("torch", "transformers", "accelerate", "peft")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    blows = "\n".join(f"- *{name}*: {words}." for name, words in BLOWS.items())
    points = "\n".join(f"- *{name}*: {words}." for name, words in POINTS.items())
    bad = "\n\n".join(f"```\n{verdict}\n```" for verdict in verdicts if not verdict.is_good)
    return (
        f"""# Faults

    {command}

{time.strftime("%Y-%m-%d")}. {os.cpu_count()} cores, Linux {platform.release().partition("-")[0]}, Python
{platform.python_version()}, {versions}. {len(verdicts)} faults in {seconds / 60:.0f} minutes, beside other work on the machine.

Each fault meets a real run: six steps of a tiny Llama under the Trainer in four gloo processes, as two nodes of two ranks, with a
checkpoint after every second step and one or two of them kept. A third of the runs gathers deltas, a third
trains adapters on packed weights. The fault happens at a random call of a point of the program, on a random rank. Then every
rank must end within {TIMEOUT_S:.0f} s (the timeout of the process group) and {MARGIN_S:.0f} s more, with an error that names
a cause, or go on to the bits of an unbroken run. (Where the fault comes before the process groups are made, it is
{CONNECT_S:.0f} s and {MARGIN_S:.0f} s more: gloo gives a peer five timeouts to connect.) The same run is started again with
`resume_from_checkpoint=True`, in the same folder, and must give the bits of the unbroken run: losses and weights. Where no
checkpoint is whole yet, it begins anew. No process, no temporary file, no file in `/dev/shm`, no mount and no namespace may be
left after that.

{blows}

Points:

{points}

*Seconds* are those from the strike to the end of the last rank, the largest of a row.

{table(verdicts)}

{"No fault had another end." if not bad else "What went wrong:"}

{bad}""".rstrip()
        + "\n"
    )
