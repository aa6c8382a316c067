"""Time the CUDA kernels against a copy on the same device, from 1 MB to 2 GB; `bench_ops.py --device cuda` comes here.

The yardstick is a copy within the device: an operator that reads and writes b bytes is compared with copying b / 2. Both
go through as many buffers as exceed the second-level cache, captured in one CUDA graph: the time of kernels, without
Python's. Rivals (cuda_rivals.py) run from Python over the same number of calls; at small sizes that is part of their time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from cuda_rivals import Missing, dequantize_rivals, quantize_rivals, sum_quantize_rivals
from pages import Grid, write_page
from rich.console import Console
from study import versions

from hf_zeropp import ops
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.ops.frozen_format import FrozenFormat

BLOCKS = {8: 256, 4: 128, 3: 128, 2: 128}
FULL = (8, 4)  # widths that are measured at all sizes, beside rivals
NUM_SOURCES = 4
MEGABYTE = 1 << 20
SIZES = tuple(MEGABYTE << i for i in range(0, 12))  # of the values, in bytes: 1 MB .. 2 GB
SOME_SIZES = SIZES[::5]
CACHE_BYTES = 256 * MEGABYTE  # several times any second-level cache
DECODE_SHAPES = ((4096, 4096), (11008, 4096), (28672, 8192))  # rows, columns
RIVALS = ("eager", "compile", "DeepSpeed", "torchao")
INTRO = (
    "Bytes read and written per second, beside a copy of as many bytes in the same run; and how many times as long as our "
    "kernel the others took."
)


class Case(NamedTuple):
    """An operator at one size. `make()` gives a call on buffers of its own."""

    name: str
    size: int  # bytes, as the table says them
    nbytes: int  # read and written
    make: Callable[[], Callable[[], object]]
    rivals: Callable[[], dict[str, Callable]]


def cases() -> Iterator[Case]:
    for bits in FULL:
        for dtype in (torch.bfloat16, torch.float32):
            for size in SIZES:
                yield from codec_cases(bits, dtype, size)
        for size in SIZES:
            yield from sum_cases(bits, size)
        for shape in DECODE_SHAPES:
            yield from frozen_cases(bits, *shape)
    for bits in BLOCKS:
        for size in SOME_SIZES:
            yield from low_cases(bits, size)
            yield from delta_cases(bits, size)
            yield from feedback_cases(bits, size)


def low_cases(bits: int, size: int) -> Iterator[Case]:
    """What FULL leaves out, without rivals: they have no such codes."""
    if bits in FULL:
        return
    for dtype in (torch.bfloat16, torch.float32):
        yield from (case._replace(rivals=dict) for case in codec_cases(bits, dtype, size))
    yield from (case._replace(rivals=dict) for case in sum_cases(bits, size))


def codec_cases(bits: int, dtype: torch.dtype, size: int) -> Iterator[Case]:
    layout = WireLayout([Segment(size // dtype.itemsize, bits)], BLOCKS[bits])
    nbytes, label = size + layout.nbytes, f"INT{bits} {str(dtype).removeprefix('torch.')}"

    def values() -> torch.Tensor:
        return torch.randn(layout.numel, device="cuda").to(dtype)

    def quantize() -> Callable[[], object]:
        one, wire = values(), torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        return lambda: ops.quantize(one, layout, out=wire)

    def dequantize() -> Callable[[], object]:
        wire, out = ops.quantize(values(), layout), torch.empty(layout.numel, dtype=dtype, device="cuda")
        return lambda: ops.dequantize(wire, layout, dtype=dtype, out=out)

    yield Case(f"quantize {label}", size, nbytes, quantize, lambda: quantize_rivals(values(), layout, bits))
    yield Case(
        f"dequantize {label}",
        size,
        nbytes,
        dequantize,
        lambda: dequantize_rivals(ops.quantize(values(), layout), layout, bits, dtype),
    )


def sum_cases(bits: int, size: int) -> Iterator[Case]:
    """The reduction's steps on fp32 gradients of `size` bytes: four ranks' wires, summed, or summed and sent on."""
    layout = WireLayout([Segment(size // 4, bits)], BLOCKS[bits])

    def wires() -> torch.Tensor:
        one = ops.quantize(torch.randn(layout.numel, device="cuda"), layout)
        return one.repeat(NUM_SOURCES)

    def dequantize_sum() -> Callable[[], object]:
        sources, total = wires(), torch.zeros(1, layout.numel, device="cuda")
        return lambda: ops.dequantize_sum(sources, layout, num_sources=NUM_SOURCES, out=total)

    def dequantize_sum_quantize() -> Callable[[], object]:
        sources, wire = wires(), torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        return lambda: ops.dequantize_sum_quantize(sources, layout, layout, num_sources=NUM_SOURCES, out=wire)

    read = NUM_SOURCES * layout.nbytes
    yield Case(f"dequantize_sum INT{bits}, {NUM_SOURCES} sources", size, read + size, dequantize_sum, dict)
    yield Case(
        f"dequantize_sum_quantize INT{bits}, {NUM_SOURCES} sources",
        size,
        read + layout.nbytes,
        dequantize_sum_quantize,
        lambda: sum_quantize_rivals(wires(), layout, bits, NUM_SOURCES),
    )


def delta_cases(bits: int, size: int) -> Iterator[Case]:
    """Weights that a node holds in bf16, and how they change: encoded from bf16, decoded in place."""
    layout = WireLayout([Segment(size // 2, bits)], BLOCKS[bits])
    base_layout = WireLayout([Segment(size // 2, None)], BLOCKS[bits])

    def values_and_base() -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(layout.numel, device="cuda", dtype=torch.bfloat16)
        return values, ops.quantize(values * 1.01, base_layout)

    def quantize_difference() -> Callable[[], object]:
        values, base = values_and_base()
        wire = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        return lambda: ops.quantize_difference(values, base, base_layout, layout, out=wire)

    def dequantize_update() -> Callable[[], object]:
        values, base = values_and_base()
        wire = ops.quantize_difference(values, base, base_layout, layout)
        return lambda: ops.dequantize_update(wire, layout, base, base_layout, out=base)

    nbytes = 2 * base_layout.nbytes + layout.nbytes
    yield Case(f"quantize_difference INT{bits}, base bf16", size, nbytes, quantize_difference, dict)
    yield Case(f"dequantize_update INT{bits}, base bf16 in place", size, nbytes, dequantize_update, dict)


def feedback_cases(bits: int, size: int) -> Iterator[Case]:
    """An fp32 gradient of `size` bytes encoded for the first hop; rotated, and with what earlier hops left out."""
    layout = WireLayout([Segment(size // 4, bits)], BLOCKS[bits])
    residual_layout = WireLayout([Segment(size // 4, 8)], BLOCKS[bits])

    def gradient_and_wire() -> tuple[torch.Tensor, torch.Tensor]:
        wire = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        return torch.randn(1, layout.numel, device="cuda"), wire

    def quantize_rotated() -> Callable[[], object]:
        gradient, wire = gradient_and_wire()
        return lambda: ops.quantize(gradient, layout, rotate=True, out=wire)

    def feedback(rotate: bool) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            gradient, wire = gradient_and_wire()
            residual = torch.zeros(residual_layout.nbytes, dtype=torch.uint8, device="cuda")
            settings = {"num_sources": 0, "initial": gradient, "rotate": rotate, "out": wire}
            return lambda: ops.quantize_with_feedback(None, layout, layout, residual, residual_layout, **settings)

        return make

    nbytes, name = size + layout.nbytes, f"quantize_with_feedback INT{bits}, of values"
    yield Case(f"quantize INT{bits} float32, rotated", size, nbytes, quantize_rotated, dict)
    nbytes += 2 * residual_layout.nbytes
    yield Case(name, size, nbytes, feedback(rotate=False), dict)
    yield Case(f"{name}, rotated", size, nbytes, feedback(rotate=True), dict)


def frozen_cases(bits: int, rows: int, columns: int) -> Iterator[Case]:
    """Decoding a frozen weight, and multiplying a few rows with it."""
    format, dense = FrozenFormat(bits), rows * columns * 2
    packed = format.nbytes((rows, columns))

    def weight() -> tuple[torch.Tensor, torch.Tensor]:
        return frozen_format.pack(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16), format)

    def unpack() -> Callable[[], object]:
        codes, scales = weight()
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return lambda: frozen_format.unpack(codes, scales, columns, format, torch.bfloat16, out)

    def matmul(num_inputs: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            codes, scales = weight()
            x = torch.randn(num_inputs, columns, device="cuda")  # fp32: nothing but the kernel runs
            return lambda: frozen_format.matmul(x, codes, scales, columns, format)

        return make

    yield Case(f"frozen unpack INT{bits} {rows} x {columns}", packed, packed + dense, unpack, dict)
    for num_inputs in (1, 4):
        name = f"frozen matmul INT{bits} {rows} x {columns}, {num_inputs} rows of x"
        yield Case(name, packed, packed, matmul(num_inputs), dict)


# ---- Timing.


def copier(nbytes: int) -> Callable[[], object]:
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: target.copy_(source)


def num_buffers(nbytes: int) -> int:
    return max(1, min(64, CACHE_BYTES // nbytes))


def graph_of(make: Callable[[], Callable[[], object]], nbytes: int) -> Callable[[], object]:
    """A replay of one call on each of enough buffers."""
    calls = [make() for _ in range(num_buffers(nbytes))]
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    # The default argument keeps the buffers alive.
    return lambda calls=calls: graph.replay()


def seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    return statistics.median([seconds(run) for _ in range(repeats + 2)][2:])


def measure(case: Case, repeats: int) -> dict:
    """Operator and copy take turns."""
    run, copy = graph_of(case.make, case.nbytes), graph_of(lambda: copier(case.nbytes // 2), case.nbytes)
    pairs = [(seconds(copy), seconds(run)) for _ in range(repeats + 2)][2:]
    copy_seconds, run_seconds = (
        statistics.median(times) / num_buffers(case.nbytes) for times in zip(*pairs, strict=True)
    )
    row = {
        "operator": case.name,
        "bytes": case.size,
        "gigabytes_per_second": case.nbytes / run_seconds / 1e9,
        "copy_gigabytes_per_second": case.nbytes / copy_seconds / 1e9,
        "of_copy": copy_seconds / run_seconds,
        "rivals": {},
        "missing": {},
    }
    for name, make in case.rivals().items():
        try:
            row["rivals"][name] = median_seconds(make(), max(3, repeats // 5)) / run_seconds
        except Missing as reason:
            row["missing"][name] = str(reason)
        except torch.cuda.OutOfMemoryError:
            row["missing"][name] = "out of memory"
    return row


# ---- Results.


def conditions(arguments: argparse.Namespace, rows: list[dict]) -> dict:
    properties = torch.cuda.get_device_properties(0)
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "repeats": arguments.repeats,
        "kernels": "compiled"
        if ops.kernel_info().cuda_reason is None
        else f"reference: {ops.kernel_info().cuda_reason}",
        "versions": versions(),
        "left_out": sorted({reason for row in rows for reason in row["missing"].values()}),
    }


def grid_of(rows: list[dict]) -> Grid:
    columns = ("operator", "MB", "GB/s", "copy GB/s", "of copy", *(f"x {name}" for name in RIVALS))
    grid = Grid("CUDA kernels", columns)
    for row in rows:
        rivals = (f"{row['rivals'][name]:.1f}" if name in row["rivals"] else "" for name in RIVALS)
        numbers = (row["gigabytes_per_second"], row["copy_gigabytes_per_second"])
        cells = [f"{row['bytes'] / MEGABYTE:.0f}", *(f"{number:.0f}" for number in numbers), f"{row['of_copy']:.2f}"]
        grid.rows.append([row["operator"], *cells, *rivals])
    return grid


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    for name in dict.fromkeys(row["operator"] for row in rows):
        points = [(row["bytes"] / MEGABYTE, row["of_copy"]) for row in rows if row["operator"] == name]
        if len(points) > len(SOME_SIZES):
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.axhline(0.85, color="grey", linestyle=":")
    axes.set(xscale="log", xlabel="values, MB", ylabel="of the bandwidth of a copy", ylim=(0, 1.15))
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench_ops: --device cuda needs a GPU that PyTorch sees; found none")
    rows = []
    for case in (case for case in cases() if arguments.only in case.name):
        rows.append(measure(case if arguments.baselines else case._replace(rivals=dict), arguments.repeats))
        torch.cuda.empty_cache()
    facts, grid = conditions(arguments, rows), grid_of(rows)
    if arguments.json:
        print(json.dumps({"conditions": facts, "rows": rows}, indent=2))
    else:
        Console(width=130).print(grid.rich())
    if arguments.output:
        picture = arguments.output.with_suffix(".png")
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        plot(rows, picture)
        write_page(arguments.output, "CUDA kernels against a copy", facts, INTRO, [grid], picture)
