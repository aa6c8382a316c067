"""Run the differential fuzz for long, or one seed, or one program. ``bash scripts/fuzz.sh --help`` says how."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from differential.campaign import Campaign, failure_of, shorten
from differential.cases import MESHES, Case
from differential.generate import NEVER, WORLDS, generate
from differential.hazards import HAZARDS
from differential.pool import Worlds
from differential.rank import Job

PROGRESS_S = 15.0
SHORTEN_S = 60.0  # for the first failure of each group


def main() -> int:
    args = _parse()
    if args.script is not None:
        return _run_one(-1, Case.parse(Path(args.script).read_text()))
    if args.only is not None:
        return _run_one(args.only, generate(args.only, args.without, args.mesh))
    return _run_campaign(args)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog="hazards: " + "; ".join(HAZARDS))
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; a random one by default")
    parser.add_argument("--only", type=int, default=None, metavar="SEED", help="run one seed, shorten and print it")
    parser.add_argument("--script", default=None, help="run the program in a file")
    parser.add_argument("--without", action="append", default=[], choices=HAZARDS, metavar="HAZARD")
    parser.add_argument("--with-only", action="append", default=[], choices=HAZARDS, metavar="HAZARD")
    parser.add_argument("--mesh", choices=MESHES, default="", help="what differential/meshes.py describes")
    parser.add_argument(
        "--worlds",
        type=int,
        nargs="+",
        help="ranks of one group; by default all sizes, or with --mesh the smallest",
    )
    args = parser.parse_args()
    args.worlds = args.worlds or ([min(WORLDS)] if args.mesh else sorted(set(WORLDS)))
    args.without = sorted(HAZARDS.keys() - set(args.with_only)) if args.with_only else [*args.without, *NEVER]
    return args


def _run_one(seed: int, case: Case) -> int:
    print(case.script())
    with Worlds() as worlds:
        failure = failure_of(seed, case, worlds[case.num_ranks].run(Job(case)))
        if failure is None:
            print("# passes")
            return 0
        print(f"\n{shorten(failure, worlds, SHORTEN_S)}")
    return 1


def _run_campaign(args: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    print(f"first seed {seed}", flush=True)
    campaign = Campaign(
        seed,
        without=args.without,
        limit_s=60 * args.minutes,
        shorten_s=SHORTEN_S,
        worlds=args.worlds,
        mesh=args.mesh,
    ).start()
    started, shown, has_ended = time.monotonic(), 0, False
    while not has_ended:
        has_ended = campaign.wait(PROGRESS_S)
        failures = list(campaign.failures)
        for failure in failures[shown:]:
            if failure.is_short:
                print(f"\n{failure}", flush=True)
        shown = len(failures)
        print(f"{time.monotonic() - started:6.0f} s: {campaign.num_cases} programs, {shown} failures", flush=True)
    print(campaign.summary())
    return 1 if campaign.broken_promises else 0


if __name__ == "__main__":
    sys.exit(main())
