"""The command ``hf-zeropp tune``."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hf_zeropp.integrations.tune import report
from hf_zeropp.integrations.tune.candidates import Candidate
from hf_zeropp.integrations.tune.launches import command_of, has_config_file, launch
from hf_zeropp.integrations.tune.search import Search
from hf_zeropp.integrations.tune.trial import MIN_STEPS
from hf_zeropp.integrations.tune.verdict import Measured

DESCRIPTION = (
    "Run your own job for a few steps on stock FSDP2 and under the presets balanced, exact, half_model and min_traffic, with "
    "other node hops and accumulation, and say which is fastest, or that none is faster than stock. The job is started as "
    "`hf-zeropp launch` would start it, with the same flags, or by torchrun. No process and no checkpoint of a trial stays, and "
    "no file that the script writes from Python, by safetensors, datasets or tokenizers. Caches stay, and so do files of "
    "programs that the script starts. On several nodes run the same command on each, with its own rank, as for the job "
    "itself: all try the same candidates in the same order."
)


def tune(argv: list[str]) -> None:
    """Run ``hf-zeropp tune`` with the words behind it.

    Raises:
        SystemExit: nothing could be compared. The message says what to do.
    """
    args = _parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the command as Ctrl-C does
    try:
        with tempfile.TemporaryDirectory(prefix="hf-zeropp-tune-") as folder:
            search = _search(args.job, args.steps, Path(folder))
    except ValueError as error:
        raise SystemExit(f"hf-zeropp tune: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("hf-zeropp tune: interrupted. Nothing is left of the trials.") from None
    has_file = has_config_file(args.job)
    if args.json:
        print(json.dumps(report.to_json(search, has_file=has_file), indent=1))
    else:
        report.show(search, Console(), has_file=has_file)


def _search(job: list[str], steps: int, folder: Path) -> Search:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def trial(candidate: Candidate) -> Measured:
            task = progress.add_task(candidate.name, total=steps)
            number = len(list(folder.iterdir()))

            def on_step(done: int) -> None:
                progress.update(task, completed=done)

            ranks = launch(command_of(job, number), folder / str(number), candidate, steps, on_step)
            return Measured.of(candidate, ranks)

        search = Search(trial)
        search.run()
    return search


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hf-zeropp tune",
        usage="hf-zeropp tune [--steps N] [--json] [launcher options] SCRIPT [script arguments]\n"
        "       hf-zeropp tune [--steps N] [--json] torchrun [its options] SCRIPT [script arguments]",
        description=DESCRIPTION,
    )
    parser.add_argument("--steps", type=int, default=10, help="The optimizer steps of each trial. The default is 10.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of the table.")
    # Only flags in front are this command's: the launcher and the script may have some of the same names.
    own = 0
    while own < len(argv) and argv[own].partition("=")[0] in ("--steps", "--json", "-h", "--help"):
        own += 2 if argv[own] == "--steps" else 1
    args = parser.parse_args(argv[:own])
    args.job = argv[own:]
    if not args.job:
        parser.error("expected a script, as for `hf-zeropp launch`")
    if args.steps < MIN_STEPS:
        parser.error(f"--steps must be at least {MIN_STEPS}, since the first three are not measured, got {args.steps}")
    return args
