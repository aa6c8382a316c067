"""Predict what the ZeRO++ paper (arXiv 2306.10209) measured, from its rows of ZeRO-3 alone.

The paper trained GPT models on nodes of 16 V100 (DGX-2), 24 of them for most figures. Fitted are, for each model, the rate of
computation, the share of the network that collectives reach, and the rate of links within a node: three numbers to four rows of
ZeRO-3. Nothing is fitted to a row of ZeRO++.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.cluster import ATTAINABLE_MEMORY, GPUS, NETWORK_LATENCY, WITHIN_LATENCY, Cluster, Device, Link
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.step_time import step_time
from hf_zeropp.estimate.training_job import Job, Setup
from hf_zeropp.estimate.unit_work import DEEPSPEED, METHODS, Method
from library.fitting import error, fit

RANKS_PER_NODE = 16
WORLD = 384
COUNTED_FLOPS = 8
"""Operations per weight and token that the paper's TFLOPs count, assumed: with activation checkpointing, a forward pass twice."""

TECHNIQUES = {name: Method(syncs=True, deepspeed=True, **{name.lower(): True}) for name in ("qwZ", "hpZ", "qgZ")}
LOW, HIGH = 100, 400
"""Gbit/s of a node's network, with one and with four InfiniBand links."""


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """A published row: TFLOPs per GPU.

    Attributes:
        model: its number of parameters.
        gbit: of a node's network.
        tokens: per GPU.
        zero3: ZeRO-3.
        zeropp: ZeRO++.
    """

    model: str
    gbit: int
    tokens: int
    zero3: float
    zeropp: float


PAPER_ROWS = (
    PaperRow("18B", LOW, 1024, 14, 31),
    PaperRow("18B", LOW, 2048, 26, 46),
    PaperRow("18B", HIGH, 1024, 25, 35),
    PaperRow("18B", HIGH, 2048, 40, 53),
    PaperRow("138B", LOW, 1024, 11, 22),
    PaperRow("138B", LOW, 2048, 20, 38),
    PaperRow("138B", HIGH, 1024, 23, 36),
    PaperRow("138B", HIGH, 2048, 36, 50),
)

BLOG_SPEEDUPS = {
    (HIGH, 1024): (1.28, 1.36),
    (HIGH, 2048): (1.24, 1.29),
    (LOW, 1024): (2.0, 2.2),
    (LOW, 2048): (2.0, 2.2),
}
"""The authors' announcement of ZeRO++ (DeepSpeed's blog): the range over all models at 400 Gbit/s; "about 2 x on average, up to
2.2 x" at 100 Gbit/s."""

Parameters = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class PaperResult:
    """A row with its predictions.

    Attributes:
        row: as published.
        zero3: predicted TFLOPs per GPU of ZeRO-3, which was fitted.
        zeropp: predicted TFLOPs per GPU of ZeRO++.
    """

    row: PaperRow
    zero3: float
    zeropp: float

    @property
    def fit_error(self) -> float:
        """How far the fitted row is off."""
        return error(self.zero3, self.row.zero3)

    @property
    def error(self) -> float:
        """How far the prediction is off, in the first reading: the paper's figure."""
        return error(self.zeropp, self.row.zeropp)

    @property
    def blog(self) -> tuple[float, float]:
        """The second reading: ZeRO-3's published row times the announcement's range of speedups."""
        low, high = BLOG_SPEEDUPS[self.row.gbit, self.row.tokens]
        return low * self.row.zero3, high * self.row.zero3

    @property
    def blog_error(self) -> float:
        """How far the prediction lies outside of the second reading; 0 inside."""
        low, high = self.blog
        return min(0.0, error(self.zeropp, low)) if self.zeropp < high else error(self.zeropp, high)


def fit_model(name: str) -> dict[str, float]:
    """Return the parameters of a model, from its rows of ZeRO-3."""
    rows = [row for row in PAPER_ROWS if row.model == name]

    def cost(values: Parameters) -> float:
        return sum(math.log(tflops(row, "ZeRO-3", values) / row.zero3) ** 2 for row in rows)

    start = {"flops": 60e12, "network share": 0.8, "within": 25e9}
    return fit(cost, start, {"flops": GPUS["v100"].flops, "network share": 1.0})


def predict_rows(name: str, values: Parameters) -> list[PaperResult]:
    """Return all rows of a model with their predictions."""
    return [
        PaperResult(row, tflops(row, "ZeRO-3", values), tflops(row, DEEPSPEED, values))
        for row in PAPER_ROWS
        if row.model == name
    ]


def tflops(row: PaperRow, method: str, values: Parameters, world_size: int = WORLD) -> float:
    """Return the TFLOPs per GPU that the model predicts, counted as the paper counts."""
    job = _job(row.model, row.gbit, row.tokens, world_size, values)
    flops = COUNTED_FLOPS * job.model.num_params * row.tokens
    return flops / step_time(job, METHODS[method]).step_s / 1e12


def technique_speedups(gbit: int, tokens: int, world_size: int, values: Parameters) -> dict[str, float]:
    """Return the speedup over ZeRO-3 of each technique alone, and of all three, for the model of 18 B."""
    job = _job("18B", gbit, tokens, world_size, values)
    stock = step_time(job, METHODS["ZeRO-3"]).step_s
    alone = {name: stock / step_time(job, method).step_s for name, method in TECHNIQUES.items()}
    return alone | {"all": stock / step_time(job, METHODS[DEEPSPEED]).step_s}


def _job(model: str, gbit: int, tokens: int, world_size: int, values: Parameters) -> Job:
    gpu = GPUS["v100"]
    rate = gpu.memory_rate * ATTAINABLE_MEMORY
    device = Device(gpu.name, gpu.flops, values["flops"], kernel_rate=rate, copy_rate=rate)
    network = Link(gbit * 1e9 / 8 * values["network share"], NETWORK_LATENCY)
    cluster = Cluster(world_size, RANKS_PER_NODE, network, Link(values["within"], WITHIN_LATENCY), device)
    setup = Setup(world_size, RANKS_PER_NODE, config=ZeroPPConfig.resolve({"preset": "paper"}))
    return Job(ModelShape.of_count(model), setup, cluster, tokens, checkpointing=True)
