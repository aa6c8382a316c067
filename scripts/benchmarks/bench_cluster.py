"""Step time, bytes and memory of stock FSDP2, HSDP and ZeRO++ on an emulated cluster with a slow network.

    python scripts/benchmarks/bench_cluster.py                                    the whole study
    python scripts/benchmarks/bench_cluster.py --rates 200mbit --variants stock balanced --accumulation 1
    python scripts/benchmarks/bench_cluster.py --nodes 4 --ranks-per-node 1 --variants stock "balanced, 2 replicas"
    python scripts/benchmarks/bench_cluster.py --pretraining 300 --learning-rates 1e-6 1e-5 --output exact_steps.json

At every rate and accumulation the variants take turns in several rounds, and medians are compared: other programs on the
machine then slow all variants alike, and ratios between them hold where seconds do not. Results go to a JSON file as they
come; the same command continues where it was stopped. With ``--pretraining`` the model and its text are those of
``bench_losses.py``, behind so many steps: how many words ``exact`` sends depends on the model and on the learning rate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from library.cluster import Cluster, Ranks
from library.links import TRAINING, start_all
from library.network import bits_per_second, rate_text, speed
from library.pages import Grid, report
from library.plots import cluster_text, log_ticks, over_rates, panels, save
from library.rounds import cell_of, measure_in_turns
from library.study import (
    Study,
    add_cluster_flags,
    crossing_bytes,
    make_parser,
    parse,
    rank_environment,
    require,
    shape_of,
    study_of,
)
from library.text import checkpoint_of
from library.variants import LEARNING_RATE, VARIANTS, ModelShape, Recipe, Variant, shown
from rich.progress import Progress

RATES = ["unlimited", "10gbit", "1gbit", "200mbit", "100mbit"]
DEFAULT_VARIANTS = ["compute", "stock", "stock-fp32", "hsdp", "qwz", "hpz", "qgz", "balanced"]
QUICK = {
    "rates": ["100mbit"],
    "variants": ["compute", "stock", "hsdp", "balanced"],
    "accumulation": [2],
    "steps": 3,
    "hidden_size": 256,
    "layers": 4,
}
FIXED = ("nodes", "ranks_per_node", "threads", "batch_size", "seq_len", "zeropp", "pretraining", "model")
CHECKPOINT_RATE = 1e-3
FINE_TICKS = (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8)
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "secondary", "partial", "peak")
TITLE = "Step time on an emulated cluster"
INTRO = """A Llama with {millions:.1f} M parameters, trained through Accelerate with bf16 compute and AdamW, on nodes
that are network namespaces of one machine, their links shaped in both directions. *Stock FSDP2* is Accelerate's, with
bf16 reduction unless the name says fp32; *HSDP* shards within the node and replicates over nodes; the others are this
package, under the names of its presets; *no communication* runs the same step without any collective. Step times are
medians. The floor is the step without communication plus the bytes that crossed the link over its rate. M is the model in
bf16 times (Y-1)/Y for Y nodes. Link MB are those of the busiest node per step, by its interface's counters, headers and
acknowledgements included: the flat rings of stock FSDP2 put more on each link than has to cross (cluster.md says why);
counted MB are our own accounting of payload (and, for qgZ alone, of FSDP2's gathers as a ring carries them)."""
CHECKPOINT = """

The model was trained on the source code of Python's standard library before, and goes on over the same text with a new AdamW at a
constant learning rate."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    others = ", ".join(name for name in VARIANTS if name not in DEFAULT_VARIANTS)
    parser = make_parser(__doc__, "cluster.json")
    add_cluster_flags(parser, RATES, batch_size=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--variants", nargs="+", default=DEFAULT_VARIANTS, choices=VARIANTS, help=f"also: {others}")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8], help="micro-steps per step")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--steps", type=int, default=9, help="timed steps, at most")
    parser.add_argument("--rounds", type=int, default=3, help="in which the variants take turns")
    parser.add_argument("--seconds", type=float, default=45, help="of timed steps; at least 3 steps are made")
    parser.add_argument("--warm-up", type=int, default=1, help="steps that do not count; AdamW's first ones are larger")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[LEARNING_RATE], help="of AdamW")
    parser.add_argument("--pretraining", type=int, default=0, help="steps on text before; 0: random weights and tokens")
    parser.add_argument("--title", default=TITLE, help="of the page")
    parser.add_argument("--rival", default="stock", help="the plot's ratios are to this variant")
    parser.add_argument("--zeropp", type=json.loads, default={}, help="settings beside a variant's own, as JSON")
    return parse(parser, QUICK, argv)


# ---------------------------------------------------------------------------------------------------------- measurement


class Key(NamedTuple):
    """What one cell is of."""

    rate: str
    accumulation: int
    learning_rate: float
    variant: str

    def of(self, variant: str) -> Key:
        """Return the key of another variant in the same table."""
        return self._replace(variant=variant)


def keys_of(args: argparse.Namespace) -> list[Key]:
    """Return the keys of all cells that the command line asks for, table by table."""
    tables = itertools.product(args.learning_rates, args.rates, args.accumulation)
    return [Key(rate, steps, learning, name) for learning, rate, steps in tables for name in args.variants]


def find(study: Study, key: Key) -> dict[str, Any] | None:
    """Return a cell, or None."""
    return study.find("cells", **key._asdict())


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Measure every learning rate, link, accumulation and variant that the study lacks."""
    missing = [key for key in keys_of(args) if find(study, key) is None]
    if not missing:
        return
    task = progress.add_task("starting", total=len(missing))
    recipe = Recipe(shape_of(args), args.pretraining, args.batch_size, args.seq_len, CHECKPOINT_RATE)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(args.nodes, args.ranks_per_node, rank_environment(args.threads)))
        text: tuple[str | None, str | None] = (None, None)
        if args.pretraining:
            files, checkpoint = stack.enter_context(checkpoint_of(cluster, recipe, args.pretraining))
            text = files.code.train, checkpoint
        for learning_rate, keys in itertools.groupby(missing, lambda key: key.learning_rate):
            own = shape_of(args), args.batch_size, args.seq_len, learning_rate, *text
            _measure_all(list(keys), own, cluster, args, study, lambda key: progress.update(task, description=str(key)))


