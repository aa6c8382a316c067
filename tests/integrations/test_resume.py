"""Only whole checkpoints are resumed from, by all ranks alike; older ones stay until the newest is whole."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist
from accelerate import PartialState
from harness import RankError, run_ranks
from toy import logged_messages
from trainer_runs import build_trainer, losses
from transformers import Trainer

from hf_zeropp.integrations import resume
from hf_zeropp.integrations.resume import MARK, last_whole_checkpoint, why_not_whole

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def error_of(function, *args) -> str:
    with pytest.raises(ValueError) as error:
        function(*args)
    return str(error.value)


def resume_beside_an_interrupted_save(rank: int, folder: str) -> None:
    straight = build_trainer(folder, **SAVING)
    straight.train()
    newest = os.path.join(folder, "checkpoint-4")
    if rank == 0:
        os.remove(os.path.join(newest, MARK))
    dist.barrier()
    resumed = build_trainer(folder, **SAVING)
    refused = error_of(resumed.train, newest)
    assert f"checkpoint-4' is not a whole checkpoint: rank 0 says that it has no {MARK}" in refused
    assert f"Make it whole on all ranks, or resume from '{folder}/checkpoint-2'" in refused
    assert "rank 0 asks for None, rank 1 for" in error_of(resumed.train, newest if rank == 1 else None)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(straight)


def test_resuming_passes_over_an_interrupted_save_and_refuses_it_by_name(tmp_path):
    run_ranks(resume_beside_an_interrupted_save, 4, str(tmp_path))
    assert why_not_whole(tmp_path / "checkpoint-4") is None  # the resumed run wrote it again


def resume_from_a_model_alone(rank: int, folder: str) -> None:
    build_trainer(folder, save_strategy="steps", save_steps=2, max_steps=2, save_only_model=True).train()
    assert f"from_pretrained('{folder}/checkpoint-2')" in error_of(build_trainer(folder).train, True)


def test_a_model_without_the_state_of_its_training_is_refused_on_all_ranks(tmp_path):
    run_ranks(resume_from_a_model_alone, 4, str(tmp_path))


def look_from_two_sides(rank: int, folder: str) -> None:
    """Rank 1 alone sees a damaged file in the newest checkpoint, as on a network file system that is slow."""
    PartialState(cpu=True)  # a Trainer makes it
    assert last_whole_checkpoint(folder) == os.path.join(folder, "checkpoint-20")
    if rank == 1:
        look = resume.why_not_whole
        resume.why_not_whole = lambda path: "it is cut off" if str(path).endswith("-20") else look(path)
    with logged_messages(resume.logger.name) as logs:
        assert last_whole_checkpoint(folder) == os.path.join(folder, "checkpoint-3")
    if rank == 0:
        assert "checkpoint-100 (rank 0:" in logs[0] and "checkpoint-20 (rank 1:" in logs[0]
    assert "rank 1 says that it is cut off" in error_of(resume._resolve, os.path.join(folder, "checkpoint-20"), folder)
    assert "There is no whole checkpoint" in error_of(resume._resolve, True, os.path.join(folder, "empty"))


def test_ranks_that_see_different_files_decide_alike(tmp_path):
    for step in (3, 20, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / MARK).write_text("{}" if step < 100 else '{"epoch": 0.')
    run_ranks(look_from_two_sides, 3, str(tmp_path))


def die_while_others_have_saved(rank: int, folder: str) -> None:
    save = Trainer._save_rng_state

    def save_or_die(self, output_dir):
        if rank == 3 and output_dir.endswith("checkpoint-4"):
            time.sleep(1)  # the first rank has nothing left to write
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, output_dir)

    trainer = build_trainer(folder, save_total_limit=1, **SAVING)  # patches the Trainer: ours waits around ``save``
    wrapped = Trainer._save_rng_state.__closure__
    cell = next(cell for cell in wrapped if cell.cell_contents is Trainer._save_rng_state.__wrapped__)
    save, cell.cell_contents = cell.cell_contents, save_or_die
    trainer.train()


@pytest.mark.thorough
def test_older_checkpoints_stay_until_all_ranks_have_saved(tmp_path):
    with pytest.raises(RankError):
        run_ranks(die_while_others_have_saved, 4, str(tmp_path))
    assert why_not_whole(tmp_path / "checkpoint-4") == f"it has no {MARK}"
    assert why_not_whole(tmp_path / "checkpoint-2") is None
