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
import sys

import torch
from library.host_time import Side, fake_world, figures, measure
from library.pages import Grid, show


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--width", type=int, default=8, help="elements of a matrix on each rank")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args(argv)


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
        grid = grid_of(measure(args.ranks_per_node, args.units, args.width, args.steps), args.units)
    show([grid], markdown=True)


if __name__ == "__main__":
    main()
