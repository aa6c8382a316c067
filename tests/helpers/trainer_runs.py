"""Shared by the Trainer tests: a tiny model, data, arguments, and what can be compared after a run.

Everything depends on arguments and seeds alone, so two runs differ only by what a test varies.
"""

from __future__ import annotations

import numpy as np
import torch
from datasets import Dataset
from toy import LLAMA, full_weights
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.fsdp.units import DefaultAllGather
from hf_zeropp.integrations.trainer import ZeroPPCallback

VOCAB = 128
SEQ_LEN = 16
TWO_NODES = {"ranks_per_node": 2}  # of four ranks
UNQUANTIZED = {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None}

ON_CPUS = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "fsdp": True,
}
"""Arguments of every Trainer."""


def tiny_model(seed: int = 0, **overrides) -> LlamaForCausalLM:
    set_seed(seed)
    settings = LLAMA | {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def token_data(num_sequences: int = 256, seed: int = 1) -> Dataset:
    """Sequences that count up from a random token: learnable in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(3, VOCAB, (num_sequences, 1), generator=generator)
    ids = 3 + (starts + torch.arange(SEQ_LEN)) % (VOCAB - 3)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def training_arguments(output_dir: str, zeropp=TWO_NODES, fsdp_config: dict | None = None, **overrides):
    settings = ON_CPUS | {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 2e-3,
        "seed": 0,
        "fsdp_config": {"zeropp": zeropp, **(fsdp_config or {})},
    }
    return TrainingArguments(output_dir=output_dir, **(settings | overrides))


def build_trainer(output_dir: str, zeropp=TWO_NODES, *, model=None, callbacks=(), **arguments) -> Trainer:
    """A Trainer with a ZeroPPCallback as its last callback."""
    args = training_arguments(output_dir, zeropp, **arguments)
    model = tiny_model() if model is None else model
    data = {"train_dataset": token_data(), "eval_dataset": token_data(16, seed=2)}
    return Trainer(model, args, callbacks=[*callbacks, ZeroPPCallback()], **data)


def callback_of(trainer: Trainer) -> ZeroPPCallback:
    """Return the callback that was passed, or, where none was, the one among the Trainer's defaults, which come first."""
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ZeroPPCallback)][-1]


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry and "loss" in entry]


def weights(trainer: Trainer) -> dict[str, np.ndarray]:
    """Full weights on every rank. They are arrays, because tensors do not outlive the process that sends them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: weight.numpy() for name, weight in full_weights(model).items()}


def same_weights(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    """Whether both hold the same names, and for each the same bits."""
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def num_fsdp2_gathers(model: torch.nn.Module) -> int:
    """The number of units whose gathers are FSDP2's own."""
    return sum(type(unit.all_gather) is DefaultAllGather for unit in find_units(model))
