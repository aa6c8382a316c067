"""Time the operators of ``hf_zeropp.ops`` beside a copy of as many bytes, eager PyTorch and ``torch.compile``.

    python scripts/benchmarks/bench_ops.py --threads 1 --numel 16777216
    python scripts/benchmarks/bench_ops.py --only "dequantize_update INT4"
    python scripts/benchmarks/bench_ops.py --device cuda --output scripts/results/ops_cuda.md

The yardstick is a copy: an operator that reads and writes b bytes is compared with moving b / 2 bytes from one buffer to
another. Copy and operator take turns within one loop, so that both meet the same machine; before each, the caches are
filled with other data. Medians are compared, and the result is their ratio, which holds where seconds do not. Outputs go
into buffers that exist already, as in training. ``library/cuda_op_timing.py`` does the same on a GPU.
"""

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from hf_zeropp import ops
from hf_zeropp.ops import changes_format, changes_reference, reference, rounding
from hf_zeropp.ops.format import Segment, WireLayout

BLOCKS = {8: 256, 4: 128, 3: 128, 2: 128}  # elements that share a scale, by the bits of a code
DENSITIES = {
    0.005: 0.12,
    0.01: 0.12,
    0.05: 0.17,
    0.1: 0.2,
    0.28: 0.23,
}  # of changed words: those that move by more than one unit
NUM_SOURCES = 4
OTHER_BYTES = 128 << 20
"""Bytes that are written before every measurement: more than the part of the last-level cache that one thread can use."""


class Case(NamedTuple):
    """An operator with its buffers.

    Attributes:
        name: in the table.
        nbytes: bytes that a call reads and writes.
        run: calls the operator.
        reference: calls the PyTorch code that defines it.
        compiled: calls the same code after ``torch.compile``; None where it is not timed.
    """

    name: str
    nbytes: int
    run: Callable[[], object]
    reference: Callable[[], object]
    compiled: Callable[[], object] | None


class Timing(NamedTuple):
    """Median seconds of an operator and of the copy beside it."""

    seconds: float
    copy_seconds: float


