"""The cluster of an estimate: GPUs by name, links by their rates, and what of both a job can attain."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

ATTAINABLE_MFU = 0.5
"""Share of a GPU's peak that matrix products reach in training, where nothing waits for communication. An assumption."""

ATTAINABLE_LINK = 0.85
"""Share of a link's rate that collectives reach with large messages. An assumption; ``bench-network`` measures it."""

ATTAINABLE_MEMORY = 0.6
"""Share of a GPU's memory rate at which it quantizes and copies: on an H100 0.55 at 16 MB, 0.75 at 128 MB, 0.9 at 1 GB."""

NETWORK_LATENCY = 10e-6
"""Seconds that one message between nodes takes beside its bytes. An assumption, for InfiniBand or RoCE."""

WITHIN_LATENCY = 3e-6
"""Seconds that one message within a node takes beside its bytes. An assumption, for NVLink."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as its vendor describes it.

    Attributes:
        name: for people.
        flops: dense 16-bit matrix operations per second with fp32 accumulation. Sheets that quote sparse rates are halved.
        memory: bytes.
        memory_rate: bytes per second of its memory.
        within_rate: bytes per second of its links within a node, both directions together, as vendors state it.
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    within_rate: float


GPUS = {
    "v100": Gpu("V100 SXM2 32 GB", 125e12, 32e9, 900e9, 300e9),  # NVIDIA V100 datasheet (fp16; it has no bf16)
    "a100": Gpu("A100 SXM 80 GB", 312e12, 80e9, 2039e9, 600e9),  # NVIDIA A100 80GB datasheet
    "h100": Gpu("H100 SXM 80 GB", 989.5e12, 80e9, 3350e9, 900e9),  # NVIDIA H100 datasheet (sparse rate halved)
    "h200": Gpu("H200 SXM 141 GB", 989.5e12, 141e9, 4800e9, 900e9),  # NVIDIA H200 datasheet (sparse rate halved)
    "b200": Gpu("B200 180 GB", 2250e12, 180e9, 8000e9, 1800e9),  # NVIDIA DGX B200 datasheet (sparse halved, an eighth)
    "4090": Gpu("RTX 4090", 165.2e12, 24e9, 1008e9, 64e9),  # NVIDIA Ada whitepaper (fp32 sums); PCIe 4.0 x16 within
}
"""GPUs by the name that ``--gpu`` takes, each with the vendor's sheet behind it."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between ranks.

    Attributes:
        rate: bytes per second in one direction that collectives reach.
        latency: seconds of one message, beside its bytes.
    """

    rate: float
    latency: float = 0.0


@dataclasses.dataclass(frozen=True)
class Device:
    """The processor or GPU of one rank.

    Attributes:
        name: for people.
        peak_flops: operations per second by its sheet; MFU is a share of them.
        flops: operations per second that training reaches where nothing waits for communication.
        memory: bytes; infinite where it is unknown.
        kernel_rate: bytes per second, read and written together, at which it quantizes.
        copy_rate: the same for FSDP2's copies of units; infinite where ``flops`` already includes them.
        wire_rate: bytes per second that a rank's processor sends and receives; infinite where other hardware does it.
    """

    name: str
    peak_flops: float
    flops: float
    memory: float = math.inf
    kernel_rate: float = math.inf
    copy_rate: float = math.inf
    wire_rate: float = math.inf


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of ranks.

    Args:
        world_size: W.
        ranks_per_node: N.
        network: the link of one *node* to the others, which its ranks share.
        within: the link of one *rank* to the others of its node.
        device: of every rank.
        backend: ``"nccl"``, where streams overlap, or ``"gloo"``, where FSDP2's collectives block.
    """

    world_size: int
    ranks_per_node: int
    network: Link
    within: Link
    device: Device
    backend: Literal["nccl", "gloo"] = "nccl"


def gpu_cluster(
    gpu: Gpu, world_size: int, ranks_per_node: int, network_rate: float, *, mfu: float = ATTAINABLE_MFU
) -> Cluster:
    """Return a cluster of a known GPU, with the assumptions of this module.

    Args:
        gpu: of every rank.
        world_size: W.
        ranks_per_node: N.
        network_rate: bytes per second of a node's network in each direction, by its vendor.
        mfu: share of the peak that training attains.

    Raises:
        ValueError: that share is not between 0 and 1.
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"expected an attainable MFU above 0 and at most 1, got {mfu}. 0.5 is half of the peak.")
    rate = gpu.memory_rate * ATTAINABLE_MEMORY
    return Cluster(
        world_size,
        ranks_per_node,
        Link(network_rate * ATTAINABLE_LINK, NETWORK_LATENCY),
        # Vendors of networks quote one direction, vendors of GPUs the sum of both.
        Link(gpu.within_rate / 2 * ATTAINABLE_LINK, WITHIN_LATENCY),
        Device(gpu.name, gpu.flops, gpu.flops * mfu, gpu.memory, kernel_rate=rate, copy_rate=rate),
    )
