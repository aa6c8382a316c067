"""Predict the step times that this package's studies measured on the emulated cluster.

Fitted are the seconds of computation, to a table's rows without communication, and three rates: what a rank's processor handles
of gloo's bytes, to the rows ``stock`` where the link is unlimited; what each link reaches, to its rows ``stock``; and what the
kernels handle, to the rows ``balanced`` where the link is unlimited. Nothing is fitted to any other row.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.cluster import Cluster, Device, Link
from hf_zeropp.estimate.memory_and_bytes import FSDP2, IN_NODE, KEPT
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.step_time import step_time
from hf_zeropp.estimate.training_job import BACKWARD_FLOPS, FORWARD_FLOPS, Job, Setup
from hf_zeropp.estimate.unit_work import METHODS, Method
from hf_zeropp.integrations.pretrained_shape import units_of
from library.fitting import error, fit, misfit
from library.network import UNLIMITED, bits_per_second
from library.variants import VARIANTS, Variant

KERNEL_RATE = 21e9
"""Bytes per second of one core, read and written, in INT8 and bf16, at which a fit begins: the middle of encode and decode in
``ops_cpu.md``. There results go into buffers that exist, and in a step into memory that is new."""

COMPUTE, COMPUTE_KEPT = "compute", "compute, kept"
"""The rows without communication: of a step whose units FSDP2 copies out in each pass, and of one that keeps them."""
FITTED = (COMPUTE, COMPUTE_KEPT, "stock")
"""Variants whose rows the parameters are fitted to, in whole or in part."""
FITTED_UNLIMITED = "balanced"
"""The variant to whose rows the rate of the kernels is fitted, where the link is unlimited."""


class Rates(NamedTuple):
    """The rates of the emulated cluster, in bytes per second.

    Attributes:
        wire: what a rank's processor handles of gloo's bytes.
        link: of the link of a node.
        kernels: what the kernels read and write on one core.
    """

    wire: float
    link: float
    kernels: float = KERNEL_RATE


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured cell and its prediction.

    Attributes:
        study: name of the JSON file.
        rate: of the link.
        micro_steps: per step.
        variant: how ranks communicate.
        measured: seconds.
        predicted: seconds.
    """

    study: str
    rate: str
    micro_steps: int
    variant: str
    measured: float
    predicted: float

    @property
    def is_fitted(self) -> bool:
        """Whether the row was used to fit parameters. Then no error is counted for it."""
        return self.variant in FITTED or (self.variant, self.rate) == (FITTED_UNLIMITED, UNLIMITED)

    @property
    def error(self) -> float:
        """How far the prediction is off."""
        return error(self.predicted, self.measured)


