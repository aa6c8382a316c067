"""Does ``hf-zeropp tune`` find the fastest settings on links of several speeds? On an emulated cluster, beside other figures.

    python scripts/benchmarks/bench_tune.py                              the five links, one micro-step: an hour
    python scripts/benchmarks/bench_tune.py --rates 200mbit --micro-steps 1 8

On each node runs the same command, ``hf-zeropp tune ... tuned_program.py``, as a user would run it. Then candidates run once
more, side by side and in turns, as in ``bench_cluster.py``. What the first node recommends must be the fastest there too, or take
at most ``--tolerance`` longer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from library.cluster import BENCHMARKS, Cluster
from library.links import TRAINING, start_all
from library.network import INTERFACE, UNLIMITED, address, namespace
from library.pages import Grid, show
from library.rounds import cell_of, measure_in_turns
from library.sandbox import enter_sandbox
from library.study import add_model_flags, rank_environment, shape_of
from library.variants import LEARNING_RATE, Variant

from hf_zeropp.integrations.tune.trial import STOCK, TRIED

COLUMNS = (
    "link",
    "micro-steps",
    "recommended",
    "tune: s, stock",
    "s, recommended",
    "in turns: s, stock",
    "s, recommended",
)
COLUMNS += ("fastest", "s", "recommended / fastest")
VARIANTS = {STOCK: Variant("stock"), **{name: Variant(name, settings) for name, settings in TRIED.items()}}
"""The candidates of tune, by their names there."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=[UNLIMITED, "10gbit", "1gbit", "200mbit", "100mbit"])
    parser.add_argument("--micro-steps", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=12, help="of each trial")
    parser.add_argument("--seconds", type=float, default=30, help="of each candidate when they take turns")
    parser.add_argument("--rounds", type=int, default=3)
    add_model_flags(parser)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--tolerance", type=float, default=0.05)
    return parser.parse_args(argv)


def tune(micro_steps: int, port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the command on both nodes, and return what it says on the first.

    Raises:
        SystemExit: it failed.
    """
    sizes = dataclasses.astuple(shape_of(args))
    numbers = args.steps, micro_steps, args.learning_rate, args.sequence_length, *sizes
    place = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", address(0), "--master-port", str(port)]
    launcher = [sys.executable, "-m", "torch.distributed.run", *place]
    program = [str(BENCHMARKS / "library/tuned_program.py"), *map(str, numbers)]
    environment = os.environ | rank_environment(threads=1)
    environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(BENCHMARKS)}
    with tempfile.TemporaryDirectory() as folder:
        nodes = []
        for node in range(2):
            command = ["ip", "netns", "exec", namespace(node), sys.executable, "-m", "hf_zeropp.cli", "tune", "--json"]
            command += [*launcher, "--node-rank", str(node), *program]
            with open(Path(folder, str(node)), "w") as output:
                nodes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=output))
        if any([node.wait() for node in nodes]):  # a list, so that both are waited for
            raise SystemExit("tune failed: see above")
        return json.loads(Path(folder, "0").read_text())


def measure(cluster: Cluster, micro_steps: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a step of each candidate, measured in turns."""
    with contextlib.ExitStack() as stack:
        settings = shape_of(args), 1, args.sequence_length, args.learning_rate
        runs = start_all(stack, cluster, VARIANTS, TRAINING, lambda name: (VARIANTS[name], *settings))
        rounds = dict(measure_in_turns(runs, micro_steps, steps=15, seconds=args.seconds, rounds=args.rounds))
    return {name: cell_of(each, 2)["step_s"] for name, each in rounds.items()}


def row_of(rate: str, micro_steps: int, found: dict[str, Any], seconds: dict[str, float]) -> tuple[list[str], float]:
    """Return a row of the table, and by how much the recommended settings are slower than the fastest."""
    fastest = min(seconds, key=seconds.__getitem__)
    chosen = found["recommended"] or STOCK
    recommended = seconds[chosen]
    tuned = {name: each["median"] for name, each in found["candidates"].items()}
    figures = tuned[STOCK], tuned[chosen], seconds[STOCK], recommended
    ratio = recommended / seconds[fastest]
    name = found["recommended"] or "leave it off"
    row = [rate, str(micro_steps), name, *(f"{figure:.3f}" for figure in figures), fastest, f"{seconds[fastest]:.3f}"]
    return [*row, f"{ratio:.3f}"], ratio


def main() -> None:
    """Run all links, show the table, and fail where tune was wrong."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    grid = Grid("hf-zeropp tune beside a measurement in turns", COLUMNS)
    wrong = []
    with Cluster(2, 2, rank_environment(threads=1)) as cluster:
        for index, (rate, micro_steps) in enumerate((rate, each) for rate in args.rates for each in args.micro_steps):
            cluster.set_link(rate)
            found = tune(micro_steps, 29400 + index, args)
            print(json.dumps({"link": rate, **found}), flush=True)
            row, ratio = row_of(rate, micro_steps, found, measure(cluster, micro_steps, args))
            grid.rows.append(row)
            wrong += [rate] if ratio > 1 + args.tolerance else []
    show([grid], markdown=True)
    if wrong:
        raise SystemExit(f"what tune recommends is not the fastest at {', '.join(wrong)}")


if __name__ == "__main__":
    main()
