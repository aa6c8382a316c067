"""Tables, plot and checks of the step-time study (``bench_cluster.py``)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from library.network import bits_per_second, speed
from library.pages import Grid, pyplot
from library.study import Study, require

TITLE = "Step time on an emulated cluster"
INTRO = """A Llama with {millions:.1f} M parameters, trained through Accelerate with bf16 compute and AdamW, on nodes
that are network namespaces of one machine, their links shaped in both directions. `stock` is Accelerate's FSDP2 with
bf16 reduction, `stock-fp32` the same with fp32 reduction, `hsdp` shards within the node and replicates over nodes,
`qwz`, `hpz`, `qgz` and `all` are this package; `compute` runs the same step without any collective. Step times are
medians. The floor is `compute` plus the bytes that crossed the link over its rate. M is the model in bf16; link MB are
those of the busiest node per step, by its interface's counters, headers and acknowledgements included; counted MB are
our own accounting of payload (and, for `qgz`, of FSDP2's gathers as a ring carries them)."""
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "secondary", "partial", "peak")


def num_parameters(model: dict[str, int]) -> int:
    """Return the number of a model's parameters, from the fields of its ``ModelShape``."""
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    block = 4 * hidden**2 + 3 * hidden * model["intermediate_size"] + 2 * hidden
    return layers * block + 2 * model["vocab_size"] * hidden + hidden


def intro(study: Study) -> str:
    """Return the first paragraph of the study's page."""
    return INTRO.format(millions=num_parameters(study.conditions["model"]) / 1e6)


def grids(study: Study, args: argparse.Namespace) -> list[Grid]:
    """Make every table, for the rates, accumulations and variants on the command line."""
    step_times = [rate_grid(study, rate, micro_steps) for rate in args.rates for micro_steps in args.accumulation]
    wanted = (
        row
        for row in study.rows("profiles")
        if row["rate"] in args.rates and row["accumulation"] in args.accumulation and row["variant"] in args.variants
    )
    return [*step_times, memory_grid(study), *map(profile_grid, wanted)]


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
    model_bytes = 2 * num_parameters(study.conditions["model"])
    for cell in study.rows("cells"):
        if cell["rate"] != rate or cell["accumulation"] != micro_steps:
            continue
        floor, counted, sent = floor_seconds(study, cell), cell["counted_bytes"], cell["link_bytes"]
        row = [
            cell["variant"],
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
            kinds = (f"{row.get(kind, 0) / 1e6:.1f}" for kind in MEMORY_KINDS)
            grid.rows.append([row["variant"], str(row["accumulation"]), *kinds])
    return grid


def profile_grid(row: dict[str, Any]) -> Grid:
    """Make the table of a step's seconds by phase, the mean over ranks."""
    total = sum(row["seconds"].values())
    title = f"{row['variant']}, {row['rate']}, {row['accumulation']} micro-steps: where a step goes"
    phases = sorted(row["seconds"].items(), key=lambda item: -item[1])
    rows = [[phase, f"{seconds:.4f}", f"{100 * seconds / total:.1f}"] for phase, seconds in phases]
    return Grid(title, ("phase", "s", "%"), [*rows, ["all, under the profile", f"{total:.4f}", "100"]])


def plot_rates(study: Study, path: Path) -> None:
    """Draw step rates over the link's rate, as ratios to stock FSDP2, one panel per accumulation."""
    plt = pyplot()
    accumulations = sorted({cell["accumulation"] for cell in study.rows("cells")})
    figure, axes = plt.subplots(1, len(accumulations), figsize=(5.5 * len(accumulations), 4), squeeze=False)
    for axis, micro_steps in zip(axes[0], accumulations, strict=True):
        _plot_panel(axis, study, micro_steps)
    axes[0][0].set_ylabel("steps per second, stock FSDP2 = 1")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _plot_panel(axis: Any, study: Study, micro_steps: int) -> None:
    rates = sorted({cell["rate"] for cell in study.rows("cells")}, key=speed)
    for variant in dict.fromkeys(cell["variant"] for cell in study.rows("cells") if cell["variant"] != "compute"):
        cells = [study.find("cells", variant=variant, rate=rate, accumulation=micro_steps) for rate in rates]
        stocks = [study.find("cells", variant="stock", rate=rate, accumulation=micro_steps) for rate in rates]
        points = [(i, s["step_s"] / c["step_s"]) for i, (c, s) in enumerate(zip(cells, stocks, strict=True)) if c and s]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", linewidth=2.5 if variant == "all" else 1.2, label=variant)
    axis.set_xticks(range(len(rates)), rates)
    axis.set_yscale("log", base=2)
    axis.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axis.grid(alpha=0.3)
    axis.set_title(f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''} per step")
    axis.set_xlabel("link between nodes")


def check_direction(study: Study, args: argparse.Namespace) -> None:
    """Check the results of the quick form, at the lowest rate.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    rate = min(args.rates, key=speed)
    for micro_steps in args.accumulation:
        stock, ours = (study.find("cells", variant=v, rate=rate, accumulation=micro_steps) for v in ("stock", "all"))
        claims = {
            f"ZeRO++ is faster than stock at {rate}": ours["step_s"] < stock["step_s"],
            "ZeRO++ sends less than 0.3 of stock's bytes": ours["link_bytes"] < 0.3 * stock["link_bytes"],
            "interface and accounting agree within 3 %": 1 <= ours["link_bytes"] / ours["counted_bytes"] < 1.03,
        }
        require({f"with {micro_steps} micro-steps per step, {claim}": holds for claim, holds in claims.items()})
