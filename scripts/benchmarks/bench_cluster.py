"""Step time, bytes and memory of stock FSDP2, HSDP and ZeRO++ on an emulated cluster with a slow network.

    python scripts/benchmarks/bench_cluster.py                                    the whole study
    python scripts/benchmarks/bench_cluster.py --rates 200mbit --variants stock all --accumulation 1
    python scripts/benchmarks/bench_cluster.py --rates 200mbit --variants all --profile

At every rate and accumulation the variants take turns in several rounds, and medians are compared: other programs on the
machine then slow all variants alike, and ratios between them hold where seconds do not. Results go to a JSON file as they
come; the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from typing import Any

from library.cluster import Cluster, Ranks
from library.cluster_report import TITLE, check_direction, grids, intro, plot_rates
from library.measurement import Round, busiest_link_bytes, largest_counted_bytes, step_seconds
from library.pages import report
from library.profiling import phase_seconds
from library.sandbox import enter_sandbox
from library.study import (
    Study,
    command_line,
    make_parser,
    new_console,
    parse,
    progress_bar,
    rank_environment,
    shape_of,
)
from library.variants import LEARNING_RATE, VARIANTS, Variant
from rich.progress import Progress

RATES = ["unlimited", "10gbit", "1gbit", "200mbit", "100mbit"]
DEFAULT_VARIANTS = ["compute", "stock", "stock-fp32", "hsdp", "qwz", "hpz", "qgz", "all"]
QUICK = {
    "rates": ["100mbit"],
    "variants": ["compute", "stock", "hsdp", "all"],
    "accumulation": [1],
    "steps": 3,
    "hidden_size": 256,
    "layers": 4,
}
FIXED = ("nodes", "ranks_per_node", "threads", "model", "batch_size", "seq_len", "delay", "zeropp")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    others = ", ".join(name for name in VARIANTS if name not in DEFAULT_VARIANTS)
    parser = make_parser(__doc__, "cluster.json")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of each link, both ways: 200mbit, 1gbit, unlimited")
    parser.add_argument("--delay", help="added to every packet in each direction, such as 1ms")
    parser.add_argument("--variants", nargs="+", default=DEFAULT_VARIANTS, choices=VARIANTS, help=f"also: {others}")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8], help="micro-steps per step")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--steps", type=int, default=9, help="timed steps, at most")
    parser.add_argument("--rounds", type=int, default=3, help="in which the variants take turns")
    parser.add_argument("--seconds", type=float, default=45, help="of timed steps; at least 3 steps are made")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per rank and micro-step")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument(
        "--learning-rate", type=float, default=LEARNING_RATE, help="of AdamW; changed words depend on it"
    )
    parser.add_argument("--zeropp", type=json.loads, default={}, help="settings beside a variant's own, as JSON")
    parser.add_argument("--profile", nargs="*", help="show where a step's time goes, for these variants or all")
    return parse(parser, QUICK, argv)


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of the study that stand on its page."""
    found = {
        "command": command_line(__file__),
        "model": dataclasses.asdict(shape_of(args)),
        **{key: getattr(args, key) for key in FIXED if key != "model"},
    }
    # Bytes and times of other variants do not depend on it, and older studies did not note it.
    return found if args.learning_rate == LEARNING_RATE else found | {"learning_rate": args.learning_rate}


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Measure every rate, accumulation and variant that the study lacks.

    The ranks of all variants exist at the same time, so that variants can take turns. Ranks that are not being measured
    wait for a message, and take no processor time.
    """
    groups = {
        (rate, micro_steps): [name for name in args.variants if _is_missing(study, _key(rate, micro_steps, name), args)]
        for rate in args.rates
        for micro_steps in args.accumulation
    }
    names = [name for name in args.variants if any(name in group for group in groups.values())]
    if not names:
        return
    with (
        Cluster(args.nodes, args.ranks_per_node, rank_environment(args.threads)) as cluster,
        contextlib.ExitStack() as stack,
    ):
        runs = {name: stack.enter_context(_start(cluster, name, args)) for name in names}
        for name in names:
            _measure_memory(name, runs[name], args, study)
        task = progress.add_task("measuring", total=sum(map(len, groups.values())))
        for (rate, micro_steps), group in groups.items():
            progress.update(task, description=f"{rate}, {micro_steps} micro-steps")
            cluster.set_link(rate, args.delay)
            _measure_group({name: runs[name] for name in group}, rate, micro_steps, args, study)
            progress.advance(task, len(group))


def _start(cluster: Cluster, name: str, args: argparse.Namespace) -> contextlib.AbstractContextManager[Ranks]:
    served = "library.training_run:TrainingRun"
    return cluster.start(
        served, _variant(name, args), shape_of(args), args.batch_size, args.seq_len, args.learning_rate
    )


def _variant(name: str, args: argparse.Namespace) -> Variant:
    variant = VARIANTS[name]
    return variant if variant.zeropp is None else dataclasses.replace(variant, zeropp=variant.zeropp | args.zeropp)


def _is_missing(study: Study, key: dict[str, Any], args: argparse.Namespace) -> bool:
    return study.find("cells", **key) is None or _is_profile_missing(study, key, args)


def _is_profile_missing(study: Study, key: dict[str, Any], args: argparse.Namespace) -> bool:
    is_wanted = args.profile is not None and key["variant"] in (args.profile or args.variants)
    return is_wanted and study.find("profiles", **key) is None


def _key(rate: str, micro_steps: int, name: str) -> dict[str, Any]:
    return {"rate": rate, "accumulation": micro_steps, "variant": name}


def _measure_memory(name: str, ranks: Ranks, args: argparse.Namespace, study: Study) -> None:
    """Add the memory of the rank that holds most. It does not depend on the link, which is not limited yet."""
    for micro_steps in args.accumulation:
        if study.find("memory", variant=name, accumulation=micro_steps) is None:
            ranks.call("measure", 1, micro_steps)  # the first step makes the optimizer's state
            kinds = ranks.call("memory", micro_steps)
            worst = {kind: max(rank[kind] for rank in kinds) for kind in kinds[0]}
            study.add("memory", {"variant": name, "accumulation": micro_steps, **worst})


def _measure_group(runs: dict[str, Ranks], rate: str, micro_steps: int, args: argparse.Namespace, study: Study) -> None:
    """Measure all variants at one rate and accumulation, in turns.

    Variants measured one after the other would differ by whatever else the machine did meanwhile: on a shared machine
    that is more than most differences between them. Each round therefore times a few steps of every variant.
    """
    new = {name: ranks for name, ranks in runs.items() if study.find("cells", **_key(rate, micro_steps, name)) is None}
    left = {name: _num_steps(ranks, micro_steps, args) for name, ranks in new.items()}
    rounds: dict[str, list[Round]] = {name: [] for name in new}
    for rounds_left in range(args.rounds, 0, -1):
        for name, ranks in new.items():
            if steps := -(-left[name] // rounds_left):
                rounds[name].append(ranks.call("measure", steps, micro_steps))
                left[name] -= steps
    for name in new:
        study.add("cells", {**_key(rate, micro_steps, name), **_cell(rounds[name], args)})
    for name, ranks in runs.items():
        if _is_profile_missing(study, _key(rate, micro_steps, name), args):
            summaries = ranks.call("profile", min(3, args.steps), micro_steps)
            study.add("profiles", {**_key(rate, micro_steps, name), "seconds": phase_seconds(summaries)})


def _num_steps(ranks: Ranks, micro_steps: int, args: argparse.Namespace) -> int:
    """Return how many steps to time, from the duration of one that does not count."""
    (first,) = step_seconds(ranks.call("measure", 1, micro_steps))
    return max(3, min(args.steps, int(args.seconds / first)))


def _cell(rounds: list[Round], args: argparse.Namespace) -> dict[str, Any]:
    """Return step times, and bytes per step of the busiest node, by its interface and by the package's accounting."""
    seconds = [second for ranks in rounds for second in step_seconds(ranks)]
    counted = largest_counted_bytes(rounds, args.ranks_per_node)
    return {
        "step_s": statistics.median(seconds),
        "steps_s": [round(second, 5) for second in seconds],
        "link_bytes": busiest_link_bytes(rounds, args.ranks_per_node) / len(seconds),
        "counted_bytes": counted / len(seconds) if counted else None,
        "loss": rounds[-1][0].loss,
    }


def main() -> None:
    """Run the study in the sandbox, and report it."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    study = Study(args.output, conditions(args), FIXED, fresh=args.fresh)
    with progress_bar(new_console()) as progress:
        run_study(args, study, progress)
    report(args, study, TITLE, intro(study), grids(study, args), plot_rates)
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
