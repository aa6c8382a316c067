"""Draw the plot of the README from the results of ``bench_cluster.py``.

    python scripts/benchmarks/plot_readme.py

It measures nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from library.network import rate_text
from library.plots import COLORS, cluster_text, panels, save
from library.study import RESULTS, Study, command_line

LINES = {
    "stock": "stock FSDP2",
    "keep": "FSDP2 that keeps weights",
    "hsdp": "HSDP",
    "balanced": "hf_zeropp, preset balanced",
    "balanced, kept": "the same, which keeps weights",
    "compute, kept": "no communication",
}
"""Variants of the cluster study, and their names in the plot."""
RATES = ("50mbit", "200mbit", "1gbit", "10gbit", "unlimited")
SECONDS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100)


def main() -> None:
    """Draw one panel for each number of micro-steps, on one scale of seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=RESULTS / "cluster.json", help="JSON of bench_cluster.py")
    parser.add_argument("--output", type=Path, default=RESULTS / "readme.png")
    args = parser.parse_args()
    study = Study.from_file(args.study, command_line(__file__))
    what = "Seconds per optimizer step, over the rate of the link between the two nodes"
    title = f"{what}\n{cluster_text(study.conditions)}, gloo, bf16, AdamW"
    figure, axes = panels(2, title, width=4.6, height=3.6, sharey=True)
    for axis, micro_steps in zip(axes, (1, 8), strict=True):
        for name, label in LINES.items():
            cells = [study.find("cells", rate=rate, accumulation=micro_steps, variant=name) for rate in RATES]
            style = ":" if name == "compute, kept" else "-"
            axis.plot([cell["step_s"] for cell in cells], style, color=COLORS[name], marker="o", label=label)
        axis.set_title(f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''} per step")
        axis.set(yscale="log", xlabel="link between nodes")
        axis.set_xticks(range(len(RATES)), map(rate_text, RATES), fontsize=8)
        axis.minorticks_off()
        axis.set_yticks(SECONDS, [f"{value:g}" for value in SECONDS])
    axes[0].set_ylabel("seconds per step")
    save(figure, args.output)


if __name__ == "__main__":
    main()
