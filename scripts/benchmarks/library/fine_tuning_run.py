"""One rank's run in the studies of fine-tuning: a model that goes on from a checkpoint, with bytes and changed weights."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_zeropp.traffic import GATHER_CROSS, GATHER_RESYNC, REDUCE_CROSS
from library.rounds import Measurement, timed_steps
from library.text_run import TextRun
from library.variants import Recipe

ROOT_UNIT = "embeddings and head"


class FineTuningRun(TextRun):
    """A run that begins from a checkpoint, or makes one.

    Args:
        variant: a key of ``LOSS_VARIANTS``.
        seed: sets the order of the text, and without a checkpoint the weights.
        recipe: the settings that all runs share.
        train_file: tokens to train on, a ``.npy`` file of integers.
        validation_file: tokens on which the loss is measured.
        checkpoint: a file that ``save`` wrote; None begins from random weights.
    """

    def __init__(
        self,
        variant: str,
        seed: int,
        recipe: Recipe,
        train_file: str,
        validation_file: str,
        checkpoint: str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        super().__init__(variant, seed, recipe, train_file, validation_file)
        # Kept from before the first forward pass: an evaluation leaves the root's weights whole, under the same names.
        self._shards = {name: param.detach() for name, param in self.model.named_parameters()}
        self._changed: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._bytes: dict[str, float | None] = {"weights": None, "gradients": None}

    def train(self, steps: int) -> float:
        """Train for ``steps`` more steps, and return the mean training loss."""
        self._changed, self._seen = {}, {}
        loss = super().train(steps)
        # The evaluation that follows sends the last step's weights, which belong to no step that is counted here.
        self._bytes = self._shares_of_model()
        return loss

    def measure(self, steps: int) -> Measurement:
        """Time ``steps`` more steps one by one, and count their bytes. Changed weights are not looked for."""
        return timed_steps(lambda: super(FineTuningRun, self)._train_step().item(), steps, self.handle)

    def density(self) -> dict[str, float]:
        """Return the share of bf16 weights that changed in a step, by unit: the mean over the last ``train``."""
        shares = {}
        for unit, changed in self._changed.items():
            counts = torch.tensor([changed, self._seen[unit]])
            dist.all_reduce(counts)
            shares[unit] = round(counts[0].item() / counts[1].item(), 6)
        return shares

    def summary(self) -> dict[str, Any]:
        """Return ``weights`` and ``gradients``: bytes across nodes per step, over M (Y-1)/Y; None for FSDP2's own."""
        return dict(self._bytes)

    def save(self, path: str) -> None:
        """Write the whole fp32 model to a file, as a checkpoint of later runs."""
        state = self.accelerator.get_state_dict(self.model)
        if dist.get_rank() == 0:
            torch.save(state, path)
        dist.barrier()

    def _build_model(self, seed: int) -> torch.nn.Module:
        model = super()._build_model(seed)
        if self._checkpoint is not None:
            model.load_state_dict(torch.load(self._checkpoint, weights_only=True))
        return model

    def _train_step(self) -> torch.Tensor:
        before = self._words()
        loss = super()._train_step()
        for name, words in self._words().items():
            unit = _unit_of(name)
            self._changed[unit] = self._changed.get(unit, 0) + int((words != before[name]).sum())
            self._seen[unit] = self._seen.get(unit, 0) + words.numel()
        return loss

    def _words(self) -> dict[str, torch.Tensor]:
        """Return the bits of this rank's weights in bf16, by parameter."""
        return {
            name: _local(shard).to(torch.bfloat16, copy=True).view(torch.int16) for name, shard in self._shards.items()
        }

    def _shares_of_model(self) -> dict[str, float | None]:
        if self.handle is None:
            return {"weights": None, "gradients": None}
        traffic, nodes = self.handle.traffic, self.handle.topology.num_nodes
        whole = traffic.model_bytes * (nodes - 1) / nodes * max(traffic.steps, 1)

        def share(*collectives: str) -> float:
            counts = traffic.counts
            received = torch.tensor(sum(counts[name].cross_node for name in collectives if name in counts))
            dist.all_reduce(received)  # ranks receive different numbers of changed words
            return round(received.item() / nodes / whole, 5)

        return {"weights": share(GATHER_CROSS, GATHER_RESYNC), "gradients": share(REDUCE_CROSS)}


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _unit_of(name: str) -> str:
    layer = re.search(r"layers\.(\d+)\.", name)
    return f"layer {layer[1]}" if layer else ROOT_UNIT
