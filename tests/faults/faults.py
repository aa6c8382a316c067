"""Let random faults happen to real training runs, one after another. ``bash scripts/faults.sh --help`` says how."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from attack.place import enter_namespaces  # noqa: E402


def main() -> int:
    args = _parse()
    enter_namespaces()
    from attack.campaign import run_campaign, table
    from attack.fault import draw

    first = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    seeds = args.only or range(first, first + args.count)
    print(f"first seed {seeds[0]}", flush=True)
    start = time.monotonic()

    def show(verdicts):
        verdict, number = verdicts[-1], len(verdicts)
        good = "" if verdict.is_good else "  WRONG"
        print(
            f"{time.monotonic() - start:6.0f} s: {number} of {len(seeds)}: {draw(verdict.fault.seed)}{good}", flush=True
        )
        if args.only or not verdict.is_good:
            print(verdict, flush=True)

    verdicts = run_campaign(seeds, show)
    print(table(verdicts))
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="of the first fault; a random one by default")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these faults, with what each rank said")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
