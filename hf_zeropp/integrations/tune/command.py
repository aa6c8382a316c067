"""The command ``hf-zeropp tune``."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.weights.low_rates import lowest_rate
from hf_zeropp.integrations.tune.report import Search, show, to_json
from hf_zeropp.integrations.tune.trial import SKIPPED_STEPS, STOCK, TRIED, TrialError, start

DESCRIPTION = (
    "Start your own command on stock FSDP2, under the presets balanced, exact, half_model and min_traffic, and with weights that "
    "stay whole (qgz_accumulate: whole), under balanced and unquantized, in turns, and say which is fastest, or that none is "
    "faster than stock. The command stays as it is, with its launcher. Say in the script's own words that it ends soon, without "
    "evaluation and checkpoints, and give it a seed. {folder} in the command stands for a temporary folder of the trial: "
    "hf-zeropp tune hf-zeropp launch --config_file FILE train.py --max_steps 12 --output_dir {folder}. The first "
    f"{SKIPPED_STEPS} steps are not measured. On several nodes run the same on each, as for the job itself."
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
            search = _search(args, Path(folder))
    except TrialError as error:
        raise SystemExit(f"hf-zeropp tune: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("hf-zeropp tune: interrupted.") from None
    if args.json:
        print(json.dumps(to_json(search), indent=1))
    else:
        show(search, Console())


def _search(args: argparse.Namespace, folder: Path) -> Search:
    """Start the job under each candidate, ``--rounds`` times in turns. What fails once is not tried again."""
    search = Search()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task("")
        for number, name in enumerate((STOCK, *TRIED) * args.rounds):
            lowest = 0.0 if name == STOCK else lowest_rate(ZeroPPConfig.from_dict(TRIED[name]))
            if lowest and search.trials[STOCK][0].rate < lowest:  # see ``low_rates.py``
                search.failed[name] = f"not tried, since weights lag behind at learning rates under {lowest:g}"
            if name in search.failed:
                continue
            time.sleep(args.pause if number else 0)
            progress.reset(line, description=name)
            own = folder / str(number)
            try:
                trial = start(args.job, name, own, lambda text: progress.update(line, description=text))
            except TrialError as error:
                if name == STOCK:
                    raise TrialError(f"on stock FSDP2 {error}") from error
                search.failed[name] = str(error)
            else:
                search.add(name, trial)
    if not search.others:
        name, why = next(iter(search.failed.items()))
        raise TrialError(f"stock FSDP2 runs, but under {name} {why}")
    return search


def _parse(argv: list[str]) -> argparse.Namespace:
    usage = "hf-zeropp tune [--rounds N] [--pause S] [--json] COMMAND ..."
    parser = argparse.ArgumentParser("hf-zeropp tune", usage, DESCRIPTION)
    add = parser.add_argument
    add("--rounds", type=int, default=2, help="How often each candidate runs. The default is 2.")
    pause = "Seconds between two runs, for other nodes to end the first. The default is 5."
    add("--pause", type=float, default=5, help=pause)
    add("--json", action="store_true", help="Print JSON instead of the table.")
    add("job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.job:
        parser.error("expected the command that starts the job")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args