def _measure_all(
    keys: list[Key], model: tuple[Any, ...], cluster: Cluster, args: argparse.Namespace, study: Study, show: Any
) -> None:
    """Measure the cells of one learning rate, on ranks of all variants that exist side by side."""
    with contextlib.ExitStack() as stack:
        cluster.set_link()
        names = (key.variant for key in keys)
        runs = start_all(stack, cluster, names, TRAINING, lambda name: (_variant(name, args), *model))
        for name, ranks in runs.items():
            _measure_memory(name, ranks, args, study)
        for _, group in itertools.groupby(keys, lambda key: key[:3]):
            in_turns = {key.variant: key for key in group}
            one = next(iter(in_turns.values()))
            show(one)
            cluster.set_link(one.rate)
            found = measure_in_turns(
                {name: runs[name] for name in in_turns}, one.accumulation,
                steps=args.steps, seconds=args.seconds, rounds=args.rounds,
            )  # fmt: skip
            for name, rounds in found.items():
                cell = cell_of(rounds, args.ranks_per_node) | {"loss": rounds[-1][0].loss}
                predicted = runs[name].call("predicted_bytes", one.accumulation)[0]
                study.add("cells", in_turns[name]._asdict() | cell | {"predicted_bytes": predicted})


def _variant(name: str, args: argparse.Namespace) -> Variant:
    variant = VARIANTS[name]
    return variant if variant.zeropp is None else dataclasses.replace(variant, zeropp=variant.zeropp | args.zeropp)


def _measure_memory(name: str, ranks: Ranks, args: argparse.Namespace, study: Study) -> None:
    """Warm up, and add the memory of the rank that holds most. It does not depend on the link, which is not limited yet."""
    for micro_steps in args.accumulation:
        ranks.call("measure", args.warm_up, micro_steps)  # the first step makes the optimizer's state
        if study.find("memory", variant=name, accumulation=micro_steps) is None:
            kinds = ranks.call("memory", micro_steps)
            worst = {kind: max(rank[kind] for rank in kinds) for kind in kinds[0]}
            study.add("memory", {"variant": name, "accumulation": micro_steps, **worst})


# --------------------------------------------------------------------------------------------------------------- report


def grids(study: Study, args: argparse.Namespace) -> list[Grid]:
    """Make every table, for the learning rates, links and accumulations on the command line."""
    tables = dict.fromkeys(key.of("stock") for key in keys_of(args))
    return [*(step_grid(study, stock, args) for stock in tables), memory_grid(study)]


def title_of(key: Key, args: argparse.Namespace) -> str:
    """Return what the cells of a table or panel have in common, but for the link."""
    steps = f"{key.accumulation} micro-step{'s' if key.accumulation > 1 else ''} per step"
    return f"{steps}, learning rate {power_text(key.learning_rate)}" if len(args.learning_rates) > 1 else steps


def power_text(value: float) -> str:
    """Return a learning rate as guides write it: 1e-6, where Python's own form is 1e-06, and 1e-4 for 0.0001."""
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def floor_seconds(study: Study, key: Key, link_bytes: float) -> float | None:
    """Return the shortest step that a variant could have without overlap, or None where ``compute`` was not measured.

    It is the step without any collective, plus the bytes that this variant sends over the link's rate.
    """
    compute = find(study, key.of("compute"))
    if compute is None:
        return None
    bits = bits_per_second(key.rate)
    return compute["step_s"] + (8 * link_bytes / bits if bits else 0.0)


