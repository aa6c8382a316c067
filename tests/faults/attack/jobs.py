"""The jobs that faults happen to: six steps of a tiny model under the Trainer, on two nodes of two ranks.

A job depends on its arguments alone. It draws random numbers (dropout), so that resuming exactly needs the states of the
generators too.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from trainer_runs import TWO_NODES, build_trainer, losses, tiny_model
from transformers import AutoModelForCausalLM, Trainer

from attack.fault import Fault
from attack.strike import Blow, Watch, watch_training
from hf_zeropp import ZeroPPQuantConfig

SETTINGS = {
    "values": TWO_NODES,
    "deltas": TWO_NODES | {"qwz_mode": "delta", "qwz_bits": 4},
    "packed": TWO_NODES,
}
STEPS, SAVE_STEPS = 6, 2
BASE = "base"


class Order(NamedTuple):
    """The task of one rank.

    Attributes:
        fault: which job, with which checkpoints, and the fault.
        folder: of this run, outside of the disk that may be struck.
        models: where ``prepare`` put the base.
        strikes_at: number of the call to strike at; None for no fault.
        resumes: whether to resume from the last whole checkpoint.
    """

    fault: Fault
    folder: str
    models: str
    strikes_at: int | None = None
    resumes: bool = False

    @property
    def disk(self) -> Path:
        """The folder of checkpoints, on a small file system of its own."""
        return Path(self.folder, "disk")


class End(NamedTuple):
    """How a job ended: bits to compare, and the calls that were counted."""

    losses: list[float]
    digest: str
    counts: dict[str, int]


def run(rank: int, order: Order) -> End:
    """Run a job on one rank."""
    os.setpgid(0, 0)  # whatever this process starts can be found by its group
    with open(output_of(order.folder, rank), "ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the verdict asks a rank that hangs where it stands
    tempfile.tempdir = os.environ["TMPDIR"] = os.path.join(order.folder, "tmp")
    strikes = order.strikes_at is not None and rank == order.fault.rank
    blow = Blow(order.fault, Path(order.folder), order.disk)
    watch = Watch(order.fault.point, order.strikes_at, blow) if strikes else Watch()
    trainer = _trainer(order, watch)
    watch_training(watch, order.fault.kind)
    trainer.train(resume_from_checkpoint=True if order.resumes else None)
    return End(losses(trainer), _digest(trainer), dict(watch.counts))


def output_of(folder: str, rank: int) -> Path:
    """Return the file with all that a rank prints."""
    return Path(folder, f"output_{rank}")


def _trainer(order: Order, watch: Watch) -> Trainer:
    fault = order.fault
    model = _packed_model(order, watch) if fault.job == "packed" else tiny_model(attention_dropout=0.1)
    return build_trainer(
        str(order.disk / "run"),
        SETTINGS[fault.job],
        model=model,
        fsdp_config={"state_dict_type": fault.kind},
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=fault.keep,
        gradient_accumulation_steps=2,
    )


def _packed_model(order: Order, watch: Watch) -> torch.nn.Module:
    with watch.window("packed loading"):
        model = AutoModelForCausalLM.from_pretrained(
            os.path.join(order.models, BASE), quantization_config=ZeroPPQuantConfig(bits=4)
        )
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def _digest(trainer: Trainer) -> str:
    """Return a digest of the bits of all trained weights, which is the same on every rank."""
    digest = hashlib.sha256()
    for name, param in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        if param.requires_grad:
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            digest.update(name.encode() + whole.detach().float().numpy().tobytes())
    return digest.hexdigest()


def prepare(rank: int, models: str) -> None:
    """Write the base of the packed jobs."""
    tiny_model(attention_dropout=0.1).save_pretrained(os.path.join(models, BASE))
