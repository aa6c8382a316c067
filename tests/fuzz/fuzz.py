"""Run the differential fuzz for long, or one seed, or one program. ``bash scripts/fuzz.sh --help`` says how."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from differential.campaign import STOCK_EVERY, Campaign, failure_of, shorten
from differential.cases import MESHES, Case
from differential.generate import NEVER, WORLDS, generate
from differential.hazards import HAZARDS
from differential.pool import HANG_S, Worlds
from differential.rank import Job

PROGRESS_S = 15.0


def main() -> int:
    args = _parse()
    if args.script is not None:
        return _run_one(-1, Case.parse(Path(args.script).read_text()), args)
    if args.only is not None:
        return _run_one(args.only, generate(args.only, args.without, args.mesh, args.groups), args)
    return _run_campaign(args)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog="hazards: " + "; ".join(HAZARDS))
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument(
        "--programs", type=int, default=None, help="end after so many, if the minutes are not over before"
    )
    parser.add_argument("--seed", type=int, default=None, help="the first seed; a random one by default")
    parser.add_argument("--only", type=int, default=None, metavar="SEED", help="run one seed, shorten and print it")
    parser.add_argument("--script", default=None, help="run the program in a file")
    parser.add_argument("--without", action="append", default=[], choices=HAZARDS, metavar="HAZARD")
    parser.add_argument("--with-only", action="append", default=[], choices=HAZARDS, metavar="HAZARD")
    parser.add_argument("--mesh", choices=MESHES, default="", help="what differential/meshes.py describes")
    parser.add_argument("--groups", type=int, help="of the mesh; 2 by default")
    parser.add_argument(
        "--worlds",
        type=int,
        nargs="+",
        help="ranks of one group; by default all sizes, or with --mesh the smallest",
    )
    parser.add_argument("--hang-seconds", type=float, default=HANG_S)
    parser.add_argument("--shorten-seconds", type=float, default=60.0, help="for the first failure of each group")
    parser.add_argument(
        "--stock-every",
        type=int,
        default=STOCK_EVERY,
        metavar="N",
        help="one program in N runs under stock FSDP2 even if it passes; 0 for none, which is quicker",
    )
    parser.add_argument("--plant", default=None, help="a bug of differential/planted.py, to see it found")
    parser.add_argument("--output", default=None, help="a folder for the programs that failed")
    args = parser.parse_args()
    args.worlds = args.worlds or ([min(WORLDS)] if args.mesh else sorted(set(WORLDS)))
    args.groups = args.groups or (2 if args.mesh else 1)
    args.without = sorted(HAZARDS.keys() - set(args.with_only)) if args.with_only else [*args.without, *NEVER]
    return args


def _run_one(seed: int, case: Case, args: argparse.Namespace) -> int:
    print(case.script())
    with Worlds(args.hang_seconds) as worlds:
        failure = failure_of(seed, case, worlds[case.num_ranks].run(Job(case, plant=args.plant)))
        if failure is None:
            print("# passes")
            return 0
        if args.shorten_seconds:
            failure = shorten(failure, worlds, args.shorten_seconds, args.plant)
    print(f"\n{failure}")
    return 1


def _run_campaign(args: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    print(f"first seed {seed}", flush=True)
    campaign = Campaign(
        seed,
        without=args.without,
        limit_s=60 * args.minutes,
        hang_s=args.hang_seconds,
        shorten_s=args.shorten_seconds,
        plant=args.plant,
        worlds=args.worlds,
        stock_every=args.stock_every,
        mesh=args.mesh,
        groups=args.groups,
        num_seeds=args.programs,
    ).start()
    shown, started = 0, time.monotonic()
    while not campaign.wait(PROGRESS_S):
        seconds = time.monotonic() - started
        failed = len(campaign.failures)
        print(
            f"{seconds:6.0f} s: {campaign.num_cases} programs, {campaign.rate:.1f} per second, {failed} failures",
            flush=True,
        )
        shown = _show(campaign, shown, args.output)
    _show(campaign, shown, args.output)
    print(campaign.summary())
    return 1 if campaign.broken_promises else 0


def _show(campaign: Campaign, shown: int, folder: str | None) -> int:
    """Print the short programs behind the first ``shown`` failures; write all to ``folder``."""
    failures = campaign.failures[shown:]
    for failure in failures:
        if failure.is_short:
            print(f"\n{failure}", flush=True)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{failure.whose.replace(' ', '_')}_{failure.seed}.txt").write_text(str(failure))
    return shown + len(failures)


if __name__ == "__main__":
    sys.exit(main())