def main() -> None:
    """Time the operators of the command line, and show them."""
    arguments = parse_args(sys.argv[1:])
    if arguments.device == "cuda":
        from library import cuda_op_timing

        cuda_op_timing.run(arguments)
        return
    torch.set_num_threads(arguments.threads)
    families = [*(lambda bits=bits: cases(bits, arguments.numel) for bits in BLOCKS)]
    families += [lambda density=density: change_cases(density, arguments.numel) for density in DENSITIES]
    families.append(lambda: rounding_cases(arguments.numel))
    rows = []
    for family in families:
        for case in family():
            if arguments.only in case.name:
                rows.append(measure(case, arguments))
    report = {"conditions": conditions(arguments), "rows": rows}
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of one slice, on the CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument(
        "--baselines", action=argparse.BooleanOptionalAction, default=True, help="time PyTorch code too"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="measure operators whose line in the table has this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="with --device cuda: a Markdown page, and a plot beside it")
    return parser.parse_args(argv)


def cases(bits: int, numel: int) -> list[Case]:
    """Return every operator, for one width of codes and slices of ``numel`` elements."""
    layout = WireLayout([Segment(numel, bits)], BLOCKS[bits])
    return [
        *(case for dtype in (torch.float32, torch.bfloat16) for case in codec_cases(layout, bits, dtype)),
        *sum_cases(layout, bits),
        *delta_cases(layout, bits),
        *feedback_cases(layout, bits),
    ]


def codec_cases(layout: WireLayout, bits: int, dtype: torch.dtype) -> list[Case]:
    """Return encoding and decoding of a slice."""
    values = torch.randn(layout.numel).to(dtype)
    wire, output = ops.quantize(values, layout), torch.empty_like(values)
    nbytes, label = values.nbytes + wire.nbytes, f"INT{bits} {str(dtype).removeprefix('torch.')}"
    torch.compiler.reset()  # otherwise the recompile limit makes later cases run uncompiled
    compiled_quantize, compiled_dequantize = torch.compile(reference.quantize), torch.compile(reference.dequantize)
    return [
        Case(
            f"quantize {label}",
            nbytes,
            lambda: ops.quantize(values, layout, out=wire),
            lambda: reference.quantize(values, layout),
            lambda: compiled_quantize(values, layout),
        ),
        Case(
            f"quantize {label}, rotated",
            nbytes,
            lambda: ops.quantize(values, layout, rotate=True, out=wire),
            lambda: reference.quantize(values, layout, rotate=True),
            None,
        ),
        Case(
            f"dequantize {label}",
            nbytes,
            lambda: ops.dequantize(wire, layout, dtype=dtype, out=output),
            lambda: reference.dequantize(wire, layout, dtype),
            lambda: compiled_dequantize(wire, layout, dtype),
        ),
    ]


def sum_cases(layout: WireLayout, bits: int) -> list[Case]:
    """Return the steps of a reduction that decode: sum four ranks' wires, add the sum to another, or encode it."""
    wires = ops.quantize(torch.randn(NUM_SOURCES, layout.numel), layout)
    total = torch.zeros(1, layout.numel)
    wire = torch.empty(layout.nbytes, dtype=torch.uint8)
    n = NUM_SOURCES
    return [
        Case(
            f"dequantize_sum INT{bits}, {n} sources",
            wires.nbytes + total.nbytes,
            lambda: ops.dequantize_sum(wires, layout, num_sources=n, out=total),
            lambda: reference.dequantize_sum(wires, layout, n),
            None,
        ),
        Case(
            f"dequantize_sum INT{bits}, {n} sources, accumulated",
            wires.nbytes + 2 * total.nbytes,
            lambda: ops.dequantize_sum(wires, layout, num_sources=n, initial=total, scale=0.5, out=total),
            lambda: reference.dequantize_sum(wires, layout, n, total, 0.5),
            None,
        ),
        Case(
            f"dequantize_sum_quantize INT{bits}, {n} sources",
            wires.nbytes + wire.nbytes,
            lambda: ops.dequantize_sum_quantize(wires, layout, layout, num_sources=n, out=wire),
            lambda: reference.dequantize_sum_quantize(wires, layout, layout, n),
            None,
        ),
    ]


def rounding_cases(numel: int) -> list[Case]:
    """Return the rounding of partial sums to bf16, at random."""
    sums, rounded = torch.randn(numel), torch.empty(numel, dtype=torch.bfloat16)
    return [
        Case(
            "round_stochastic",
            sums.nbytes + rounded.nbytes,
            lambda: ops.round_stochastic(sums, 7, out=rounded),
            lambda: rounding.reference(sums, 7),
            None,
        )
    ]


def delta_cases(layout: WireLayout, bits: int) -> list[Case]:
    """Return the two ends of a delta: encode the change of fp32 masters, and add it to a bf16 copy of the weights."""
    base_layout = WireLayout([Segment(layout.numel, None)], layout.block)
    values = torch.randn(layout.numel)
    base = ops.quantize(values + 0.01 * torch.randn(layout.numel), base_layout)
    wire = ops.quantize_difference(values, base, base_layout, layout)
    return [
        Case(
            f"quantize_difference INT{bits}, base bf16",
            values.nbytes + base.nbytes + wire.nbytes,
            lambda: ops.quantize_difference(values, base, base_layout, layout, out=wire),
            lambda: reference.quantize_difference(values, base, base_layout, layout),
            None,
        ),
        Case(
            f"dequantize_update INT{bits}, base bf16 in place",
            wire.nbytes + 2 * base.nbytes,
            lambda: ops.dequantize_update(wire, layout, base, base_layout, out=base),
            lambda: reference.dequantize_update(wire, layout, base, base_layout),
            None,
        ),
    ]


def feedback_cases(layout: WireLayout, bits: int) -> list[Case]:
    """Return the encodings of a reduction with error feedback: of a gradient, and of the sum of four ranks' wires."""
    residual_layout = WireLayout([Segment(layout.numel, 8)], layout.block)
    residual = torch.zeros(residual_layout.nbytes, dtype=torch.uint8)
    gradient = torch.randn(1, layout.numel)
    wires = ops.quantize(torch.randn(NUM_SOURCES, layout.numel), layout)
    wire = torch.empty(layout.nbytes, dtype=torch.uint8)

    def case(name: str, source: torch.Tensor, arguments: tuple) -> Case:
        # The arguments are the reference's: wire, three layouts, number of sources, initial, rotate, decay, rescale.
        return Case(
            f"quantize_with_feedback INT{bits}, {name}",
            source.nbytes + 2 * residual.nbytes + wire.nbytes,
            lambda: torch.ops.zeropp.quantize_with_feedback_out(*with_specs(arguments), residual, wire),
            lambda: reference.quantize_with_feedback(*arguments, residual),
            None,
        )

    layouts = (layout, layout, residual_layout)
    return [
        case("of values", gradient, (None, *layouts, 0, gradient, False, 1.0, 1.0)),
        case("of values, rotated", gradient, (None, *layouts, 0, gradient, True, 1.0, 1.0)),
        case(f"{NUM_SOURCES} sources", wires, (wires, *layouts, NUM_SOURCES, None, False, 1.0, 1.0)),
    ]


def change_cases(density: float, numel: int) -> list[Case]:
    """Return the two ends of the wire of changed words. The bytes are those of the two shards that a memcpy would move."""
    old = torch.randn(numel).mul_(0.02).bfloat16()
    far = torch.where(torch.rand(numel) < DENSITIES[density], torch.randint(2, 12, (numel,)), 1)
    step = far * (torch.randint(0, 2, (numel,)) * 2 - 1) * (torch.rand(numel) < density)
    new = (old.view(torch.int16) + step.to(torch.int16)).view(torch.bfloat16)
    buffers = changes_format.changes_buffers(old.nbytes, 1, old.device)
    sizes, wire = ops.encode_changes(new, old, out=buffers)
    offsets, base, old_bytes, new_bytes = torch.zeros_like(sizes), old.clone(), *map(as_bytes, (old, new))
    label = f"{density:.1%} of words, {int(sizes[0]) / int((step != 0).sum()):.2f} B each"
    # ``base`` moves on with every call. That takes as long as the first time, since steps are added modulo 2^16.
    return [
        Case(
            f"encode_changes, {label}",
            2 * old.nbytes,
            lambda: ops.encode_changes(new, old, out=buffers),
            lambda: changes_reference.encode_changes(new_bytes, old_bytes, 1),
            None,
        ),
        Case(
            f"apply_changes, {label}",
            2 * old.nbytes,
            lambda: ops.apply_changes(wire, sizes, base, offsets),
            lambda: changes_reference.apply_changes(wire.view(-1), offsets, sizes, as_bytes(base)),
            None,
        ),
    ]


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat."""
    return words.view(torch.uint8)


def with_specs(arguments: tuple) -> list:
    """Return the arguments with layouts in the form in which registered operators take them."""
    return [argument.spec if isinstance(argument, WireLayout) else argument for argument in arguments]


def measure(case: Case, arguments: argparse.Namespace) -> dict:
    """Time an operator, the copy and the PyTorch code, and return a row of the table."""
    timing = interleaved(case.run, copier(case.nbytes // 2, arguments), arguments)
    row = {
        "operator": case.name,
        "milliseconds": 1e3 * timing.seconds,
        "gigabytes_per_second": case.nbytes / timing.seconds / 1e9,
        "copy_gigabytes_per_second": case.nbytes / timing.copy_seconds / 1e9,
        "of_copy": timing.copy_seconds / timing.seconds,
    }
    if arguments.baselines:
        row["eager"] = median_seconds(case.reference, repeats=3) / timing.seconds
        if case.compiled:
            row["compile"] = median_seconds(case.compiled, repeats=7) / timing.seconds
    return row


def copier(nbytes: int, arguments: argparse.Namespace) -> Callable[[], object]:
    """Return a call that copies ``nbytes`` bytes: with C's ``memmove`` on one thread, with PyTorch on several."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    if arguments.threads == 1:
        # ``memmove`` gets addresses only; the default arguments keep the tensors.
        return lambda source=source, target=target: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
    return lambda: target.copy_(source)


def interleaved(run: Callable, copy: Callable, arguments: argparse.Namespace) -> Timing:
    """Time an operator and a copy in turns, each with nothing of its data in a cache."""
    other = torch.ones(OTHER_BYTES, dtype=torch.uint8)

    def cold_seconds(function: Callable) -> float:
        other.add_(1)  # takes the place of all other data in the caches
        return seconds(function)

    pairs = [(cold_seconds(copy), cold_seconds(run)) for _ in range(arguments.repeats + 1)][1:]
    copies, runs = zip(*pairs, strict=True)
    return Timing(statistics.median(runs), statistics.median(copies))


def median_seconds(run: Callable, repeats: int) -> float:
    """Return the median over ``repeats`` calls, after one that does not count."""
    return statistics.median([seconds(run) for _ in range(repeats + 1)][1:])


def seconds(run: Callable) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def conditions(arguments: argparse.Namespace) -> dict:
    """Return the machine, the versions and the settings under which the rows were measured."""
    return {
        "processor": processor(),
        "kernels": ops.kernel_info().cpu,
        "threads": arguments.threads,
        "numel": arguments.numel,
        "repeats": arguments.repeats,
        "torch": torch.__version__,
        "python": platform.python_version(),
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


def show(report: dict) -> None:
    """Print conditions and rows as a table."""
    console = Console(width=110)
    console.print(", ".join(f"{key} {value}" for key, value in report["conditions"].items()))
    table = Table()
    for column in ("operator", "ms", "GB/s", "copy GB/s", "of copy", "x eager", "x compile"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for row in report["rows"]:
        table.add_row(
            row["operator"],
            f"{row['milliseconds']:.2f}",
            f"{row['gigabytes_per_second']:.1f}",
            f"{row['copy_gigabytes_per_second']:.1f}",
            f"{row['of_copy']:.2f}",
            *(f"{row[key]:.1f}" if key in row else "" for key in ("eager", "compile")),
        )
    console.print(table)


if __name__ == "__main__":
    main()
