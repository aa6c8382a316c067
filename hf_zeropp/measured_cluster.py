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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml

from hf_zeropp import ops
from hf_zeropp.comm.backend_variables import set_backend_variables
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.topology import detect_ranks_per_node, get_topology
from hf_zeropp.estimate.cluster import Cluster, Device, Link
from hf_zeropp.estimate.training_job import BACKWARD_FLOPS, FORWARD_FLOPS
from hf_zeropp.files import MAX_SETTINGS_BYTES, parse_settings, read_text
from hf_zeropp.ops.format import WEIGHT_BLOCK, Segment, WireLayout
from hf_zeropp.traffic import Traffic

RUN = "torchrun --nnodes 2 --node-rank R --master-addr IP --nproc-per-node 8 -m hf_zeropp.cli bench-network --output cluster.yaml"

WIRE_BYTES = 16_000_000
"""Bytes that each rank sends in a large collective."""

SMALL_BYTES = 512
"""Bytes of a message whose time is all latency."""

HIDDEN_SIZE = TOKENS = 2048
"""Width of the block that is computed, and tokens of its batch."""

REPEATS = 7
"""How often everything is measured; medians count."""


def run_network(args: argparse.Namespace) -> None:
    """Measure the cluster on all ranks of the job; rank 0 writes the file and prints it.

    Raises:
        SystemExit: the file cannot be written, no launcher started this process, or there is one node.
    """
    try:
        measured = measure_cluster(args.output, args.ranks_per_node or "auto")
    except ValueError as error:
        raise SystemExit(f"hf-zeropp bench-network: {error}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if measured is not None:
        text = yaml.safe_dump(dataclasses.asdict(measured), sort_keys=False)
        args.output.write_text(text)
        print(f"{text}Wrote {args.output}. Rates are bytes and operations per second.")


# ---- The file.


def read_cluster(path: Path) -> Cluster:
    """Read a file that ``bench-network`` wrote.

    Raises:
        ValueError: it cannot be read, lacks a key or has another one, or holds a value that no measurement gives.
    """
    try:
        content = parse_settings(read_text(path, MAX_SETTINGS_BYTES))
        _check_numbers(content)
        parts = {"network": Link(**content["network"]), "within": Link(**content["within"])}
        return Cluster(**content | parts | {"device": Device(**content["device"])})
    # A key that is missing, too much or of another type: Python says which.
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected a file of hf-zeropp bench-network, cannot use {str(path)!r}: {error}. Measure again: {RUN}"
        ) from error


