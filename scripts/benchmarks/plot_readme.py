"""Draw the plot of the README from the results of ``bench_cluster.py``, and print the figures that the README takes from them.

    python scripts/benchmarks/plot_readme.py

It measures nothing. Links of 100 Mbit/s are left out: other programs ran beside their measurement (scripts/results/cluster.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from library.pages import Grid, show
from library.plots import COLORS, cluster_text, panels, save
from library.study import RESULTS, Study, command_line

LINES = {
    "stock": "stock FSDP2",
    "hsdp": "HSDP",
    "balanced": "hf_zeropp, preset balanced",
    "compute": "no communication",
}
"""Variants of the cluster study, and their names in the plot."""
RATES = ("200mbit", "1gbit", "10gbit", "unlimited")
SHOWN_RATES = ("200 Mbit/s", "1 Gbit/s", "10 Gbit/s", "no limit")
SECONDS = (0.25, 0.5, 1, 2, 5, 10, 20)


def main() -> None:
    """Draw the file beside the study's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=RESULTS / "cluster.json", help="JSON of bench_cluster.py")
    parser.add_argument("--output", type=Path, default=RESULTS / "readme.png")
    args = parser.parse_args()
    study = Study.from_file(args.study, command_line(__file__))
    draw(study, args.output)
    show([grid_of(study, accumulation) for accumulation in (1, 8)])


def seconds_of(study: Study, accumulation: int, name: str) -> list[float]:
    """Return the seconds of a step over ``RATES``."""
    cells = [study.find("cells", rate=rate, accumulation=accumulation, variant=name) for rate in RATES]
    return [cell["step_s"] for cell in cells if cell is not None]


def micro_steps(accumulation: int) -> str:
    """Return how panels and tables are named."""
    return f"{accumulation} micro-step{'s' if accumulation > 1 else ''} per step"


def grid_of(study: Study, accumulation: int) -> Grid:
    """Return the plotted figures, and how many times faster the package is."""
    found = {name: seconds_of(study, accumulation, name) for name in LINES}
    columns = ("link", *LINES.values(), "x stock", "x HSDP")
    rows = []
    for place, rate in enumerate(SHOWN_RATES):
        seconds = {name: values[place] for name, values in found.items()}
        times = [seconds[beside] / seconds["balanced"] for beside in ("stock", "hsdp")]
        rows.append([rate, *(f"{value:.2f}" for value in (*seconds.values(), *times))])
    return Grid(f"seconds per optimizer step, {micro_steps(accumulation)}", columns, rows)


def draw(study: Study, path: Path) -> None:
    """Draw one panel for each number of micro-steps, on one scale of seconds."""
    what = "Seconds per optimizer step, over the rate of the link between the two nodes"
    title = f"{what}\n{cluster_text(study.conditions)}, gloo, bf16, AdamW"
    figure, axes = panels(2, title, width=4.6, height=3.6, sharey=True)
    for axis, accumulation in zip(axes, (1, 8), strict=True):
        for name, label in LINES.items():
            style = ":" if name == "compute" else "-"
            axis.plot(seconds_of(study, accumulation, name), style, color=COLORS[name], marker="o", label=label)
        axis.set(yscale="log", title=micro_steps(accumulation), xlabel="link between nodes")
        axis.set_xticks(range(len(RATES)), SHOWN_RATES, fontsize=8)
        axis.minorticks_off()
        axis.set_yticks(SECONDS, [f"{value:g}" for value in SECONDS])
    axes[0].set_ylabel("seconds per step")
    save(figure, path)


if __name__ == "__main__":
    main()
