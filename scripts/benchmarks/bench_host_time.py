"""How long is the host busy with the gather and the reduction of a unit, beside stock FSDP2?

    python scripts/benchmarks/bench_host_time.py

Stock FSDP2 and ZeRO++ train the same model in one process, on PyTorch's fake process group: 16 nodes of 8 ranks, of which only
rank 0 exists. Units have 13 parameters of a few elements on each rank. Steps of the sides take turns. Nothing of what the host
does is left out or replaced.

The comm object is what FSDP2 calls in place of a collective. "Whole" is all that FSDP2 and ZeRO++ do for a gather or a reduction,
from a unit's shards to the memory where its weights arrive, and from its gradients to ``.grad``. Either is also given without
collectives, which the fake group carries out as a loop over ranks, and without the kernels of ZeRO++: on a GPU the host
launches both. FSDP2's own copies are in "whole", on both sides.

Each call of a step is compared with the same call in all other steps. The table adds up the least time of each call, which other
work on the machine does not change, and the medians. Per unit: a gather is the mean of the one for the forward pass, which
crosses nodes, and the one for the backward pass, which does not; both sides make two.
"""

import argparse
import gc
import sys

import torch
from library.host_time import (
    AGREEMENT,
    GATHER,
    GATHER_COMM,
    REDUCE,
    REDUCE_COMM,
    STEP,
    HostClock,
    Side,
    fake_world,
)
from library.pages import Grid, show

# On GPUs FSDP2's streams overlap reductions with compute, and this package starts nothing ahead: `overlap` is off.
SETTINGS = {
    "as on GPUs": {"overlap": False, "qwz_intra_bits": None, "qgz_intra_bits": None},
    "as on GPUs, INT8 within nodes": {"overlap": False},
    "as on CPUs": {"overlap": True},
}
GATHERS_PER_STEP = 2


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--width", type=int, default=8, help="elements of a matrix on each rank")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, Side]:
    """Run the steps of all sides in turns, and return the sides."""
    clock = HostClock()
    clock.wrap_all()
    common = {"ranks_per_node": args.ranks_per_node, "shared_memory": False}
    sides = {"FSDP2": Side(args.units, None, clock, args.width)}
    for name, settings in SETTINGS.items():
        sides[name] = Side(args.units, common | settings, clock, args.width)
    gc.disable()  # it would run in one side's calls for what the other has left
    for step in range(args.steps + 3):
        for side in sides.values():
            side.step(counts=step >= 3)
        gc.collect()
    return sides


def figures(side: Side, num_units: int, kind: int) -> dict[str, float]:
    """Return microseconds per unit by what they are of. ``kind`` is 0 for the least and 1 for the median."""

    def per_unit(category: str, *, launched: bool = True, times: int = 1) -> float:
        return side.microseconds(category, launched=launched)[kind] / (num_units * times)

    found = {}
    for part, gather, reduce in (("comm object", GATHER_COMM, REDUCE_COMM), ("whole", GATHER, REDUCE)):
        for launched, suffix in ((True, ""), (False, ", without collectives and kernels")):
            gathers = per_unit(gather, launched=launched, times=GATHERS_PER_STEP)
            reduces = per_unit(reduce, launched=launched)
            rows = {"gather": gathers, "reduce": reduces, "gather and reduce": gathers + reduces}
            found |= {f"{what}, {part}{suffix}": value for what, value in rows.items()}
    found["agreement, and the cross hops that it starts"] = per_unit(AGREEMENT) if side.has(AGREEMENT) else 0.0
    found["forward and backward pass"] = per_unit(STEP)
    return found


def grid_of(sides: dict[str, Side], num_units: int) -> Grid:
    """Return the table."""
    columns = ["host time per unit, µs"]
    for name in sides:
        columns += [name, "median"] + (["ratio"] if name != "FSDP2" else [])
    grid = Grid("Host time of one unit, least and median", columns)
    least, median = ({name: figures(side, num_units, kind) for name, side in sides.items()} for kind in (0, 1))
    for title, stock in least["FSDP2"].items():
        row = [title]
        for name in sides:
            row += [f"{least[name][title]:.0f}", f"{median[name][title]:.0f}"]
            row += [f"{least[name][title] / stock:.2f}" if stock >= 10 else ""] if name != "FSDP2" else []
        grid.rows.append(row)
    return grid


def main() -> None:
    """Measure, and print the table for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    torch.set_num_threads(1)  # a hand-over to another thread would cost more than the kernels
    with fake_world(args.nodes * args.ranks_per_node):
        grid = grid_of(measure(args), args.units)
    show([grid], markdown=True)


if __name__ == "__main__":
    main()
