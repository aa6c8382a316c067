"""Time the operators of ``hf_zeropp.ops`` beside a copy of as many bytes, eager PyTorch and ``torch.compile``.

    python scripts/benchmarks/bench_ops.py --threads 1 --numel 16777216
    python scripts/benchmarks/bench_ops.py --only "dequantize_update INT4"
    python scripts/benchmarks/bench_ops.py --only linear
    python scripts/benchmarks/bench_ops.py --device cuda --output scripts/results/ops_cuda.md
    python scripts/benchmarks/bench_ops.py --device cuda --megabytes 16 1024 --alone             a minute

The yardstick is a copy: an operator that reads and writes b bytes is compared with moving b / 2 bytes from one buffer to
another, on the same device. Products with frozen weights have dense ones in the rows beside them.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from library.op_cases import (
    BLOCKS,
    DENSITIES,
    FEW_INPUTS,
    Case,
    change_cases,
    codec_cases,
    delta_cases,
    dense_case,
    frozen_cases,
    linear_cases,
    sum_cases,
    wire_cases,
)
from library.op_clocks import Clock, CpuClock, CudaClock, median_seconds
from library.pages import Grid, show, write_page
from library.plots import panels, save
from library.study import command_line, parse, versions

from hf_zeropp import ops

FULL = (8, 4)  # bits that are measured at all sizes, on a GPU
TOKENS = (1, 4, 128, 512, 2048)  # in a call of a linear layer: of generation, and of prompts or training
MEGABYTE = 1 << 20
SIZES = tuple(1 << i for i in range(0, 12))  # megabytes of values: 1 MB .. 2 GB
DECODE_SHAPES = ((4096, 4096), (11008, 4096), (28672, 8192))  # rows, columns
INTRO = (
    "Bytes read and written per second, beside a copy of as many bytes in the same run; and how many times as long as our "
    "kernel PyTorch code took."
)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of one slice, on the CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--megabytes", type=int, nargs="+", default=SIZES, help="of values, on a GPU")
    parser.add_argument("--alone", action="store_true", help="leave out eager and compiled PyTorch, which take minutes")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure operators whose line in the table has this")
    parser.add_argument("--output", type=Path, help="with --device cuda: a Markdown page, and a plot beside it")
    return parse(parser, {"numel": 1 << 16, "repeats": 2}, argv)


def cpu_cases(numel: int) -> Iterator[Case]:
    """Yield every operator at one size."""
    for bits in BLOCKS:
        yield from wire_cases(bits, numel, "cpu")
    for density in DENSITIES:
        yield from change_cases(density, numel, "cpu")
    for bits, tokens in itertools.product(FULL, TOKENS):
        yield from linear_cases(bits, tokens, math.isqrt(numel), "cpu")


def cuda_cases(sizes: Sequence[int]) -> Iterator[Case]:
    """Yield the operators of the default settings at every size, and all at the middle one. Sizes are in megabytes."""
    for bits in FULL:
        for size in sizes:
            for dtype in (torch.bfloat16, torch.float32):
                yield from codec_cases(bits, dtype, size * MEGABYTE // dtype.itemsize, "cuda")
            yield from sum_cases(bits, size * MEGABYTE // 4, "cuda")
    for shape, num_inputs in itertools.product(DECODE_SHAPES, FEW_INPUTS):
        yield dense_case(*shape, num_inputs, "cuda")
    for bits, shape in itertools.product(FULL, DECODE_SHAPES):
        yield from frozen_cases(bits, *shape, "cuda")
    middle = sizes[len(sizes) // 2] * MEGABYTE
    for bits in BLOCKS:
        yield from (delta_cases if bits in FULL else wire_cases)(bits, middle // 4, "cuda")
    for density in DENSITIES:
        yield from change_cases(density, middle // 4, "cuda")


def measure(case: Case, clock: Clock, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time an operator, the copy and the PyTorch code, and return a row of the table."""
    timing = clock.beside_copy(case, arguments.repeats)
    row = {"operator": case.name, "bytes": case.size, "moved": case.nbytes, **timing._asdict()}
    if case.eager is not None and not arguments.alone:
        eager = case.eager()
        row["eager"] = median_seconds(clock, eager, repeats=3) / timing.seconds
        if case.can_compile:
            torch.compiler.reset()  # otherwise the recompile limit makes later cases run uncompiled
            row["compile"] = median_seconds(clock, torch.compile(eager), repeats=7) / timing.seconds
    return row


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, the versions and the settings under which the rows were measured."""
    found = {"command": command_line(__file__), "versions": versions(), "date": datetime.date.today().isoformat()}
    if arguments.device == "cpu":
        settings = {"threads": arguments.threads, "numel": arguments.numel}
        return found | settings | {"processor": processor(), "kernels": ops.kernel_info().cpu}
    properties, reason = torch.cuda.get_device_properties(0), ops.kernel_info().cuda_reason
    return found | {
        "device": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "cuda": torch.version.cuda,
        "kernels": "compiled" if reason is None else f"reference: {reason}",
    }


def processor() -> str:
    """Return the name, family and model of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line)
    except OSError:
        return platform.processor()
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    return f"{fields.get('model name')}, family {fields.get('cpu family')}, model {fields.get('model')}"


