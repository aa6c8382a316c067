"""``hf-zeropp bench-network``: how fast this cluster is, measured under the launcher of the job, for ``estimate --cluster``.

Every rank of the job runs this. The hops are those that the package trains with (``comm/hop.py``): all-gathers and all-to-alls of
wire buffers, over the cross group and over the node group, all groups at one time as in training. A figure is that of the slowest
rank, since a step waits for it.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

from hf_zeropp import ops
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.topology import detect_ranks_per_node, get_topology
from hf_zeropp.estimate.cluster_file import Measured
from hf_zeropp.estimate.unit_work import BACKWARD_FLOPS, FORWARD_FLOPS
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.traffic import Traffic

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SMALL_BYTES = 512
"""Bytes of a message whose time is all latency."""

NUM_MEASUREMENTS = 5
KERNEL_BLOCK = 256
KERNEL_BITS = 8
_RUN = "torchrun --nproc-per-node 4 -m hf_zeropp.cli bench-network"


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        wire_bytes: of the large wire that each rank sends.
        hidden_size: of the block that is computed.
        tokens: of its batch.
        repeats: of every measurement; the median counts.
    """

    wire_bytes: int = 16_000_000
    hidden_size: int = 2048
    tokens: int = 2048
    repeats: int = 7


def measure_cluster(ranks_per_node: int | str, size: Size) -> Measured | None:
    """Measure this cluster. Collective over the job.

    Args:
        ranks_per_node: N, or ``"auto"`` for what the launcher exports. An int emulates several nodes on one machine.
        size: how much is measured.

    Returns:
        The figures on rank 0, None on all others.

    Raises:
        ValueError: no launcher started this process, the nodes do not divide the world, or there is one node.
    """
    device = _join()
    per_node = detect_ranks_per_node(ranks_per_node, dist.get_world_size())
    if per_node == dist.get_world_size():
        raise ValueError(
            f"expected at least two nodes, got one of {per_node} ranks: nothing crosses nodes. Start it on several machines, or "
            "emulate nodes with --ranks-per-node 1."
        )
    figures = _Benchmark(per_node, device, size).run()
    return figures if dist.get_rank() == 0 else None


def write_path_is_free(path: Path) -> None:
    """Raise before anything is measured if the file cannot be written.

    Raises:
        ValueError: its folder does not exist, or it is a folder.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"expected --output to name a file in a folder that can be written, got {str(path)!r}. Make the folder."
        )


def _join() -> torch.device:
    """Join the job that a launcher started, and return this rank's device."""
    if not dist.is_initialized():
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
    def __init__(self, ranks_per_node: int, device: torch.device, size: Size) -> None:
        self._device = device
        self._size = size
        self._per_node = ranks_per_node
        world = dist.get_world_size()
        topology = get_topology(ranks_per_node, device.type)
        traffic = Traffic(ranks_per_node, world // ranks_per_node)
        self._cross = Hop("cross hop", topology.cross_group, traffic)
        self._node = Hop("node hop", topology.node_group, traffic)

    def run(self) -> Measured:
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
        return Measured(
            device=_device_name(self._device),
            backend=str(dist.get_backend(self._cross.group)),
            world_size=dist.get_world_size(),
            ranks_per_node=self._per_node,
            # All ranks of a node send through the one network that they share.
            network_bytes_per_s=cross_rate * self._per_node,
            network_latency_s=cross_latency,
            within_bytes_per_s=node_rate,
            within_latency_s=node_latency,
            flops=flops,
            kernel_bytes_per_s=kernel_rate,
            copy_bytes_per_s=copy_rate,
            # On loopback nothing but the processor limits gloo.
            wire_bytes_per_s=node_rate if is_gloo and self._node.size > 1 else None,
            memory_bytes=None if is_gloo else float(torch.cuda.get_device_properties(self._device).total_memory),
        )

    def _hop(self, hop: Hop) -> tuple[float, float]:
        """Return seconds of a small collective, and bytes per second that one rank receives in large ones."""
        latency = self._seconds(self._gather(hop, SMALL_BYTES))
        wire_bytes = self._size.wire_bytes // hop.size * hop.size
        received = (hop.size - 1) * wire_bytes + (hop.size - 1) * wire_bytes // hop.size
        seconds = self._seconds(self._gather(hop, wire_bytes)) + self._seconds(self._exchange(hop, wire_bytes))
        # A latency that swallows a large collective would leave no time for its bytes: a noisy machine does that.
        return latency, received / max(seconds - 2 * latency, seconds / 2)

    def _gather(self, hop: Hop, wire_bytes: int) -> Callable[[], object]:
        wire = torch.zeros(wire_bytes, dtype=torch.uint8, device=self._device)
        output = torch.zeros(hop.size * wire_bytes, dtype=torch.uint8, device=self._device)
        return lambda: hop.all_gather(output, wire)

    def _exchange(self, hop: Hop, wire_bytes: int) -> Callable[[], object]:
        wire = torch.zeros(wire_bytes, dtype=torch.uint8, device=self._device)
        output = torch.zeros_like(wire)
        return lambda: hop.all_to_all(output, wire)

    def _flops(self) -> float:
        """Return operations per second in the forward and backward passes of a block's feed-forward layer."""
        width = self._size.hidden_size
        block = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        block.to(self._device, torch.bfloat16)
        batch = torch.randn(self._size.tokens, width, device=self._device, dtype=torch.bfloat16, requires_grad=True)
        weights = sum(param.numel() for param in block.parameters() if param.ndim > 1)
        seconds = self._seconds(lambda: block(batch).sum().backward())
        return (FORWARD_FLOPS + BACKWARD_FLOPS) * weights * self._size.tokens / seconds

    def _kernel_rate(self) -> float:
        """Return bytes per second, read and written, of a quantization and a dequantization."""
        numel = self._size.wire_bytes // KERNEL_BLOCK * KERNEL_BLOCK
        layout = WireLayout([Segment(numel, KERNEL_BITS)], KERNEL_BLOCK, torch.bfloat16)
        values = torch.randn(numel, device=self._device).bfloat16()
        wire = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)

        def both() -> None:
            ops.quantize(values, layout, out=wire)
            ops.dequantize(wire, layout, dtype=values.dtype, out=values)

        return 2 * (values.nbytes + layout.nbytes) / self._seconds(both)

    def _copy_rate(self) -> float:
        source = torch.zeros(self._size.wire_bytes, dtype=torch.uint8, device=self._device)
        target = torch.zeros_like(source)
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of ``work`` on the slowest rank. All ranks run it at one time; the first does not count."""
        times = []
        for _ in range(self._size.repeats + 1):
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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
