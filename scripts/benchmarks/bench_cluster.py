"""Step time, bytes and memory of stock FSDP2, HSDP and ZeRO++ on an emulated cluster with a slow network.

    python scripts/benchmarks/bench_cluster.py                                    the whole study
    python scripts/benchmarks/bench_cluster.py --rates 200mbit --variants stock balanced --accumulation 1

At every rate and accumulation the variants take turns in several rounds, and medians are compared: other programs on the
machine then slow all variants alike, and ratios between them hold where seconds do not. Results go to a JSON file as they
come; the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from library.cluster import Cluster, Ranks
from library.links import start_all
from library.network import bits_per_second, speed
from library.pages import Grid, report
from library.plots import cluster_text, log_ticks, over_rates, panels, save
from library.rounds import cell_of, measure_in_turns
from library.study import (
    Study,
    add_cluster_flags,
    make_parser,
    parse,
    rank_environment,
    require,
    shape_of,
    study_of,
)
from library.variants import LEARNING_RATE, VARIANTS, ModelShape, Variant, shown
from rich.progress import Progress

RATES = ["unlimited", "10gbit", "1gbit", "200mbit", "100mbit"]
DEFAULT_VARIANTS = ["compute", "stock", "stock-fp32", "hsdp", "qwz", "hpz", "qgz", "balanced"]
QUICK = {
    "rates": ["100mbit"],
    "variants": ["compute", "stock", "hsdp", "balanced"],
    "accumulation": [1],
    "steps": 3,
    "hidden_size": 256,
    "layers": 4,
}
FIXED = ("nodes", "ranks_per_node", "threads", "model", "batch_size", "seq_len", "delay", "zeropp")
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "secondary", "partial", "peak")
TITLE = "Step time on an emulated cluster"
INTRO = """A Llama with {millions:.1f} M parameters, trained through Accelerate with bf16 compute and AdamW, on nodes
that are network namespaces of one machine, their links shaped in both directions. *Stock FSDP2* is Accelerate's, with
bf16 reduction unless the name says fp32; *HSDP* shards within the node and replicates over nodes; the others are this
package, under the names of its presets; *no communication* runs the same step without any collective. Step times are
medians. The floor is the step without communication plus the bytes that crossed the link over its rate. M is the model in
bf16; link MB are those of the busiest node per step, by its interface's counters, headers and acknowledgements included;
counted MB are our own accounting of payload (and, for qgZ alone, of FSDP2's gathers as a ring carries them)."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    others = ", ".join(name for name in VARIANTS if name not in DEFAULT_VARIANTS)
    parser = make_parser(__doc__, "cluster.json")
    add_cluster_flags(parser, RATES, batch_size=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--delay", help="added to every packet in each direction, such as 1ms")
    parser.add_argument("--variants", nargs="+", default=DEFAULT_VARIANTS, choices=VARIANTS, help=f"also: {others}")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8], help="micro-steps per step")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--steps", type=int, default=9, help="timed steps, at most")
    parser.add_argument("--rounds", type=int, default=3, help="in which the variants take turns")
    parser.add_argument("--seconds", type=float, default=45, help="of timed steps; at least 3 steps are made")
    parser.add_argument(
        "--learning-rate", type=float, default=LEARNING_RATE, help="of AdamW; changed words depend on it"
    )
    parser.add_argument("--zeropp", type=json.loads, default={}, help="settings beside a variant's own, as JSON")
    return parse(parser, QUICK, argv)


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of the study that stand on its page."""
    found = {
        "model": dataclasses.asdict(shape_of(args)),
        **{key: getattr(args, key) for key in FIXED if key != "model"},
    }
    # Bytes and times of other variants do not depend on it, and older studies did not note it.
    return found if args.learning_rate == LEARNING_RATE else found | {"learning_rate": args.learning_rate}


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Measure every rate, accumulation and variant that the study lacks."""
    groups = {
        (rate, micro_steps): [
            name for name in args.variants if study.find("cells", **_key(rate, micro_steps, name)) is None
        ]
        for rate in args.rates
        for micro_steps in args.accumulation
    }
    names = [name for name in args.variants if any(name in group for group in groups.values())]
    if not names:
        return

    def start(cluster: Cluster, name: str) -> contextlib.AbstractContextManager[Ranks]:
        settings = shape_of(args), args.batch_size, args.seq_len, args.learning_rate
        return cluster.start("library.training_run:TrainingRun", _variant(name, args), *settings)

    with (
        Cluster(args.nodes, args.ranks_per_node, rank_environment(args.threads)) as cluster,
        contextlib.ExitStack() as stack,
    ):
        runs = start_all(stack, cluster, names, start)
        for name in names:
            _measure_memory(name, runs[name], args, study)
        task = progress.add_task("measuring", total=sum(map(len, groups.values())))
        for (rate, micro_steps), group in groups.items():
            progress.update(task, description=f"{rate}, {micro_steps} micro-steps")
            cluster.set_link(rate, args.delay)
            _measure_group({name: runs[name] for name in group}, rate, micro_steps, args, study)
            progress.advance(task, len(group))


