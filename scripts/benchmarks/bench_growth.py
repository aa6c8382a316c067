"""How do the costs of the package grow with ranks, units, parameters and nodes, beside stock FSDP2?

    python scripts/benchmarks/bench_growth.py

The host's time of a unit is that of ``bench_host_time.py``, on PyTorch's fake process group, so there may be 512 ranks on nodes
of 8. One size grows at a time. Step times and bytes are those of real ranks on the emulated cluster, one per node, at full
network speed: each node more also divides two cores among more ranks, for both sides alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from library.cluster import Cluster
from library.links import TRAINING, start_all
from library.pages import Grid, report
from library.plots import colors_of, panels, save
from library.rounds import cell_of, measure_in_turns
from library.study import Study, crossing_bytes, make_parser, parse, rank_environment, shape_of, study_of
from library.variants import VARIANTS, shown
from rich.progress import Progress

RANKS_PER_NODE = 8
WIDTH = 8
BASE = {"ranks": 128, "units": 12, "width": WIDTH}
"""The size of the fake job where another size grows. ``width`` is the number of elements of a matrix on each rank."""
GROWS = {"ranks": (16, 32, 64, 128, 256, 512), "units": (4, 12, 36, 72), "width": (8, 64, 512, 4096)}
VARIANTS_OF_NODES = ("stock", "balanced")
SIDES = ("FSDP2", "as on GPUs", "as on CPUs")
TITLE = "How costs grow with ranks, units, parameters and nodes"
INTRO = """The host's time of one gather and one reduction of a unit (all that FSDP2 and this package do, without collectives and
kernels, which a GPU's host only launches): least time of each call, per unit, on PyTorch's fake process group with
nodes of 8 ranks. One size grows, the others stay at 128 ranks, 12 units and 8 matrices of 8 elements on each rank.
Below, step times and bytes of real ranks, one per node, on nodes of an emulated cluster at full network speed, where
two cores compute for all of them."""
QUICK = {"grows": ["units"], "nodes": [2, 3], "steps": 3, "host_steps": 5, "hidden_size": 128, "layers": 2}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "growth.json")
    parser.set_defaults(hidden_size=256, layers=4)
    parser.add_argument("--grows", nargs="*", default=list(GROWS), choices=list(GROWS), help="of the fake job")
    parser.add_argument("--nodes", nargs="*", type=int, default=[2, 3, 4, 6, 8], help="of one rank")
    parser.add_argument("--steps", type=int, default=9, help="timed on real ranks, of each variant")
    parser.add_argument("--host-steps", type=int, default=40, help="on the fake process group")
    parser.add_argument("--host-time-of", type=json.loads, help=argparse.SUPPRESS)
    return parse(parser, QUICK, argv)


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Measure every size that the study lacks."""
    sizes = [BASE | {grown: size} for grown in args.grows for size in GROWS[grown]]
    sizes = [size for size in sizes if study.find("host", **size) is None]
    nodes = [number for number in args.nodes if study.find("cells", nodes=number) is None]
    bar = progress.add_task("", total=len(sizes) + len(nodes))
    for size in sizes:
        progress.update(bar, description=f"host time, {size}")
        if study.find("host", **size) is None:  # the base size is a point of all three
            study.add("host", size | _host_time(size, args.host_steps))
        progress.advance(bar)
    for number in nodes:
        progress.update(bar, description=f"{number} nodes")
        for name, cell in _cells(number, args).items():
            study.add("cells", {"nodes": number, "variant": name, **cell})
        progress.advance(bar)