def _check_numbers(content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        if isinstance(value, Mapping):
            _check_numbers(value)
        elif name == "backend" and value not in ("nccl", "gloo"):
            raise ValueError(f"expected a backend of nccl and gloo, got {value!r}")
        # NaN is not above zero. Where no link is, the latency is zero.
        elif name not in ("name", "backend") and not (value > 0 or (name == "latency" and value == 0)):
            raise ValueError(f"expected {name} above zero, got {value}")


# ---- The measurement.


def measure_cluster(output: Path, ranks_per_node: int | str) -> Cluster | None:
    """Measure this cluster, and return the figures on rank 0, None on all others. Collective over the job.

    Args:
        output: the file to write, which is checked before anything is measured.
        ranks_per_node: N, or ``"auto"`` for what the launcher exports.

    Raises:
        ValueError: the file cannot be written, no launcher started this process, or there is one node.
    """
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise ValueError(f"expected --output to name a file in a folder that can be written, got {str(output)!r}")
    if "RANK" not in os.environ:
        raise ValueError(f"expected a launcher, which exports RANK and its like; got none. Run {RUN}")
    set_backend_variables()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    per_node = detect_ranks_per_node(ranks_per_node, dist.get_world_size())
    if per_node == dist.get_world_size():
        raise ValueError(
            f"expected at least two nodes, got one of {per_node} ranks: nothing crosses nodes. Start it on several machines, or "
            "emulate nodes with --ranks-per-node 1."
        )
    measured = _Benchmark(per_node).run()
    return measured if dist.get_rank() == 0 else None


class _Benchmark:
    def __init__(self, ranks_per_node: int) -> None:
        self._is_gloo = not torch.cuda.is_available()
        self._device = torch.device("cpu" if self._is_gloo else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        if not self._is_gloo:
            torch.cuda.set_device(self._device)
        self._per_node, self._world = ranks_per_node, dist.get_world_size()
        topology = get_topology(ranks_per_node, self._device.type)
        traffic = Traffic(ranks_per_node, self._world // ranks_per_node)
        self._cross = Hop("cross hop", topology.cross_group, traffic)
        self._node = Hop("node hop", topology.node_group, traffic)

    def run(self) -> Cluster:
        """Measure everything, in an order that all ranks share."""
        network, kernel_rate, flops = self._link(self._cross), self._kernel_rate(), self._flops()
        # A node of one rank has no node hop. Then nothing reads its link.
        within = self._link(self._node) if self._node.size > 1 else Link(kernel_rate)
        if self._is_gloo:
            # On loopback nothing but the processor limits gloo. Its ranks share the memory of the machine.
            name, memory = "CPU", math.inf
            wire_rate = within.rate if self._node.size > 1 else math.inf
        else:
            properties = torch.cuda.get_device_properties(self._device)
            name, memory, wire_rate = properties.name, float(properties.total_memory), math.inf
        # Copies and kernels are both bound by memory.
        device = Device(name, flops, flops, memory, kernel_rate, copy_rate=kernel_rate, wire_rate=wire_rate)
        # All ranks of a node send through the one network that they share.
        network = dataclasses.replace(network, rate=network.rate * self._per_node)
        return Cluster(self._world, self._per_node, network, within, device, "gloo" if self._is_gloo else "nccl")

    def _link(self, hop: Hop) -> Link:
        """Return the bytes per second that one rank receives in large collectives, and the seconds of a small one."""
        latency = self._collective_s(hop.all_gather, SMALL_BYTES, hop.size * SMALL_BYTES)
        wire_bytes = WIRE_BYTES // hop.size * hop.size
        received = (hop.size - 1) * (wire_bytes + wire_bytes // hop.size)
        seconds = self._collective_s(hop.all_gather, wire_bytes, hop.size * wire_bytes)
        seconds += self._collective_s(hop.all_to_all, wire_bytes, wire_bytes)
        # A latency that swallows a large collective would leave no time for its bytes: a noisy machine does that.
        return Link(received / max(seconds - 2 * latency, seconds / 2), latency)

    def _collective_s(self, start: Callable[..., object], sent: int, received: int) -> float:
        wire, output = (torch.zeros(size, dtype=torch.uint8, device=self._device) for size in (sent, received))
        return self._seconds(lambda: start(output, wire))

    def _flops(self) -> float:
        """Return operations per second in the forward and backward passes of a block's feed-forward layer."""
        up, down = nn.Linear(HIDDEN_SIZE, 4 * HIDDEN_SIZE), nn.Linear(4 * HIDDEN_SIZE, HIDDEN_SIZE)
        block = nn.Sequential(up, nn.GELU(), down).to(self._device, torch.bfloat16)
        batch = torch.randn(TOKENS, HIDDEN_SIZE, device=self._device, dtype=torch.bfloat16, requires_grad=True)
        seconds = self._seconds(lambda: block(batch).sum().backward())
        return (FORWARD_FLOPS + BACKWARD_FLOPS) * 2 * up.weight.numel() * TOKENS / seconds

    def _kernel_rate(self) -> float:
        """Return bytes per second, read and written, of a quantization and a dequantization."""
        layout = WireLayout([Segment(WIRE_BYTES, 8)], WEIGHT_BLOCK, torch.bfloat16)
        values = torch.randn(WIRE_BYTES, device=self._device).bfloat16()
        wire = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)

        def both() -> None:
            ops.quantize(values, layout, out=wire)
            ops.dequantize(wire, layout, dtype=values.dtype, out=values)

        return 2 * (values.nbytes + layout.nbytes) / self._seconds(both)

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of ``work`` on the slowest rank. All ranks run it at one time; the first does not count."""
        times = []
        for _ in range(REPEATS + 1):
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
        if not self._is_gloo:
            torch.cuda.synchronize(self._device)