def grid_of(rows: list[dict[str, Any]], title: str) -> Grid:
    """Make the table of all operators."""
    cells = [
        {
            "operator": row["operator"],
            "MB": f"{row['bytes'] / MEGABYTE:.0f}",
            "ms": f"{1e3 * row['seconds']:.3f}",
            "GB/s": f"{row['moved'] / row['seconds'] / 1e9:.1f}",
            "copy GB/s": f"{row['moved'] / row['copy_seconds'] / 1e9:.1f}",
            "of copy": f"{row['copy_seconds'] / row['seconds']:.2f}",
            "x eager": f"{row['eager']:.1f}" if "eager" in row else "",
            "x compile": f"{row['compile']:.1f}" if "compile" in row else "",
        }
        for row in rows
    ]
    return Grid.of(title, cells)


def plot(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    """Draw the fraction of a copy's bandwidth over the size, for the operators that were measured at all sizes."""
    figure, (axis,) = panels(1, f"Operators beside a copy within the device\n{device}", width=7)
    colors: dict[str, str] = {}
    for name in dict.fromkeys(row["operator"] for row in rows):
        points = [
            (row["bytes"] / MEGABYTE, row["copy_seconds"] / row["seconds"]) for row in rows if row["operator"] == name
        ]
        if len(points) > 1:
            # One color for an operator, whatever its width.
            colors.setdefault(name.replace("INT4", "INT8"), f"C{len(colors)}")
            style = {"color": colors[name.replace("INT4", "INT8")], "linestyle": "--" if "INT4" in name else "-"}
            axis.plot(*zip(*points, strict=True), marker=".", label=name, **style)
    axis.set(xscale="log", xlabel="values, MB", ylabel="of the bandwidth of a copy", ylim=(0, None))
    save(figure, path)


def main() -> None:
    """Time the operators of the command line, and show them.

    Raises:
        SystemExit: PyTorch sees no GPU where one was asked for.
    """
    arguments = parse_args(sys.argv[1:])
    is_cuda = arguments.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise SystemExit("bench_ops: --device cuda needs a GPU that PyTorch sees; found none")
    torch.set_num_threads(arguments.threads)
    clock: Clock = CudaClock() if is_cuda else CpuClock(arguments.threads)
    rows = []
    for case in cuda_cases(arguments.megabytes) if is_cuda else cpu_cases(arguments.numel):
        if arguments.only in case.name:
            rows.append(measure(case, clock, arguments))
            row = rows[-1]  # shown as soon as it is there: all of them take minutes
            print(f"{row['operator']}, {row['bytes'] / MEGABYTE:.0f} MB: {1e3 * row['seconds']:.3f} ms", flush=True)
        if is_cuda:
            torch.cuda.empty_cache()
    facts = conditions(arguments)
    grid = grid_of(rows, f"operators against a copy, on {arguments.device}")
    show([grid], ", ".join(f"{key} {value}" for key, value in facts.items()))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        plot(rows, facts.get("device", facts.get("processor", "")), arguments.output.with_suffix(".png"))
        write_page(arguments.output, f"Operators on a {'GPU' if is_cuda else 'CPU'}", facts, INTRO, [grid])


if __name__ == "__main__":
    main()