def _host_time(size: dict[str, int], steps: int) -> dict[str, float]:
    """Return microseconds of a unit by side. A process of its own makes the fake world: there can be one in each."""
    own = [sys.executable, __file__, "--host-time-of", json.dumps(size), "--host-steps", str(steps)]
    done = subprocess.run(own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"host time of {size}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def print_host_time(size: dict[str, int], steps: int) -> None:
    """Measure in this process, and print a line of JSON."""
    import torch
    from library.host_time import fake_world, figures, measure

    torch.set_num_threads(1)
    what = "gather and reduce, whole, without collectives and kernels"
    with fake_world(size["ranks"]):
        sides = measure(RANKS_PER_NODE, size["units"], size["width"], steps)
        print(json.dumps({name: figures(sides[name], size["units"], 0)[what] for name in SIDES}))


def _cells(nodes: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return step times and bytes of the variants on so many nodes of one rank."""
    with Cluster(nodes, 1, rank_environment(threads=1)) as cluster, contextlib.ExitStack() as stack:
        settings = shape_of(args), 1, 64
        runs = start_all(stack, cluster, VARIANTS_OF_NODES, TRAINING, lambda name: (VARIANTS[name], *settings))
        for ranks in runs.values():
            ranks.call("measure", 2, 1)
        found = measure_in_turns(runs, 1, steps=args.steps, seconds=45, rounds=3)
        predicted = {name: ranks.call("predicted_bytes", 1)[0] for name, ranks in runs.items()}
        return {name: cell_of(rounds, 1) | {"predicted_bytes": predicted[name]} for name, rounds in found.items()}


# --------------------------------------------------------------------------------------------------------------- report


def grids(study: Study) -> list[Grid]:
    """Make the tables of host times and of real ranks."""
    host = Grid(
        "Host time of a gather and a reduction of one unit, µs", ("ranks, units, width", *SIDES, "ratio on GPUs")
    )
    for row in study.rows("host"):
        size = ", ".join(str(row[key]) for key in BASE)
        ratio = row["as on GPUs"] / row["FSDP2"]
        host.rows.append([size, *(f"{row[side]:.0f}" for side in SIDES), f"{ratio:.2f}"])
    columns = ("nodes, variant", "step s", "x stock", "link MB", "in M", "counted MB", "predicted MB")
    real = Grid("Steps of real ranks, one per node, at full network speed", columns)
    for cell in study.rows("cells"):
        stock = study.find("cells", nodes=cell["nodes"], variant="stock")
        counted, predicted = (cell[key] and f"{cell[key] / 1e6:.3f}" for key in ("counted_bytes", "predicted_bytes"))
        real.rows.append(
            [
                f"{cell['nodes']}, {shown(cell['variant'])}",
                f"{cell['step_s']:.3f}",
                f"{stock['step_s'] / cell['step_s']:.2f}",
                f"{cell['link_bytes'] / 1e6:.2f}",
                f"{cell['link_bytes'] / _crossing(study, cell['nodes']):.3f}",
                counted or "",
                predicted or "",
            ]
        )
    return [host, real]


def _crossing(study: Study, nodes: int) -> float:
    return crossing_bytes(study.conditions | {"nodes": nodes})


def plot(study: Study, path: Path) -> None:
    """Draw one panel per size that grows."""
    title = f"{TITLE}\nHost time on a fake process group, nodes of 8 ranks; steps on emulated nodes of one rank"
    figure, axes = panels(2, title, rows=2)
    labels = {"ranks": "ranks", "units": "units", "width": "parameters of a unit on a rank"}
    for axis, (grown, label) in zip(axes, labels.items(), strict=False):
        rows = [row for row in study.rows("host") if all(row[key] == BASE[key] for key in BASE if key != grown)]
        rows.sort(key=lambda row: row[grown])
        sizes = [row[grown] * 8 + 5 if grown == "width" else row[grown] for row in rows]
        for side, color in zip(SIDES, ("black", "C0", "C9"), strict=True):
            name = shown("stock") if side == "FSDP2" else f"balanced, host {side}"
            axis.plot(sizes, [row[side] for row in rows], color=color, marker="o", label=name)
        axis.set(xlabel=label, ylabel="host's time of a unit, µs", xscale="log")
        axis.set_xticks(sizes, list(map(str, sizes)), fontsize=8)
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    cells = study.rows("cells")
    for name, color in colors_of(VARIANTS_OF_NODES).items():
        own = [cell for cell in cells if cell["variant"] == name]
        label = f"{shown(name)}, real ranks" if name != "stock" else shown(name)
        axes[3].plot(
            [cell["nodes"] for cell in own], [cell["step_s"] for cell in own], color=color, marker="s", label=label
        )
    axes[3].set(xlabel="nodes of one rank", ylabel="seconds per step")
    axes[3].set_ylim(bottom=0)
    save(figure, path)


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    if args.host_time_of:
        print_host_time(args.host_time_of, args.host_steps)
        return
    study = study_of(args, __file__, ("model",), run_study)
    report(study, TITLE, INTRO, grids(study), plot)


if __name__ == "__main__":
    main()
