"""Step time, bytes and memory of stock FSDP2, HSDP and ZeRO++ on an emulated cluster with a slow network.

    python scripts/benchmarks/bench_cluster.py                                    the whole study
    python scripts/benchmarks/bench_cluster.py --rates 200mbit --variants stock balanced --accumulation 1
    python scripts/benchmarks/bench_cluster.py --nodes 4 --ranks-per-node 1 --variants stock "balanced, 2 replicas"
    python scripts/benchmarks/bench_cluster.py --pretraining 300 --learning-rates 1e-6 1e-5 --output exact_steps.json

At every rate and accumulation the variants take turns in several rounds, and medians are compared: other programs on the
machine then slow all variants alike, and ratios between them hold where seconds do not. Results go to a JSON file as they
come; the same command continues where it was stopped. With ``--pretraining`` the model and its text are those of
``bench_losses.py``, behind so many steps: how many words ``exact`` sends depends on the model and on the learning rate.

With ``--device cuda`` all ranks compute on the one GPU of a machine and talk over NCCL, through the same links
(library/one_gpu.py). The variants ``deepspeed``, ``deepspeed-hpz`` and ``deepspeed-once`` need DeepSpeed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

from library import one_gpu
from library.cluster import Cluster, Ranks
from library.links import TRAINING, start_all
from library.network import NodeLink, bits_per_second, have_latencies, rate_text, speed
from library.pages import Grid, megabytes, report
from library.plots import cluster_text, log_ticks, over_rates, panels, save
from library.rounds import cell_of, measure_in_turns
from library.study import (
    Key,
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
from library.variants import LEARNING_RATE, VARIANTS, ModelShape, Recipe, shown

RATES = ["unlimited", "10gbit", "1gbit", "200mbit", "50mbit"]
RIVALS = ["stock", "keep", "node", "hsdp"]
"""The ways of FSDP2 without this package."""
SILENT = ["compute, kept", "compute"]
"""Variants without communication. The first computes the model and nothing else; some files have the second alone."""
DEFAULT_VARIANTS = [SILENT[0], *RIVALS, "balanced", "balanced, kept", "half_model", "exact", "paper"]
QUICK = {
    "rates": ["100mbit"],
    "variants": ["compute", "stock", "hsdp", "balanced"],
    "accumulation": [2],
    "steps": 3,
    "hidden_size": 256,
    "layers": 4,
}
FIXED = ("nodes", "ranks_per_node", "batch_size", "seq_len", "pretraining", "model")
CHECKPOINT_RATE = 1e-3
TELLING_S = 0.1
"""The least latency that trips are counted with. A step's own seconds differ by more than a few trips of 10 ms."""
TICKS = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)
FINE_TICKS = (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8)
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "secondary", "partial", "peak")
TITLE = "Step time on an emulated cluster, beside all ways of FSDP2"
INTRO = """A Llama with {millions:.1f} M parameters, trained through Accelerate with bf16 compute and AdamW, on nodes
that are network namespaces of one machine, their links shaped in both directions. *Stock FSDP2* is Accelerate's, with
bf16 reduction unless the name says fp32; *HSDP* shards within the node and replicates over nodes; the others are this
package, under the names of its presets; *no communication* runs the same step without any collective. Step times are
medians. *Keeps weights*: each unit is gathered once per step, and weights and gradients stay in full until the last micro-step.
*Backward in nodes*: `reshard_after_forward` is the number of ranks of a node. *x best FSDP2* is beside the fastest of the ways
that FSDP2 has by itself, *computing* the share of a step that the model takes, by the row without communication. The floor
is that row plus the bytes that crossed the link over its rate. M is the model in
bf16 times (Y-1)/Y for Y nodes. Link MB are those of the busiest node per step, by its interface's counters, headers and
acknowledgements included: the flat rings of stock FSDP2 put more on each link than has to cross (cluster.md says why);
counted MB are our own accounting of payload (and, for qgZ alone, of FSDP2's gathers as a ring carries them)."""
CHECKPOINT = """

The model was trained on the source code of Python's standard library before, and goes on over the same text with a new AdamW at a
constant learning rate."""