class OwnStudy:
    """One JSON file of a study, and the parameters that were fitted to it.

    Args:
        path: the file.
        overhead: share of a step of one micro-step that is not the micro-step; None to take it from the file.

    Attributes:
        name: of the file.
        measured: seconds by link, micro-steps per step and variant.
        rates: of links, in the order of the file.
        wire_rate: fitted bytes per second of a rank's processor.
        kernel_rate: fitted bytes per second of the kernels on a core, read and written.
        link_rates: fitted bytes per second of a node's link, by its nominal rate.
    """

    def __init__(self, path: Path, overhead: float | None = None) -> None:
        content = json.loads(path.read_text())
        cells: list[dict[str, Any]] = content["cells"]
        self.name = path.stem
        self._conditions = content["conditions"]
        self.measured: dict[tuple[str, int, str], float] = {
            (cell["rate"], cell["accumulation"], cell["variant"]): cell["step_s"] for cell in cells
        }
        self.rates = list(dict.fromkeys(rate for rate, _, _ in self.measured))
        self._accumulations = list(dict.fromkeys(micro_steps for _, micro_steps, _ in self.measured))
        self.overhead = self._overhead() if overhead is None else overhead
        # No kernel of this package runs in a step of stock FSDP2.
        self.wire_rate = self._fit("stock", UNLIMITED, 1e9, lambda rate: Rates(rate, math.inf))
        self.link_rates = {rate: self._fit_link(rate) for rate in self.rates}
        self.kernel_rate = self._fit(
            FITTED_UNLIMITED, UNLIMITED, KERNEL_RATE, lambda rate: Rates(self.wire_rate, math.inf, rate)
        )

    @property
    def link_shares(self) -> dict[str, float]:
        """The fitted rate of each link over its nominal one."""
        nominal = {rate: bits_per_second(rate) for rate in self.rates}
        return {rate: self.link_rates[rate] * 8 / bits for rate, bits in nominal.items() if bits is not None}

    def rows(self) -> list[Row]:
        """Return all cells with their predictions, but those without communication, whose seconds are an input."""
        return [
            Row(self.name, *cell, seconds, self.predict(VARIANTS[cell[2]], *cell[:2]))
            for cell, seconds in self.measured.items()
            if cell[2] not in (COMPUTE, COMPUTE_KEPT)
        ]

    def predict(self, variant: Variant, rate: str, micro_steps: int) -> float:
        """Return the seconds of a step under a variant, measured or not."""
        rates = Rates(self.wire_rate, self.link_rates[rate], self.kernel_rate)
        return self._predict(variant, rate, micro_steps, rates)

    def _predict(self, variant: Variant, rate: str, micro_steps: int, rates: Rates) -> float:
        nodes, per_node = self._conditions["nodes"], self._conditions["ranks_per_node"]
        model = _model(json.dumps(self._conditions["model"]))
        tokens = self._conditions["batch_size"] * self._conditions["seq_len"]
        compute_s, overhead_s = self._compute(variant, rate, micro_steps)
        flops = (FORWARD_FLOPS + BACKWARD_FLOPS) * model.num_params * tokens / compute_s
        cores = self._conditions["cores"] / (nodes * per_node)
        kernel_rate = rates.kernels * min(1.0, cores)
        device = Device("core", flops, flops, kernel_rate=kernel_rate, wire_rate=rates.wire)
        cluster = Cluster(nodes * per_node, per_node, Link(rates.link), Link(math.inf), device, "gloo")
        config = ZeroPPConfig.resolve(dict(variant.zeropp or {}))
        setup = Setup(cluster.world_size, per_node, micro_steps, config=config, fp32_reduce=variant.fp32_reduce)
        method = _method_of(variant) if variant.zeropp is None else None
        # The ranks of a replica hold all of the model together, so under HSDP an optimizer has more to do.
        copies = nodes if method is not None and method.replicates else 1
        return step_time(Job(model, setup, cluster, tokens), method).step_s + copies * overhead_s

    def _compute(self, variant: Variant, rate: str, micro_steps: int) -> tuple[float, float]:
        """Return the seconds of one micro-step, and of the optimizer and the rest, from a row of the same table."""
        row = COMPUTE_KEPT if variant.gathers_once else COMPUTE
        whole = self.measured[rate, micro_steps, row]
        overhead = whole * self.overhead / (self.overhead + micro_steps * (1 - self.overhead))
        return (whole - overhead) / micro_steps, overhead

    # Fits.

    def _overhead(self) -> float:
        """Return the share of a step that does not grow with micro-steps, from the rows ``compute`` of all rates."""
        few, many = (
            statistics.median(self.measured[rate, micro_steps, COMPUTE] for rate in self.rates)
            for micro_steps in (1, 8)
        )
        return (few - (many - few) / 7) / few

    def _fit_link(self, rate: str) -> float:
        nominal = bits_per_second(rate)
        if nominal is None:
            return math.inf
        return self._fit("stock", rate, nominal / 8, lambda link: Rates(self.wire_rate, link))

    def _fit(self, variant: str, rate: str, start: float, rates: Callable[[float], Rates]) -> float:
        """Return the value with which a variant's rows of one link are met best, from ``start`` on. ``rates`` takes the value."""

        def cost(values: Mapping[str, float]) -> float:
            return misfit(
                [
                    (
                        self._predict(VARIANTS[variant], rate, micro_steps, rates(values["rate"])),
                        self.measured[rate, micro_steps, variant],
                    )
                    for micro_steps in self._accumulations
                ]
            )

        return fit(cost, {"rate": start}, {})["rate"]


def _method_of(variant: Variant) -> Method:
    if variant.replicas == "nodes":
        return METHODS["HSDP"]
    return METHODS[KEPT if variant.keeps_weights else IN_NODE if variant.gathers_in_node else FSDP2]


@functools.cache
def _model(shape: str) -> ModelShape:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**json.loads(shape), max_position_embeddings=2048))
    return ModelShape("Llama", units_of(model))


def own_studies(folder: Path) -> list[OwnStudy]:
    """Return the studies that the page compares with, fitted."""
    cluster = OwnStudy(folder / "cluster.json")
    others = ("half_model_cluster.json", "overlap.json")
    return [cluster, *(OwnStudy(folder / name, cluster.overhead) for name in others)]
