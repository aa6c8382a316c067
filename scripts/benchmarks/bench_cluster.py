"""Step time, bytes and memory of stock FSDP2, HSDP and ZeRO++ on an emulated cluster with a slow network.

    python scripts/bench_cluster.py                                    the whole study
    python scripts/bench_cluster.py --rates 200mbit --variants stock all --accumulation 1
    python scripts/bench_cluster.py --rates 200mbit --variants all --profile

At every rate and accumulation the variants take turns, in rounds, so that whatever else the machine does meanwhile
hits them alike. Results go to a JSON file as they come; the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from typing import Any

from cluster import Cluster, Ranks, enter_sandbox
from pages import headline
from profiling import phase_seconds
from rich.console import Console
from rich.progress import Progress
from study import ROOT, Study, command_line, make_parser, parse, progress_bar, rank_environment, shape_of

sys.path.insert(0, str(ROOT))

RATES = ["unlimited", "10gbit", "1gbit", "200mbit", "100mbit"]
VARIANT_NAMES = ["compute", "stock", "stock-fp32", "hsdp", "qwz", "hpz", "qgz", "all"]
LOW_BITS = ["paper", "half-values", "half", "half-hpz-8", "three-eighths"]
PARTS = [*LOW_BITS, "blocking", "sockets", "blocking-sockets", "chunks-N", "blocking-chunks-N (N: 2, 4, 8)"]
QUICK = {
    "rates": ["100mbit"],
    "variants": ["compute", "stock", "hsdp", "all"],
    "accumulation": [1],
    "steps": 3,
    "hidden_size": 256,
    "layers": 4,
}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, "cluster.json")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of each link, both ways: 200mbit, 1gbit, unlimited")
    parser.add_argument("--delay", help="added to every packet in each direction, such as 1ms")
    parser.add_argument("--variants", nargs="+", default=VARIANT_NAMES, help=f"also: {', '.join(PARTS)}")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8], help="micro-steps per step")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--steps", type=int, default=9, help="timed steps, at most")
    parser.add_argument("--rounds", type=int, default=3, help="in which the variants take turns")
    parser.add_argument("--seconds", type=float, default=45, help="of timed steps; at least 3 steps are made")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per rank and micro-step")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--zeropp", type=json.loads, default={}, help="settings beside a variant's own, as JSON")
    parser.add_argument("--profile", nargs="*", help="also show where a step's time goes, for these variants or all")
    return parse(parser, QUICK, argv)


FIXED = ("nodes", "ranks_per_node", "threads", "model", "batch_size", "seq_len", "delay", "zeropp")


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": command_line(__file__),
        "model": dataclasses.asdict(shape_of(args)),
        **{key: getattr(args, key) for key in FIXED if key != "model"},
    }


def _variant(name: str, args: argparse.Namespace):
    from training_run import VARIANTS

    variant = VARIANTS[name]
    return variant if variant.zeropp is None else dataclasses.replace(variant, zeropp=variant.zeropp | args.zeropp)


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Measure what the study lacks. All variants are alive at once; those not being measured sleep."""
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
    return cluster.start(
        "training_run:TrainingRun", _variant(name, args), shape_of(args), args.batch_size, args.seq_len
    )


def _is_missing(study: Study, key: dict[str, Any], args: argparse.Namespace) -> bool:
    return study.find("cells", **key) is None or _is_profile_missing(study, key, args)


def _is_profile_missing(study: Study, key: dict[str, Any], args: argparse.Namespace) -> bool:
    is_wanted = args.profile is not None and key["variant"] in (args.profile or args.variants)
    return is_wanted and study.find("profiles", **key) is None


def _key(rate: str, micro_steps: int, name: str) -> dict[str, Any]:
    return {"rate": rate, "accumulation": micro_steps, "variant": name}


def _measure_memory(name: str, ranks: Ranks, args: argparse.Namespace, study: Study) -> None:
    """At full speed: bytes held do not depend on the link."""
    for micro_steps in args.accumulation:
        if study.find("memory", variant=name, accumulation=micro_steps) is None:
            ranks.call("measure", 1, micro_steps)
            kinds = ranks.call("memory", micro_steps)
            worst = {kind: max(rank[kind] for rank in kinds) for kind in kinds[0]}
            study.add("memory", {"variant": name, "accumulation": micro_steps, **worst})


def _measure_group(runs: dict[str, Ranks], rate: str, micro_steps: int, args: argparse.Namespace, study: Study) -> None:
    """Variants take turns, in several rounds: the machine's moods are shared out evenly."""
    new = {name: ranks for name, ranks in runs.items() if study.find("cells", **_key(rate, micro_steps, name)) is None}
    left = {}
    for name, ranks in new.items():
        (first,) = step_seconds(ranks.call("measure", 1, micro_steps))
        left[name] = max(3, min(args.steps, int(args.seconds / first)))
    parts: dict[str, list[Any]] = {name: [] for name in new}
    for rounds_left in range(args.rounds, 0, -1):
        for name, ranks in new.items():
            if steps := -(-left[name] // rounds_left):
                parts[name].append(ranks.call("measure", steps, micro_steps))
                left[name] -= steps
    for name in new:
        study.add("cells", {**_key(rate, micro_steps, name), **_cell(parts[name], args)})
    for name, ranks in runs.items():
        if _is_profile_missing(study, _key(rate, micro_steps, name), args):
            summaries = ranks.call("profile", min(3, args.steps), micro_steps)
            study.add("profiles", {**_key(rate, micro_steps, name), "seconds": phase_seconds(summaries)})


def step_seconds(measurements: list[Any]) -> list[float]:
    """A step ends when its last rank does."""
    ends = [max(moment) for moment in zip(*(measured.step_ends for measured in measurements), strict=True)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def _cell(parts: list[list[Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Step times, and bytes per step of the busiest node: by its interface and by our accounting.

    parts: per round, every rank's measurement.
    """
    seconds = [second for part in parts for second in step_seconds(part)]
    nodes = [[part[rank] for part in parts] for rank in range(0, len(parts[0]), args.ranks_per_node)]
    sent = max(sum(one.link[way] for one in node) for node in nodes for way in ("tx", "rx"))
    counted = [sum(one.counted for one in node) for node in nodes if node[0].counted is not None]
    return {
        "step_s": statistics.median(seconds),
        "steps_s": [round(second, 5) for second in seconds],
        "link_bytes": sent / len(seconds),
        "counted_bytes": max(counted) / len(seconds) if counted else None,
        "loss": parts[-1][0].loss,
    }


def main() -> None:
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    from cluster_report import check_direction, grids, page, plot_rates

    console = Console(width=None if sys.stdout.isatty() else 132)
    study = Study(args.output, conditions(args), FIXED, fresh=args.fresh)
    with progress_bar(console) as progress:
        run_study(args, study, progress)
    console.print(headline(study.conditions))
    for grid in grids(study, args):
        console.print(grid.rich())
    if args.plot:
        plot_rates(study, args.plot)
    if study.path:
        page(study, args)
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
