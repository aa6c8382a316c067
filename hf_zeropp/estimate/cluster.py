"""The cluster of an estimate: GPUs by name, links by their rates, and what of both a job can attain."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

from hf_zeropp.comm.topology import check_divides

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

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# "100Gb" and "100Gbps" are read as bits by some and as bytes by others, a factor of 8. Only "bit" and "B" are clear.
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|(?-i:B)(?:ps)?)(?:/s)?", re.IGNORECASE)
_BITS_PER_BYTE = 8


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


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name, in any case.

    Raises:
        ValueError: no GPU has the name.
    """
    if (gpu := GPUS.get(name.lower())) is None:
        raise ValueError(
            f"expected a GPU of {', '.join(GPUS)}, got {name!r}. For another one, measure it: run hf-zeropp bench-network there "
            "and give its file to --cluster."
        )
    return gpu


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
        step_overhead: seconds per optimizer step beside the forward and backward passes; None to derive the optimizer's from
            ``copy_rate``.
    """

    name: str
    peak_flops: float
    flops: float
    memory: float = math.inf
    kernel_rate: float = math.inf
    copy_rate: float = math.inf
    wire_rate: float = math.inf
    step_overhead: float | None = None


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

    def __post_init__(self) -> None:
        check_divides(f"{self.ranks_per_node} ranks per node", self.ranks_per_node, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, Y."""
        return self.world_size // self.ranks_per_node


def gpu_device(gpu: Gpu, mfu: float = ATTAINABLE_MFU) -> Device:
    """Return the device of a GPU, of which training attains the share ``mfu``.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"expected an attainable MFU above 0 and at most 1, got {mfu}. 0.5 is half of the peak.")
    rate = gpu.memory_rate * ATTAINABLE_MEMORY
    return Device(gpu.name, gpu.flops, gpu.flops * mfu, gpu.memory, kernel_rate=rate, copy_rate=rate)


def gpu_cluster(
    gpu: Gpu,
    world_size: int,
    ranks_per_node: int,
    network_rate: float,
    *,
    within_rate: float | None = None,
    mfu: float = ATTAINABLE_MFU,
) -> Cluster:
    """Return a cluster of a known GPU, with the assumptions of this module.

    Args:
        gpu: of every rank.
        world_size: W.
        ranks_per_node: N.
        network_rate: bytes per second of a node's network in each direction, by its vendor.
        within_rate: bytes per second of a GPU's links, both directions together, by its vendor; None for the GPU's own.
        mfu: share of the peak that training attains.
    """
    # Vendors of networks quote one direction, vendors of GPUs the sum of both.
    within = (within_rate or gpu.within_rate) / 2
    return Cluster(
        world_size,
        ranks_per_node,
        Link(network_rate * ATTAINABLE_LINK, NETWORK_LATENCY),
        Link(within * ATTAINABLE_LINK, WITHIN_LATENCY),
        gpu_device(gpu, mfu),
    )


def parse_rate(text: str) -> float:
    """Return a rate in bytes per second: "100gbit" is 1.25e10, "600GBps" is 6e11.

    Args:
        text: a number with one of the units kbit, Mbit, Gbit, Tbit (case does not matter) or kBps, MBps, GBps, TBps.

    Raises:
        ValueError: the text is no rate, has no unit, or is zero.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"expected a rate with its unit, such as 100gbit or 600GBps, got {text!r}. Write gbit for 10^9 bits per second and "
            "GBps for 10^9 bytes per second."
        )
    rate = float(match[1]) * _PREFIXES[match[2].lower()] / (_BITS_PER_BYTE if match[3].lower() == "bit" else 1)
    if rate == 0:
        raise ValueError(f"expected a rate above zero, got {text!r}. A link that moves no bytes cannot be estimated.")
    return rate


def format_rate(bytes_per_s: float) -> str:
    """Return a rate of a network in bits: 1.25e10 is "100 Gbit/s"."""
    bits = bytes_per_s * _BITS_PER_BYTE
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