def step_grid(study: Study, stock: Key, args: argparse.Namespace) -> Grid:
    """Make one table, with a row per variant. ``stock`` is the key of its cell of stock FSDP2."""
    rivals = list(dict.fromkeys(("stock", args.rival)))
    columns = (
        "variant",
        "step s",
        "min-max",
        *(f"x {name if name == 'stock' else shown(name)}" for name in rivals),
        "floor s",
        "x floor",
        "link MB",
        "in M",
    )
    predictions = ["predicted"] if any(cell.get("predicted_bytes") for cell in study.rows("cells")) else []
    columns = (*columns, "counted MB", *predictions, "link/counted")
    grid = Grid(f"{rate_text(stock.rate)}, {title_of(stock, args)}", columns)
    model_bytes = crossing_bytes(study.conditions)
    for cell in study.rows("cells"):
        key = Key(*(cell[name] for name in Key._fields))
        if key.of("stock") != stock:
            continue
        counted, sent = cell["counted_bytes"], cell["link_bytes"]
        floor, others = floor_seconds(study, key, sent), [find(study, key.of(name)) for name in rivals]
        row = [
            shown(key.variant),
            f"{cell['step_s']:.3f}",
            f"{min(cell['steps_s']):.2f}-{max(cell['steps_s']):.2f}",
            *(f"{other['step_s'] / cell['step_s']:.2f}" if other else "" for other in others),
            *((f"{floor:.3f}", f"{cell['step_s'] / floor:.2f}") if floor else ("", "")),
            f"{sent / 1e6:.2f}",
            f"{sent / model_bytes:.3f}",
            f"{counted / 1e6:.2f}" if counted else "",
            *(predicted_text(cell) if counted else "" for _ in predictions),
            f"{sent / counted:.3f}" if counted else "",
        ]
        grid.rows.append(row)
    return grid


def predicted_text(cell: dict[str, Any]) -> str:
    """Return the predicted MB of a cell. Those of older files have none."""
    return f"{cell['predicted_bytes'] / 1e6:.2f}" if cell.get("predicted_bytes") else ""


def memory_grid(study: Study) -> Grid:
    """Make the table of megabytes by kind, each of the rank that holds most of it."""
    grid = Grid("MB per rank", ("variant", "micro-steps", *MEMORY_KINDS))
    for row in study.rows("memory"):
        if row["variant"] != "compute":
            kinds = (f"{row[kind] / 1e6:.1f}" for kind in MEMORY_KINDS)
            grid.rows.append([shown(row["variant"]), str(row["accumulation"]), *kinds])
    return grid


def plot(study: Study, args: argparse.Namespace, path: Path) -> None:
    """Draw step rates over the link's rate, as ratios to a rival, one panel per accumulation and learning rate.

    Variants with replicas are dashed: they have the colour of the variant in one group.
    """
    shown_names = [name for name in args.variants if name != "compute" and (args.rival == "stock" or name != "stock")]
    rival = shown(args.rival)
    title = f"Steps per second beside {rival} (= 1)\n{cluster_text(study.conditions)}"
    places = list(itertools.product(args.accumulation, args.learning_rates))
    figure, axes = panels(len(places), title, sharey=True)
    for axis, (micro_steps, learning_rate) in zip(axes, places, strict=True):
        here = Key("", micro_steps, learning_rate, "")

        def ratio(name: str, rate: str, here: Key = here) -> float | None:
            own, other = (find(study, here._replace(rate=rate, variant=each)) for each in (name, args.rival))
            return other["step_s"] / own["step_s"] if own and other else None

        over_rates(axis, args.rates, shown_names, ratio)
        for line in axis.lines:
            if line.get_label().endswith("replicas"):
                line.set_linestyle("--")
        axis.set_title(title_of(here, args), fontsize=9)
        low, high = axis.get_ylim()
        log_ticks(axis, FINE_TICKS if high < 2.5 * low else (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16))
    axes[0].set_ylabel(f"steps per second ({rival} = 1)")
    save(figure, path)


def check_direction(study: Study, args: argparse.Namespace) -> None:
    """Check the results of the quick form, at the lowest rate.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    rate = min(args.rates, key=speed)
    for micro_steps, learning_rate in itertools.product(args.accumulation, args.learning_rates):
        here = Key(rate, micro_steps, learning_rate, "")
        stock, ours = (find(study, here.of(name)) for name in ("stock", args.variants[-1]))
        claims = {
            f"ZeRO++ is faster than stock at {rate}": ours["step_s"] < stock["step_s"],
            "ZeRO++ sends less than 0.3 of stock's bytes": ours["link_bytes"] < 0.3 * stock["link_bytes"],
            "interface and accounting agree within 3 %": 1 <= ours["link_bytes"] / ours["counted_bytes"] < 1.03,
        }
        require({f"with {micro_steps} micro-steps per step, {claim}": holds for claim, holds in claims.items()})


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    study = study_of(args, __file__, FIXED, run_study)
    intro = INTRO.format(millions=ModelShape(**study.conditions["model"]).num_parameters / 1e6)
    intro += CHECKPOINT if args.pretraining else ""
    report(study, args.title, intro, grids(study, args), lambda study, path: plot(study, args, path))
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