def _variant(name: str, args: argparse.Namespace) -> Variant:
    variant = VARIANTS[name]
    return variant if variant.zeropp is None else dataclasses.replace(variant, zeropp=variant.zeropp | args.zeropp)


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
    """Measure all variants at one rate and accumulation, in turns."""
    found = measure_in_turns(runs, micro_steps, steps=args.steps, seconds=args.seconds, rounds=args.rounds)
    for name, rounds in found.items():
        cell = cell_of(rounds, args.ranks_per_node) | {"loss": rounds[-1][0].loss}
        study.add("cells", {**_key(rate, micro_steps, name), **cell})


# --------------------------------------------------------------------------------------------------------------- report


def grids(study: Study, args: argparse.Namespace) -> list[Grid]:
    """Make every table, for the rates and accumulations on the command line."""
    tables = [(rate, micro_steps) for rate in args.rates for micro_steps in args.accumulation]
    return [*(rate_grid(study, rate, micro_steps) for rate, micro_steps in tables), memory_grid(study)]


def floor_seconds(study: Study, cell: dict[str, Any]) -> float | None:
    """Return the shortest step that a variant could have without overlap, or None where ``compute`` was not measured.

    It is the step without any collective, plus the bytes that this variant sends over the link's rate.
    """
    compute = study.find("cells", variant="compute", rate=cell["rate"], accumulation=cell["accumulation"])
    if compute is None:
        return None
    bits = bits_per_second(cell["rate"])
    return compute["step_s"] + (8 * cell["link_bytes"] / bits if bits else 0.0)


def rate_grid(study: Study, rate: str, micro_steps: int) -> Grid:
    """Make the table of one rate and accumulation, with a row per variant."""
    columns = ("step s", "min-max", "x stock", "floor s", "x floor", "link MB", "in M", "counted MB", "link/counted")
    grid = Grid(f"{rate}, {micro_steps} micro-steps per step", ("variant", *columns))
    stock = study.find("cells", variant="stock", rate=rate, accumulation=micro_steps)
    model_bytes = 2 * ModelShape(**study.conditions["model"]).num_parameters
    for cell in study.rows("cells"):
        if cell["rate"] != rate or cell["accumulation"] != micro_steps:
            continue
        floor, counted, sent = floor_seconds(study, cell), cell["counted_bytes"], cell["link_bytes"]
        row = [
            shown(cell["variant"]),
            f"{cell['step_s']:.3f}",
            f"{min(cell['steps_s']):.2f}-{max(cell['steps_s']):.2f}",
            f"{stock['step_s'] / cell['step_s']:.2f}" if stock else "",
            *((f"{floor:.3f}", f"{cell['step_s'] / floor:.2f}") if floor else ("", "")),
            f"{sent / 1e6:.2f}",
            f"{sent / model_bytes:.3f}",
            *((f"{counted / 1e6:.2f}", f"{sent / counted:.3f}") if counted else ("", "")),
        ]
        grid.rows.append(row)
    return grid


def memory_grid(study: Study) -> Grid:
    """Make the table of megabytes by kind, each of the rank that holds most of it."""
    grid = Grid("MB per rank", ("variant", "micro-steps", *MEMORY_KINDS))
    for row in study.rows("memory"):
        if row["variant"] != "compute":
            kinds = (f"{row[kind] / 1e6:.1f}" for kind in MEMORY_KINDS)
            grid.rows.append([shown(row["variant"]), str(row["accumulation"]), *kinds])
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw step rates over the link's rate, as ratios to stock FSDP2, one panel per accumulation."""
    cells = [cell for cell in study.rows("cells") if cell["variant"] != "compute"]
    accumulations = sorted({cell["accumulation"] for cell in cells})
    title = f"Steps per second beside stock FSDP2 (= 1)\n{cluster_text(study.conditions)}"
    figure, axes = panels(len(accumulations), title, sharey=True)
    for axis, micro_steps in zip(axes, accumulations, strict=True):

        def ratio(name: str, rate: str, micro_steps: int = micro_steps) -> float | None:
            own, stock = (study.find("cells", **_key(rate, micro_steps, each)) for each in (name, "stock"))
            return stock["step_s"] / own["step_s"] if own and stock else None

        over_rates(axis, [cell["rate"] for cell in cells], [cell["variant"] for cell in cells], ratio)
        axis.set_title(f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''} per step", fontsize=9)
        log_ticks(axis, (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16))
    axes[0].set_ylabel("steps per second, stock FSDP2 = 1")
    save(figure, path)


def check_direction(study: Study, args: argparse.Namespace) -> None:
    """Check the results of the quick form, at the lowest rate.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    rate = min(args.rates, key=speed)
    for micro_steps in args.accumulation:
        stock, ours = (study.find("cells", **_key(rate, micro_steps, name)) for name in ("stock", "balanced"))
        claims = {
            f"ZeRO++ is faster than stock at {rate}": ours["step_s"] < stock["step_s"],
            "ZeRO++ sends less than 0.3 of stock's bytes": ours["link_bytes"] < 0.3 * stock["link_bytes"],
            "interface and accounting agree within 3 %": 1 <= ours["link_bytes"] / ours["counted_bytes"] < 1.03,
        }
        require({f"with {micro_steps} micro-steps per step, {claim}": holds for claim, holds in claims.items()})


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    study = study_of(args, __file__, conditions(args), FIXED, run_study)
    intro = INTRO.format(millions=ModelShape(**study.conditions["model"]).num_parameters / 1e6)
    report(study, TITLE, intro, grids(study, args), plot)
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
