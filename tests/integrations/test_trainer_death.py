"""A rank dies by SIGKILL: every other rank ends with an error, and the earlier checkpoint resumes to the same run."""

from __future__ import annotations

import os
import signal
import time

import pytest
from harness import RankError, run_ranks
from trainer_runs import build_trainer, losses
from transformers import TrainerCallback

VICTIM = 1
SAVING = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieBetweenMicroSteps(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and args.process_index == VICTIM:
            die()


def train_until_death_in_a_step(rank: int, folder: str) -> None:
    build_trainer(folder, callbacks=[DieBetweenMicroSteps()], **SAVING).train()


def train(rank: int, folder: str, resume_from: str | None) -> list[float]:
    trainer = build_trainer(folder, fsdp_config={"state_dict_type": "FULL_STATE_DICT"}, **SAVING)
    trainer.train(resume_from_checkpoint=resume_from)
    return losses(trainer)


def test_all_ranks_end_and_the_earlier_checkpoint_resumes(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError) as report:
        run_ranks(train_until_death_in_a_step, 4, str(tmp_path))
    assert time.monotonic() - start < 60  # the timeout of the process group
    kinds = {rank: kind for rank, kind, _ in report.value.errors}
    assert kinds.pop(VICTIM) == "ProcessDied"
    assert sorted(kinds) == [0, 2, 3]
    messages = [message for rank, _, message in report.value.errors if rank != VICTIM]
    assert all("peer" in message or "Timed out" in message or "rank" in message for message in messages), messages

    straight = run_ranks(train, 4, str(tmp_path / "straight"), None)[0]
    resumed = run_ranks(train, 4, str(tmp_path / "resumed"), str(tmp_path / "checkpoint-2"))[0]
    assert resumed == straight
