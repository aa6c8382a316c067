"""Plots of studies: a title with the conditions, one legend beside the panels, the same colour for a variant in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from library.network import rate_text, speed
from library.study import Key
from library.variants import ModelShape, shown

COLORS = {
    "compute": "lightgray",
    "compute, kept": "lightgray",
    "stock": "black",
    "stock-fp32": "saddlebrown",
    "hsdp": "gray",
    "keep": "darkorange",
    "node": "tan",
    "balanced, kept": "deepskyblue",
    "deepspeed": "darkgreen",
    "deepspeed-hpz": "seagreen",
    "deepspeed-once": "limegreen",
    "hsdp, 2 replicas": "gray",
    "balanced, 2 replicas": "C0",
    "qwz": "gold",
    "hpz": "C8",
    "qgz": "C9",
    "balanced": "C0",
    "half_model": "C1",
    "min_traffic": "C2",
    "exact": "C3",
    "exact, 3-bit gradients": "C4",
    "paper": "C6",
    "pcie": "navy",
    "lora-stock": "dimgray",
    "lora-16": "violet",
    "lora-8": "mediumpurple",
    "lora-4": "indigo",
}
"""Colours of variants that stand in several pictures."""

WAYS = (", publish_weights", ", full_tensor")
"""Ways of syncing behind a variant's name: this package's, and TRL's."""


def pyplot() -> Any:
    """Import ``matplotlib.pyplot`` for writing files, on machines without a display too."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def panels(
    columns: int, title: str, *, rows: int = 1, width: float = 4.5, height: float = 3.8, **options: Any
) -> tuple[Any, list[Any]]:
    """Return a figure with panels in a grid, and the panels, row by row.

    Args:
        columns: panels side by side.
        title: what is shown, and in a second line the conditions: model, ranks, link, micro-steps.
        rows: of panels.
        width: of a panel, in inches. The legend takes more, beside them.
        height: of a panel.
        options: of ``pyplot.subplots``.
    """
    size = width * columns + 2.5, height * rows + 0.5
    figure, axes = pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    figure.suptitle(title, fontsize=10)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, list(axes.flat)


def save(figure: Any, path: Path) -> None:
    """Write a figure with one legend of all panels, at their right, where it covers no line."""
    labels: dict[str, Any] = {}
    for axis in figure.axes:
        if not axis.has_data():
            axis.set_axis_off()  # a grid may have more places than panels
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def model_text(shape: dict[str, int]) -> str:
    """Return how titles name a Llama, from the fields of its ``ModelShape``."""
    return f"Llama, {ModelShape(**shape).num_parameters / 1e6:.1f} M parameters"


def cluster_text(conditions: dict[str, Any]) -> str:
    """Return the part of a title that the studies on the emulated cluster share: model, nodes, ranks, batch."""
    per_node = conditions["ranks_per_node"]
    nodes = f"{conditions['nodes']} nodes x {per_node} rank{'s' if per_node > 1 else ''}"
    tokens = (
        f", {conditions['batch_size']} x {conditions['seq_len']} tokens per rank" if "seq_len" in conditions else ""
    )
    return f"{model_text(conditions['model'])}, {nodes}{tokens}, emulated cluster on CPUs"


def colors_of(names: Iterable[str]) -> dict[str, Any]:
    """Return a colour for each variant: its own of ``COLORS`` in all pictures, or else the next of another palette.

    A case that adds a way of syncing to a variant (see ``WAYS``) has the variant's colour.
    """
    own = {name: COLORS.get(name.removesuffix(WAYS[0]).removesuffix(WAYS[1])) for name in names}
    left = iter(pyplot().cm.Dark2.colors)
    return {name: color or next(left) for name, color in own.items()}


def over_rates(axis: Any, cells: Sequence[Key], value: Callable[[Key], float], by: str = "variant") -> None:
    """Draw a figure over the rate of the link, one line per variant. Those of LoRA are dashed, TRL's way has crosses.

    Args:
        axis: the panel.
        cells: of a study.
        value: of a cell.
        by: the field of a cell that names its line.
    """
    rates = sorted({cell["rate"] for cell in cells}, key=speed)
    for name, color in colors_of(dict.fromkeys(cell[by] for cell in cells)).items():
        points = sorted((rates.index(cell["rate"]), value(cell)) for cell in cells if cell[by] == name)
        style = "--" if name.startswith("lora") or name.endswith("replicas") else "-"
        marker = "x" if name.endswith(WAYS[1]) else "o"
        axis.plot(*zip(*points, strict=True), style, color=color, marker=marker, label=shown(name))
    axis.set_xticks(range(len(rates)), map(rate_text, rates), fontsize=8)
    axis.set_xlabel("link between nodes")


def log_ticks(axis: Any, values: Sequence[float]) -> None:
    """Give a logarithmic axis of ratios ticks at these values, as plain numbers."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    chosen = [value for value in values if low <= value <= high]
    axis.set_yticks(chosen, [f"{value:g}" for value in chosen])
    axis.minorticks_off()
