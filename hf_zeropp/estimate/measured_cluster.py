"""A measured cluster: ``hf-zeropp bench-network`` measures one and writes its file, ``hf-zeropp estimate --cluster`` reads it.

Every rank of the job runs the benchmark, under the launcher of the job. The hops are those that the package trains with
(``comm/hop.py``): all-gathers and all-to-alls of wire buffers, over the cross group and over the node group, all groups at one
time as in training. A figure is that of the slowest rank, since a step waits for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from rich.console import Console
from rich.table import Table

from hf_zeropp import ops
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.topology import detect_ranks_per_node, get_topology
from hf_zeropp.estimate.cluster import Cluster, Device, Link, format_rate
from hf_zeropp.estimate.training_job import BACKWARD_FLOPS, FORWARD_FLOPS
from hf_zeropp.files import MAX_SETTINGS_BYTES, parse_settings, read_text
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.sizes import parse_bytes
from hf_zeropp.traffic import Traffic

HELP = "Measure the network, the links within nodes and the computation, for estimate --cluster."
_RUN = "torchrun --nproc-per-node 4 -m hf_zeropp.cli bench-network"
DESCRIPTION = (
    f"Measure this cluster under the launcher of your job, for estimate --cluster: {_RUN} --output cluster.yaml"
)

KIND = "hf-zeropp cluster 2"
"""The first line of a file says what it is and in which form."""

_REMEDY = "Measure again: hf-zeropp bench-network --output FILE, under the launcher of your job."

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SMALL_BYTES = 512
"""Bytes of a message whose time is all latency."""

NUM_MEASUREMENTS = 5
KERNEL_BLOCK = 256
KERNEL_BITS = 8


# ---- The command.


def add_network_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bench-network``."""
    parser.add_argument("--output", type=Path, required=True, help="The YAML file to write, for estimate --cluster.")
    parser.add_argument(
        "--ranks-per-node", type=int, help="The number of ranks per node. The default is what the launcher exports."
    )
    parser.add_argument(
        "--wire", default="16MB", help="The bytes that each rank sends in a large collective. The default is 16MB."
    )
    parser.add_argument("--hidden-size", type=int, default=2048, help="The width of the block that is computed.")
    parser.add_argument("--tokens", type=int, default=2048, help="The tokens of its batch.")
    parser.add_argument(
        "--repeats", type=int, default=7, help="The number of times that everything is measured; medians count."
    )


