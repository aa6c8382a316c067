"""Predict the step times and tokens that this package's studies measured on the emulated cluster.

Fitted are the seconds of computation, to a table's row ``compute``, and two rates, to its rows ``stock``: what a rank's processor
handles of gloo's bytes, where the link is unlimited, and what each link reaches. LoRA has no row ``compute``: the row
``lora-stock`` at unlimited rate gives it. The rate of the kernels is that of ``ops_cpu.md``. Nothing is fitted to any other row.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.cluster import Cluster, Device, Link
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.step_time import SETTINGS, step_time, token_s
from hf_zeropp.estimate.training_job import BACKWARD_FLOPS, FORWARD_FLOPS, Job, Setup
from hf_zeropp.integrations.pretrained_shape import frozen_units_of, units_of
from library.fitting import error, fit, misfit
from library.network import UNLIMITED, bits_per_second
from library.variants import VARIANTS, Variant

KERNEL_RATE = 21e9
"""Bytes per second of one core, read and written, in INT8 and bf16: the middle of encode and decode in ``ops_cpu.md``."""

LORA_RANK = 8
FITTED = ("compute", "stock", "lora-stock")
"""Rows that the parameters are fitted to, in whole or in part. No error is counted for them."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured cell and its prediction.

    Attributes:
        study: name of the JSON file.
        rate: of the link.
        micro_steps: per step; 0 for a generated token.
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
        """Whether the row was used to fit parameters."""
        return self.variant in FITTED

    @property
    def error(self) -> float:
        """How far the prediction is off."""
        return error(self.predicted, self.measured)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The parameters of one cell.

    Attributes:
        compute_s: seconds of one micro-step, or of one token.
        overhead_s: seconds of the optimizer and the rest of a step.
        wire_rate: bytes per second that a rank's processor handles.
        link_rate: bytes per second of a node's link.
    """

    compute_s: float
    overhead_s: float
    wire_rate: float
    link_rate: float


class OwnStudy:
    """One JSON file of a study.

    Args:
        path: the file.
        overhead: share of a step of one micro-step that is not the micro-step; None to take it from the file.
    """

    def __init__(self, path: Path, overhead: float | None = None) -> None:
        content = json.loads(path.read_text())
        self._name = path.stem
        self._cells: list[dict[str, Any]] = content["cells"]
        self._conditions = content["conditions"]
        self._is_generation = "token_s" in self._cells[0]
        self.overhead = self._overhead() if overhead is None else overhead
        self._lora_extra_s = 0.0
        self._wire_rate = self._fit_wire()
        self._link_rates = {rate: self._fit_link(rate) for rate in self.rates}
        self._lora_extra_s = self._fit_lora()

    @property
    def name(self) -> str:
        """The name of the file."""
        return self._name

    @property
    def rates(self) -> list[str]:
        """The rates of links, in the order of the file."""
        return list(dict.fromkeys(cell["rate"] for cell in self._cells))

    @property
    def link_shares(self) -> dict[str, float]:
        """The fitted rate of each link over its nominal one."""
        return {
            rate: self._link_rates[rate] * 8 / nominal
            for rate in self.rates
            if (nominal := bits_per_second(rate)) is not None
        }

    @property
    def wire_rate(self) -> float:
        """The fitted bytes per second of a rank's processor."""
        return self._wire_rate

    def rows(self) -> list[Row]:
        """Return all cells with their predictions, but ``compute``, whose seconds are an input."""
        return [
            Row(
                self._name, cell["rate"], self._micro_steps(cell), cell["variant"], self._seconds(cell),
                self.predict(cell["variant"], cell["rate"], self._micro_steps(cell)),
            )
            for cell in self._cells
            if cell["variant"] != "compute"
        ]  # fmt: skip

    def predict(self, name: str, rate: str, micro_steps: int) -> float:
        """Return the seconds of a step or token under a variant."""
        return self._predict(VARIANTS[name], micro_steps, self._machine(rate, micro_steps))

    def predict_preset(self, preset: str, rate: str, micro_steps: int) -> float:
        """Return the seconds of a step under a preset, measured or not."""
        return self._predict(Variant(preset, {"preset": preset}), micro_steps, self._machine(rate, micro_steps))

    def _machine(self, rate: str, micro_steps: int) -> Machine:
        compute_s, overhead_s = self._compute(rate, micro_steps)
        return Machine(compute_s, overhead_s, self._wire_rate, self._link_rates[rate])

    def _predict(self, variant: Variant, micro_steps: int, machine: Machine) -> float:
        nodes, per_node = self._conditions["nodes"], self._conditions["ranks_per_node"]
        model = _model(json.dumps(self._conditions["model"]), variant.lora)
        tokens = self._conditions["batch_size"] * (1 if self._is_generation else self._conditions["seq_len"])
        passes = FORWARD_FLOPS if self._is_generation else FORWARD_FLOPS + BACKWARD_FLOPS
        compute_s = machine.compute_s + (self._lora_extra_s if variant.lora else 0.0)
        flops = passes * model.num_params * tokens / compute_s
        cores = self._conditions["cores"] / (nodes * per_node)
        device = Device(
            "core", flops, flops, kernel_rate=KERNEL_RATE * min(1.0, cores), wire_rate=machine.wire_rate,
            step_overhead=machine.overhead_s,
        )  # fmt: skip
        cluster = Cluster(nodes * per_node, per_node, Link(machine.link_rate), Link(math.inf), device, "gloo")
        config = ZeroPPConfig.resolve(variant.zeropp or {})
        setup = Setup(cluster.world_size, per_node, max(1, micro_steps), config=config, fp32_reduce=variant.fp32_reduce)
        job = Job(model, setup, cluster, tokens)
        method = "HSDP" if variant.replicas == "nodes" else "FSDP2" if variant.zeropp is None else SETTINGS
        return token_s(job, method) if self._is_generation else step_time(job, method).step_s

    # Fits.

    def _overhead(self) -> float:
        """Return the share of a step that does not grow with micro-steps, from the rows ``compute`` of all rates."""
        few, many = (self._median_compute(micro_steps) for micro_steps in (1, 8))
        return (few - (many - few) / 7) / few

    def _median_compute(self, micro_steps: int) -> float:
        seconds = [self._find(rate, micro_steps, "compute") for rate in self.rates]
        return statistics.median(second for second in seconds if second is not None)

    def _compute(self, rate: str, micro_steps: int) -> tuple[float, float]:
        """Return the seconds of one micro-step and of the rest, from the row of the same table."""
        whole = self._find(rate, micro_steps, "compute")
        assert whole is not None
        if self._is_generation:
            return whole, 0.0
        overhead = whole * self.overhead / (self.overhead + micro_steps * (1 - self.overhead))
        return (whole - overhead) / micro_steps, overhead

    def _fit_wire(self) -> float:
        return self._fit_stock(UNLIMITED, lambda rate: {"wire_rate": rate, "link_rate": math.inf}, 1e9)

    def _fit_link(self, rate: str) -> float:
        nominal = bits_per_second(rate)
        if nominal is None:
            return math.inf
        return self._fit_stock(rate, lambda link: {"wire_rate": self._wire_rate, "link_rate": link}, nominal / 8)

    def _fit_stock(self, rate: str, rates: Any, start: float) -> float:
        """Return the rate at which the rows ``stock`` of one link are met best."""

        def cost(values: Any) -> float:
            pairs = []
            for micro_steps in self._accumulations:
                compute_s, overhead_s = self._compute(rate, micro_steps)
                machine = Machine(compute_s, overhead_s, **rates(values["rate"]))
                measured = self._find(rate, micro_steps, "stock")
                assert measured is not None
                pairs.append((self._predict(VARIANTS["stock"], micro_steps, machine), measured))
            return misfit(pairs)

        return fit(cost, {"rate": start}, {})["rate"]

    def _fit_lora(self) -> float:
        """Return the seconds that adapters add to the computation of a token, from ``lora-stock`` at unlimited rate."""
        measured = self._find(UNLIMITED, self._accumulations[0], "lora-stock")
        if measured is None:
            return 0.0
        return max(0.0, measured - self.predict("lora-stock", UNLIMITED, self._accumulations[0]))

    # Cells.

    @property
    def _accumulations(self) -> list[int]:
        return list(dict.fromkeys(map(self._micro_steps, self._cells)))

    def _find(self, rate: str, micro_steps: int, variant: str) -> float | None:
        key = (rate, micro_steps, variant)
        cells = (cell for cell in self._cells if (cell["rate"], self._micro_steps(cell), cell["variant"]) == key)
        return next((self._seconds(cell) for cell in cells), None)

    def _micro_steps(self, cell: dict[str, Any]) -> int:
        return 0 if self._is_generation else int(cell["accumulation"])

    def _seconds(self, cell: dict[str, Any]) -> float:
        return float(cell["token_s" if self._is_generation else "step_s"])


@functools.cache
def _model(shape: str, lora: bool) -> ModelShape:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**json.loads(shape), max_position_embeddings=2048))
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model.bfloat16(), LoraConfig(r=LORA_RANK, target_modules="all-linear"))
    return ModelShape("Llama", units_of(model), frozen_units_of(model))


def own_studies(folder: Path) -> list[OwnStudy]:
    """Return the studies that the page compares with, fitted."""
    cluster = OwnStudy(folder / "cluster.json")
    others = ("half_model_cluster.json", "generation.json", "overlap.json")
    return [cluster, *(OwnStudy(folder / name, cluster.overhead) for name in others)]