DEEPSPEED = """

*DeepSpeed ZeRO-3* has DeepSpeed's default settings, bf16 weights and gradients with fp32 masters, and the same AdamW. It keeps up
to 1e9 weights between a forward and a backward pass, so all of this model. *hpZ* gathers within nodes from the second gather of a
step on. *Reduces once* has hpZ and `engine.coalesce_grad_reduction()`, which keeps gradients of full size until the last
micro-step. DeepSpeed's own engine trains these rows. Its quantized collectives need a GPU, and were not run."""

LATENCY = """

With *+ 1 ms* whatever a node sends arrives at another node 1 ms later, so that a ping takes 2 ms (library/delay_line.py). Also
the links with *+ 0 ms* go through the process that delays, which takes a part of the machine's processors: seconds on this page
are to be compared with each other. *Trips* are the seconds that a latency of
100 ms adds to a step, over 100 ms: for so many messages a step waits, one behind the other."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    others = ", ".join(name for name in VARIANTS if name not in DEFAULT_VARIANTS)
    parser = make_parser(__doc__, "cluster.json")
    add_cluster_flags(parser, RATES, batch_size=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--variants", nargs="+", default=DEFAULT_VARIANTS, choices=VARIANTS, help=f"also: {others}")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8], help="micro-steps per step")
    parser.add_argument("--steps", type=int, default=9, help="timed steps, at most")
    parser.add_argument("--rounds", type=int, default=3, help="in which the variants take turns")
    parser.add_argument("--seconds", type=float, default=45, help="of timed steps; at least 3 steps are made")
    parser.add_argument("--warm-up", type=int, default=1, help="steps that do not count; AdamW's first ones are larger")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[LEARNING_RATE], help="of AdamW")
    parser.add_argument("--pretraining", type=int, default=0, help="steps on text before; 0: random weights and tokens")
    parser.add_argument("--title", default=TITLE, help="of the page")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, all ranks on one GPU")
    parser.add_argument("--traces", type=Path, help="folder for a trace of one step of each variant")
    parser.add_argument("--rival", default="stock", help="the plot's ratios are to this variant")
    return parse(parser, QUICK, argv)


# ---------------------------------------------------------------------------------------------------------- measurement


def tables_of(args: argparse.Namespace) -> list[Key]:
    """Return what the cells of each table have in common, for all tables that the command line asks for."""
    places = itertools.product(args.learning_rates, args.rates, args.accumulation)
    return [{"rate": rate, "accumulation": steps, "learning_rate": learning} for learning, rate, steps in places]


def run_study(args: argparse.Namespace, study: Study) -> None:
    """Measure every learning rate, link, accumulation and variant that the study lacks."""
    keys = [table | {"variant": name} for table in tables_of(args) for name in args.variants]
    if not (missing := study.missing("cells", keys)):
        return
    recipe = Recipe(shape_of(args), args.pretraining, args.batch_size, args.seq_len, CHECKPOINT_RATE)
    with contextlib.ExitStack() as stack:
        environment = rank_environment(threads=1, device=args.device)
        links = {"delayed": have_latencies(args.rates)}
        cluster = stack.enter_context(Cluster(args.nodes, args.ranks_per_node, environment, args.device, **links))
        text: tuple[str | None, str | None] = (None, None)
        if args.pretraining:
            files, checkpoint = stack.enter_context(checkpoint_of(cluster, recipe, args.pretraining))
            text = files.code.train, checkpoint
        for learning_rate, group in itertools.groupby(missing, itemgetter("learning_rate")):
            _measure_all(list(group), (learning_rate, *text), cluster, args, study)


def _measure_all(
    keys: list[Key], training: tuple[Any, ...], cluster: Cluster, args: argparse.Namespace, study: Study
) -> None:
    """Measure the cells of one learning rate, on ranks of all variants that exist side by side."""
    with contextlib.ExitStack() as stack:
        cluster.set_link()
        names, model = (key["variant"] for key in keys), (shape_of(args), args.batch_size, args.seq_len, *training)
        runs = start_all(stack, cluster, names, TRAINING, lambda name: (VARIANTS[name], *model))
        for name, ranks in runs.items():
            _measure_memory(name, ranks, args, study)
        for (rate, accumulation), group in itertools.groupby(keys, itemgetter("rate", "accumulation")):
            in_turns = {key["variant"]: key for key in group}
            print(rate, accumulation, *in_turns, sep=", ", flush=True)
            cluster.set_link(rate)
            chosen = {name: runs[name] for name in in_turns}
            limits = {"steps": args.steps, "seconds": args.seconds, "rounds": args.rounds}
            for name, rounds in measure_in_turns(chosen, accumulation, **limits):
                cell = cell_of(rounds, args.ranks_per_node) | {"loss": rounds[-1][0].loss}
                predicted = runs[name].call("predicted_bytes", accumulation)[0]
                study.add("cells", in_turns[name] | cell | {"predicted_bytes": predicted})
        if args.traces:
            args.traces.mkdir(parents=True, exist_ok=True)
            for ranks in runs.values():  # behind all that is timed
                ranks.call("trace", str(args.traces.resolve()), args.accumulation[-1])


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
    steps = (step_grid(study, table, args) for table in tables_of(args))
    trips = trips_grid(study, args)
    return [*([trips] if trips.rows else []), *steps, memory_grid(study)]


def trips_grid(study: Study, args: argparse.Namespace) -> Grid:
    """Make the table of trips between nodes that a step waits for, from links of one rate and several latencies."""
    rows = []
    for _, group in itertools.groupby(sorted(args.rates, key=speed), bits_per_second):
        links = list(group)
        late, prompt = links[0], links[-1]
        latencies_ms = [NodeLink.parse(link).latency_ms or 0.0 for link in (late, prompt)]
        added_s = 1e-3 * (latencies_ms[0] - latencies_ms[1])
        if added_s < TELLING_S:
            continue
        for name in args.variants:
            row = {"variant": shown(name), "links": f"{rate_text(prompt)}, {rate_text(late)}"}
            for micro_steps in args.accumulation:
                here = {"variant": name, "accumulation": micro_steps, "learning_rate": args.learning_rates[0]}
                cells = [study.find("cells", **here, rate=link) for link in (late, prompt)]
                trips = (cells[0]["step_s"] - cells[1]["step_s"]) / added_s if all(cells) else math.nan
                row[f"with {micro_steps} micro-step{'s' if micro_steps > 1 else ''}"] = f"{trips:.0f}"
            rows.append(row)
    return Grid.of("Trips between nodes, one behind the other, that a step waits for", rows)


def title_of(table: Key, args: argparse.Namespace) -> str:
    """Return what the cells of a table or panel have in common, but for the link."""
    steps = f"{table['accumulation']} micro-step{'s' if table['accumulation'] > 1 else ''} per step"
    return f"{steps}, learning rate {power_text(table['learning_rate'])}" if len(args.learning_rates) > 1 else steps


def power_text(value: float) -> str:
    """Return a learning rate as guides write it: 1e-6, where Python's own form is 1e-06, and 1e-4 for 0.0001."""
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def step_grid(study: Study, table: Key, args: argparse.Namespace) -> Grid:
    """Make one table, with a row per variant.

    The floor is a step without overlap: one without any collective, plus the bytes of the variant over the rate of the link.
    """
    model_bytes, bits = crossing_bytes(study.conditions), bits_per_second(table["rate"])
    has_predictions = any(cell.get("predicted_bytes") for cell in study.rows("cells"))  # older files have none
    silent = (study.find("cells", **table, variant=name) for name in SILENT)
    compute = next(filter(None, silent), None)
    rivals = {"x stock": study.find("cells", **table, variant="stock")}
    if args.rival != "stock":
        rivals[f"x {shown(args.rival)}"] = study.find("cells", **table, variant=args.rival)
    ways = [cell for name in RIVALS if (cell := study.find("cells", **table, variant=name))]
    if len(ways) == len(RIVALS):
        rivals["x best FSDP2"] = min(ways, key=itemgetter("step_s"))
    rows = []
    for cell in study.rows("cells", **table):
        seconds, sent, counted = cell["step_s"], cell["link_bytes"], cell["counted_bytes"]
        row = {"variant": shown(cell["variant"]), "step s": f"{seconds:.3f}"}
        row["min-max"] = f"{min(cell['steps_s']):.2f}-{max(cell['steps_s']):.2f}"
        for header, rival in rivals.items():
            row[header] = f"{rival['step_s'] / seconds:.2f}" if rival else ""
        floor = compute["step_s"] + (8 * sent / bits if bits else 0.0) if compute else None
        row["computing"] = f"{compute['step_s'] / seconds:.0%}" if compute else ""
        row["floor s"], row["x floor"] = (f"{floor:.3f}", f"{seconds / floor:.2f}") if floor else ("", "")
        row |= {"link MB": megabytes(sent), "in M": f"{sent / model_bytes:.3f}", "counted MB": megabytes(counted)}
        if has_predictions:
            row["predicted"] = megabytes(cell.get("predicted_bytes"))
        rows.append(row | {"link/counted": f"{sent / counted:.3f}" if counted else ""})
    return Grid.of(f"{rate_text(table['rate'])}, {title_of(table, args)}", rows)