def run_network(args: argparse.Namespace) -> None:
    """Measure the cluster on all ranks of the job; rank 0 prints a table and writes the file.

    Raises:
        SystemExit: an argument is wrong, or no launcher started this process.
    """
    try:
        _check_arguments(args)
        measured = measure_cluster(args)
    except ValueError as error:
        raise SystemExit(f"hf-zeropp bench-network: {error}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if measured is not None:
        write_cluster(args.output, measured)
        console = Console()
        console.print(_table(measured))
        console.print(f"Wrote {args.output}", soft_wrap=True)


def _check_arguments(args: argparse.Namespace) -> None:
    """Raise before anything is measured if an argument is wrong, or the file cannot be written."""
    if args.output.is_dir() or not os.access(args.output.parent, os.W_OK):
        raise ValueError(
            f"expected --output to name a file in a folder that can be written, got {str(args.output)!r}. Make the folder."
        )
    for name in ("hidden_size", "tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"expected a positive int for --{name.replace('_', '-')}, got {getattr(args, name)}")
    if parse_bytes(args.wire) < 1_000:
        raise ValueError(f"expected at least 1KB for --wire, got {args.wire!r}. Small messages measure latency alone.")


def _table(cluster: Cluster) -> Table:
    device = cluster.device
    title = f"{cluster.num_nodes} nodes x {cluster.ranks_per_node} ranks, {cluster.backend}, {device.name}"
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    table.add_row("network of a node", format_rate(cluster.network.rate))
    table.add_row("its latency", f"{cluster.network.latency * 1e6:.0f} us")
    table.add_row("within a node, per rank", f"{cluster.within.rate / 1e9:.3g} GB/s")
    table.add_row("its latency", f"{cluster.within.latency * 1e6:.0f} us")
    table.add_row("one block, per rank", f"{device.flops / 1e12:.3g} TFLOP/s")
    table.add_row("quantization, per rank", f"{device.kernel_rate / 1e9:.3g} GB/s")
    table.add_row("copy, per rank", f"{device.copy_rate / 1e9:.3g} GB/s")
    return table


# ---- The file.


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Write a file for ``estimate --cluster``: the fields of ``Cluster``, of its links and of its device."""
    path.write_text(yaml.safe_dump({"kind": KIND, **dataclasses.asdict(cluster)}, sort_keys=False))


def read_cluster(path: Path) -> Cluster:
    """Read a file that ``bench-network`` wrote.

    Raises:
        ValueError: it cannot be read, is of another kind, or holds a value that no measurement gives.
    """
    try:
        content = parse_settings(read_text(path, MAX_SETTINGS_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a cluster file, cannot read {str(path)!r}: {error}. {_REMEDY}") from error
    if not isinstance(content, dict) or content.pop("kind", "no kind") != KIND:
        raise ValueError(f"expected a mapping with `kind: {KIND}` in {str(path)!r}, got something else. {_REMEDY}")
    return _parsed(Cluster, content, path)


def _parsed(kind: type, content: Any, path: Path) -> Any:
    """Return the part of a cluster that ``content`` describes, in all fields of its class."""
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(content, dict) or set(content) != names:
        raise ValueError(f"expected the keys {', '.join(sorted(names))} in {str(path)!r}, got {content!r}. {_REMEDY}")
    for name, value in content.items():
        if name in _PARTS:
            content[name] = _parsed(_PARTS[name], value, path)
        elif not _CHECKS.get(name, _is_rate)(value):
            raise ValueError(f"expected {name} of a cluster in {str(path)!r}, got {value!r}. {_REMEDY}")
    return kind(**content)


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and value > 0  # NaN is not above zero


_PARTS: dict[str, type] = {"network": Link, "within": Link, "device": Device}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str),
    "backend": lambda value: value in ("nccl", "gloo"),
    "world_size": lambda value: type(value) is int and value > 0,
    "ranks_per_node": lambda value: type(value) is int and value > 0,
    "latency": lambda value: value == 0 or _is_rate(value),
    "step_overhead": lambda value: value is None or _is_rate(value),
}
"""Whether a value may stand under a name. Under all others rates stand."""


# ---- The measurement.


def measure_cluster(args: argparse.Namespace) -> Cluster | None:
    """Measure this cluster. Collective over the job.

    Args:
        args: the command line. ``--ranks-per-node`` may emulate several nodes on one machine.

    Returns:
        The figures on rank 0, None on all others.

    Raises:
        ValueError: no launcher started this process, the nodes do not divide the world, or there is one node.
    """
    device = _join()
    per_node = detect_ranks_per_node(
        "auto" if args.ranks_per_node is None else args.ranks_per_node, dist.get_world_size()
    )
    if per_node == dist.get_world_size():
        raise ValueError(
            f"expected at least two nodes, got one of {per_node} ranks: nothing crosses nodes. Start it on several machines, or "
            "emulate nodes with --ranks-per-node 1."
        )
    figures = _Benchmark(per_node, device, args).run()
    return figures if dist.get_rank() == 0 else None


def _join() -> torch.device:
    """Join the job that a launcher started, and return this rank's device."""
    if missing := [name for name in LAUNCHER_VARIABLES if name not in os.environ]:
        raise ValueError(
            f"expected a launcher, which exports {', '.join(LAUNCHER_VARIABLES)}; got no {missing[0]}. Run {_RUN}"
        )
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


class _Benchmark:
    def __init__(self, ranks_per_node: int, device: torch.device, args: argparse.Namespace) -> None:
        self._device = device
        self._args = args
        self._wire_bytes = parse_bytes(args.wire)
        self._per_node = ranks_per_node
        world = dist.get_world_size()
        topology = get_topology(ranks_per_node, device.type)
        traffic = Traffic(ranks_per_node, world // ranks_per_node)
        self._cross = Hop("cross hop", topology.cross_group, traffic)
        self._node = Hop("node hop", topology.node_group, traffic)

    def run(self) -> Cluster:
        is_gloo = self._device.type == "cpu"
        _say("the network between nodes", 1)
        cross_latency, cross_rate = self._hop(self._cross)
        _say("copies", 2)
        copy_rate = self._copy_rate()
        _say("the links within a node", 3)
        # A node of one rank has no node hop. Then nothing reads these two figures.
        node_latency, node_rate = self._hop(self._node) if self._node.size > 1 else (0.0, copy_rate)
        _say("the computation of a block", 4)
        flops = self._flops()
        _say("quantization", 5)
        kernel_rate = self._kernel_rate()
        # On loopback nothing but the processor limits gloo. Its ranks share the memory of the machine.
        wire_rate = node_rate if is_gloo and self._node.size > 1 else math.inf
        memory = math.inf if is_gloo else float(torch.cuda.get_device_properties(self._device).total_memory)
        return Cluster(
            dist.get_world_size(),
            self._per_node,
            # All ranks of a node send through the one network that they share.
            Link(cross_rate * self._per_node, cross_latency),
            Link(node_rate, node_latency),
            Device(
                "CPU" if is_gloo else torch.cuda.get_device_name(self._device),
                flops,
                flops,
                memory,
                kernel_rate,
                copy_rate,
                wire_rate,
            ),
            "gloo" if is_gloo else "nccl",
        )

    def _hop(self, hop: Hop) -> tuple[float, float]:
        """Return seconds of a small collective, and bytes per second that one rank receives in large ones."""
        latency = self._seconds(self._collective(hop.all_gather, SMALL_BYTES, hop.size * SMALL_BYTES))
        wire_bytes = self._wire_bytes // hop.size * hop.size
        received = (hop.size - 1) * wire_bytes + (hop.size - 1) * wire_bytes // hop.size
        seconds = self._seconds(self._collective(hop.all_gather, wire_bytes, hop.size * wire_bytes))
        seconds += self._seconds(self._collective(hop.all_to_all, wire_bytes, wire_bytes))
        # A latency that swallows a large collective would leave no time for its bytes: a noisy machine does that.
        return latency, received / max(seconds - 2 * latency, seconds / 2)

    def _collective(self, start: Callable[..., object], sent: int, received: int) -> Callable[[], object]:
        wire, output = (torch.zeros(size, dtype=torch.uint8, device=self._device) for size in (sent, received))
        return lambda: start(output, wire)

    def _flops(self) -> float:
        """Return operations per second in the forward and backward passes of a block's feed-forward layer."""
        width = self._args.hidden_size
        block = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        block.to(self._device, torch.bfloat16)
        batch = torch.randn(self._args.tokens, width, device=self._device, dtype=torch.bfloat16, requires_grad=True)
        weights = sum(param.numel() for param in block.parameters() if param.ndim > 1)
        seconds = self._seconds(lambda: block(batch).sum().backward())
        return (FORWARD_FLOPS + BACKWARD_FLOPS) * weights * self._args.tokens / seconds

    def _kernel_rate(self) -> float:
        """Return bytes per second, read and written, of a quantization and a dequantization."""
        numel = self._wire_bytes // KERNEL_BLOCK * KERNEL_BLOCK
        layout = WireLayout([Segment(numel, KERNEL_BITS)], KERNEL_BLOCK, torch.bfloat16)
        values = torch.randn(numel, device=self._device).bfloat16()
        wire = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)

        def both() -> None:
            ops.quantize(values, layout, out=wire)
            ops.dequantize(wire, layout, dtype=values.dtype, out=values)

        return 2 * (values.nbytes + layout.nbytes) / self._seconds(both)

    def _copy_rate(self) -> float:
        source = torch.zeros(self._wire_bytes, dtype=torch.uint8, device=self._device)
        target = torch.zeros_like(source)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of ``work`` on the slowest rank. All ranks run it at one time; the first does not count."""
        times = []
        for _ in range(self._args.repeats + 1):
            dist.barrier()
            self._finish()
            start = time.perf_counter()
            work()
            self._finish()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(times[1:], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _say(measured: str, number: int) -> None:
    """Say on rank 0 what is measured now. The whole takes minutes on a slow network."""
    if dist.get_rank() == 0:
        # Lines, and no bar: launchers hand lines on, and log files keep them. The figures alone go to standard output.
        print(f"Measuring {measured} ({number} of {NUM_MEASUREMENTS}) ...", file=sys.stderr, flush=True)
