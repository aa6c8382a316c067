"""Timing of the CUDA kernels beside a copy on the same device, from 1 MB to 2 GB: ``bench_ops.py --device cuda``.

The yardstick is a copy within the device: an operator that reads and writes b bytes is compared with copying b / 2. Both
go through so many buffers that none of a call's data is in the second-level cache, and the calls on all buffers are one
CUDA graph. A replay of it takes the time of the kernels, without that of Python. Operator and copy take turns, medians
are compared, and the ratio is the result: clocks and temperature move both alike.

Rivals (``cuda_rivals.py``) cannot be captured in a graph, so they are called from Python, one call at a time. At small
sizes the time of a call is then part of theirs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from hf_zeropp import ops
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.ops.frozen_format import FrozenFormat
from library.cuda_rivals import Action, Maker, Makers, Missing, dequantize_rivals, quantize_rivals, sum_quantize_rivals
from library.pages import Grid, pyplot, write_page
from library.study import command_line, versions

BLOCKS = {8: 256, 4: 128, 3: 128, 2: 128}  # elements that share a scale, by the bits of a code
FULL = (8, 4)  # bits that are measured at all sizes, beside rivals
NUM_SOURCES = 4
MEGABYTE = 1 << 20
SIZES = tuple(MEGABYTE << i for i in range(0, 12))  # bytes of the values: 1 MB .. 2 GB
SOME_SIZES = SIZES[::5]
CACHE_BYTES = 256 * MEGABYTE  # several times any second-level cache
DECODE_SHAPES = ((4096, 4096), (11008, 4096), (28672, 8192))  # rows, columns
RIVALS = ("eager", "compile", "DeepSpeed", "torchao")
INTRO = (
    "Bytes read and written per second, beside a copy of as many bytes in the same run; and how many times as long as our "
    "kernel the others took."
)


class Case(NamedTuple):
    """An operator at one size.

    Attributes:
        name: in the table.
        size: bytes of the values, for the table.
        nbytes: bytes that a call reads and writes.
        make: returns a call on buffers of its own.
        rivals: returns makers of the rivals' calls.
    """

    name: str
    size: int
    nbytes: int
    make: Maker
    rivals: Callable[[], Makers]


def cases() -> Iterator[Case]:
    """Yield every operator at every size."""
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
    """Yield the codecs and sums of widths that are not in ``FULL``. Rivals have no such codes."""
    if bits in FULL:
        return
    for dtype in (torch.bfloat16, torch.float32):
        yield from (case._replace(rivals=dict) for case in codec_cases(bits, dtype, size))
    yield from (case._replace(rivals=dict) for case in sum_cases(bits, size))


def codec_cases(bits: int, dtype: torch.dtype, size: int) -> Iterator[Case]:
    """Yield encoding and decoding of ``size`` bytes of values."""
    layout = WireLayout([Segment(size // dtype.itemsize, bits)], BLOCKS[bits])
    nbytes, label = size + layout.nbytes, f"INT{bits} {str(dtype).removeprefix('torch.')}"

    def values() -> torch.Tensor:
        return torch.randn(layout.numel, device="cuda").to(dtype)

    def quantize() -> Action:
        one, wire = values(), torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        return lambda: ops.quantize(one, layout, out=wire)

    def dequantize() -> Action:
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
    """Yield the steps of a reduction of ``size`` bytes of fp32 gradients: sum four ranks' wires, or sum and encode."""
    layout = WireLayout([Segment(size // 4, bits)], BLOCKS[bits])

    def wires() -> torch.Tensor:
        one = ops.quantize(torch.randn(layout.numel, device="cuda"), layout)
        return one.repeat(NUM_SOURCES)

    def dequantize_sum() -> Action:
        sources, total = wires(), torch.zeros(1, layout.numel, device="cuda")
        return lambda: ops.dequantize_sum(sources, layout, num_sources=NUM_SOURCES, out=total)

    def dequantize_sum_quantize() -> Action:
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
    """Yield the two ends of a delta: encode the change of ``size`` bytes of bf16 weights, and add it to a copy."""
    layout = WireLayout([Segment(size // 2, bits)], BLOCKS[bits])
    base_layout = WireLayout([Segment(size // 2, None)], BLOCKS[bits])

    def values_and_base() -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(layout.numel, device="cuda", dtype=torch.bfloat16)
        return values, ops.quantize(values * 1.01, base_layout)

    def quantize_difference() -> Action:
        values, base = values_and_base()
        wire = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        return lambda: ops.quantize_difference(values, base, base_layout, layout, out=wire)

    def dequantize_update() -> Action:
        values, base = values_and_base()
        wire = ops.quantize_difference(values, base, base_layout, layout)
        return lambda: ops.dequantize_update(wire, layout, base, base_layout, out=base)

    nbytes = 2 * base_layout.nbytes + layout.nbytes
    yield Case(f"quantize_difference INT{bits}, base bf16", size, nbytes, quantize_difference, dict)
    yield Case(f"dequantize_update INT{bits}, base bf16 in place", size, nbytes, dequantize_update, dict)


def feedback_cases(bits: int, size: int) -> Iterator[Case]:
    """Yield encoding ``size`` bytes of fp32 gradients with rotation, with error feedback, and with both."""
    layout = WireLayout([Segment(size // 4, bits)], BLOCKS[bits])
    residual_layout = WireLayout([Segment(size // 4, 8)], BLOCKS[bits])

    def gradient_and_wire() -> tuple[torch.Tensor, torch.Tensor]:
        wire = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
        return torch.randn(1, layout.numel, device="cuda"), wire

    def quantize_rotated() -> Action:
        gradient, wire = gradient_and_wire()
        return lambda: ops.quantize(gradient, layout, rotate=True, out=wire)

    def feedback(rotate: bool) -> Maker:
        def make() -> Action:
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
    """Yield decoding of a frozen weight, and its product with a few rows of activations."""
    format, dense = FrozenFormat(bits), rows * columns * 2
    packed = format.nbytes((rows, columns))

    def weight() -> tuple[torch.Tensor, torch.Tensor]:
        return frozen_format.pack(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16), format)

    def unpack() -> Action:
        codes, scales = weight()
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return lambda: frozen_format.unpack(codes, scales, columns, format, torch.bfloat16, out)

    def matmul(num_inputs: int) -> Maker:
        def make() -> Action:
            codes, scales = weight()
            x = torch.randn(num_inputs, columns, device="cuda", dtype=torch.bfloat16)
            return lambda: frozen_format.matmul(x, codes, scales, columns, format)

        return make

    yield Case(f"frozen unpack INT{bits} {rows} x {columns}", packed, packed + dense, unpack, dict)
    for num_inputs in (1, 8, 32):
        name = f"frozen matmul INT{bits} {rows} x {columns}, {num_inputs} rows of x"
        yield Case(name, packed, packed, matmul(num_inputs), dict)


# ---- Timing.


def copier(nbytes: int) -> Action:
    """Return a call that copies ``nbytes`` bytes between buffers of its own."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: target.copy_(source)


def num_buffers(nbytes: int) -> int:
    """Return how many calls of ``nbytes`` bytes push each other's data out of the cache."""
    return max(1, min(64, CACHE_BYTES // nbytes))


def graph_of(make: Maker, nbytes: int) -> Action:
    """Capture ``num_buffers(nbytes)`` calls in a CUDA graph, and return its replay."""
    calls = [make() for _ in range(num_buffers(nbytes))]
    for call in calls:
        call()  # a first call may allocate or load code, which cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    # The graph holds the addresses of the buffers; the default argument keeps the buffers themselves.
    return lambda calls=calls: graph.replay()


def seconds(run: Action) -> float:
    """Return the time on the device from the start of ``run`` to its end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def median_seconds(run: Action, repeats: int) -> float:
    """Return the median over ``repeats`` calls, after two that do not count."""
    return statistics.median([seconds(run) for _ in range(repeats + 2)][2:])


def measure(case: Case, repeats: int) -> dict:
    """Time an operator and a copy in turns, then its rivals, and return a row of the table."""
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
    """Return device, versions, and the reasons why rivals are missing."""
    properties, reason = torch.cuda.get_device_properties(0), ops.kernel_info().cuda_reason
    return {
        "command": command_line("bench_ops.py"),
        "device": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "repeats": arguments.repeats,
        "kernels": "compiled" if reason is None else f"reference: {reason}",
        "versions": versions(),
        "left_out": sorted({reason for row in rows for reason in row["missing"].values()}),
    }


def grid_of(rows: list[dict]) -> Grid:
    """Make the table of all operators."""
    columns = ("operator", "MB", "GB/s", "copy GB/s", "of copy", *(f"x {name}" for name in RIVALS))
    grid = Grid("CUDA kernels", columns)
    for row in rows:
        rivals = (f"{row['rivals'][name]:.1f}" if name in row["rivals"] else "" for name in RIVALS)
        numbers = (row["gigabytes_per_second"], row["copy_gigabytes_per_second"])
        cells = [f"{row['bytes'] / MEGABYTE:.0f}", *(f"{number:.0f}" for number in numbers), f"{row['of_copy']:.2f}"]
        grid.rows.append([row["operator"], *cells, *rivals])
    return grid


def plot(rows: list[dict], path: Path) -> None:
    """Draw the fraction of a copy's bandwidth over the size, for the operators that were measured at all sizes."""
    figure, axes = pyplot().subplots(figsize=(9, 5.5), layout="constrained")
    for name in dict.fromkeys(row["operator"] for row in rows):
        points = [(row["bytes"] / MEGABYTE, row["of_copy"]) for row in rows if row["operator"] == name]
        if len(points) > len(SOME_SIZES):
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.axhline(0.85, color="grey", linestyle=":")
    axes.set(xscale="log", xlabel="values, MB", ylabel="of the bandwidth of a copy", ylim=(0, 1.15))
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)


def run(arguments: argparse.Namespace) -> None:
    """Measure all operators, and show or write the results.

    Args:
        arguments: the command line of ``bench_ops.py``.

    Raises:
        SystemExit: PyTorch sees no GPU.
    """
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