def memory_grid(study: Study) -> Grid:
    """Make the table of megabytes by kind, each of the rank that holds most of it."""
    rows = [
        {"variant": shown(row["variant"]), "micro-steps": str(row["accumulation"])}
        | {kind: f"{row[kind] / 1e6:.1f}" for kind in MEMORY_KINDS}
        for row in study.rows("memory")
        if row["variant"] not in SILENT
    ]
    return Grid.of("MB per rank", rows)


def plot(study: Study, args: argparse.Namespace, path: Path) -> None:
    """Draw step rates over the link's rate, as ratios to a rival, one panel per accumulation and learning rate."""
    rival = shown(args.rival)
    places = list(itertools.product(args.accumulation, args.learning_rates))
    title = f"Steps per second beside {rival} (= 1)\n{cluster_text(study.conditions)}"
    figure, axes = panels(len(places), title, sharey=True)
    left_out = {*SILENT, "stock"} if args.rival != "stock" else {*SILENT}
    names = [name for name in args.variants if name not in left_out]
    for axis, (micro_steps, learning_rate) in zip(axes, places, strict=True):
        here = {"accumulation": micro_steps, "learning_rate": learning_rate}
        cells = []
        for name, rate in itertools.product(names, args.rates):
            own, other = (study.find("cells", **here, rate=rate, variant=each) for each in (name, args.rival))
            if own and other:
                cells.append(own | {"ratio": other["step_s"] / own["step_s"]})
        over_rates(axis, cells, lambda cell: cell["ratio"])
        axis.set_title(title_of(here, args), fontsize=9)
        low, high = axis.get_ylim()
        log_ticks(axis, FINE_TICKS if high < 2.5 * low else TICKS)
    axes[0].set_ylabel(f"steps per second ({rival} = 1)")
    save(figure, path)


def check_direction(study: Study, args: argparse.Namespace) -> None:
    """End with an error where a result of the quick form has the wrong direction, at the lowest rate."""
    rate = min(args.rates, key=speed)
    for micro_steps, learning_rate in itertools.product(args.accumulation, args.learning_rates):
        here = {"rate": rate, "accumulation": micro_steps, "learning_rate": learning_rate}
        stock, ours = (study.find("cells", **here, variant=name) for name in ("stock", args.variants[-1]))
        claims = {
            f"ZeRO++ is faster than stock at {rate}": ours["step_s"] < stock["step_s"],
            "ZeRO++ sends less than 0.3 of stock's bytes": ours["link_bytes"] < 0.3 * stock["link_bytes"],
            "interface and accounting agree within 3 %": 1 <= ours["link_bytes"] / ours["counted_bytes"] < 1.03,
        }
        require({f"with {micro_steps} micro-steps per step, {claim}": holds for claim, holds in claims.items()})


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    gpu = {"gpu": one_gpu.name()} if args.device == "cuda" else {}
    study = study_of(args, __file__, (*FIXED, *gpu), run_study, **gpu)
    intro = INTRO.format(millions=ModelShape(**study.conditions["model"]).num_parameters / 1e6)
    intro += CHECKPOINT if args.pretraining else ""
    intro += DEEPSPEED if any(VARIANTS[name].deepspeed is not None for name in args.variants) else ""
    intro += LATENCY if have_latencies(args.rates) else ""
    report(study, args.title, intro, grids(study, args), lambda study, path: plot(study, args, path))
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
