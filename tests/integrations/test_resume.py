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


def resume_beside_an_interrupted_save(rank: int, folder: str) -> dict[str, object]:
    straight = build_trainer(folder, **SAVING)
    straight.train()
    newest = os.path.join(folder, "checkpoint-4")
    if rank == 0:
        os.remove(os.path.join(newest, MARK))
    dist.barrier()
    resumed = build_trainer(folder, **SAVING)
    refused = error_of(resumed.train, newest)
    differs = error_of(resumed.train, newest if rank == 1 else None)
    resumed.train(resume_from_checkpoint=True)
    return {"straight": losses(straight), "resumed": losses(resumed), "refused": refused, "differs": differs}


def test_resuming_passes_over_an_interrupted_save_and_refuses_it_by_name(tmp_path):
    for result in run_ranks(resume_beside_an_interrupted_save, 4, str(tmp_path)):
        assert result["resumed"] == result["straight"]
        assert f"checkpoint-4' is not a whole checkpoint: rank 0 says that it has no {MARK}" in result["refused"]
        assert f"Make it whole on all ranks, or resume from '{tmp_path}/checkpoint-2'" in result["refused"]
        assert "rank 0 asks for None, rank 1 for" in result["differs"]
    assert why_not_whole(tmp_path / "checkpoint-4") is None  # the resumed run wrote it again


def resume_from_a_model_alone(rank: int, folder: str) -> str:
    build_trainer(folder, save_strategy="steps", save_steps=2, max_steps=2, save_only_model=True).train()
    return error_of(build_trainer(folder).train, True)


def test_a_model_without_the_state_of_its_training_is_refused_on_all_ranks(tmp_path):
    for error in run_ranks(resume_from_a_model_alone, 4, str(tmp_path)):
        assert f"from_pretrained('{tmp_path}/checkpoint-2')" in error


def look_from_two_sides(rank: int, folder: str) -> dict[str, object]:
    """Rank 1 alone sees a damaged file in the newest checkpoint, as on a network file system that is slow."""
    PartialState(cpu=True)  # a Trainer makes it
    seen = {"whole": last_whole_checkpoint(folder)}
    if rank == 1:
        look = resume.why_not_whole
        resume.why_not_whole = lambda path: "it is cut off" if str(path).endswith("-20") else look(path)
    with logged_messages(resume.logger.name) as logs:
        seen["one rank differs"] = last_whole_checkpoint(folder)
    seen["explicit"] = error_of(resume._resolve, os.path.join(folder, "checkpoint-20"), folder)
    seen["none"] = error_of(resume._resolve, True, os.path.join(folder, "empty"))
    return seen | {"logs": logs}


def test_ranks_that_see_different_files_decide_alike(tmp_path):
    for step in (3, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / MARK).write_text("{}")
    (tmp_path / "checkpoint-100").mkdir()
    (tmp_path / "checkpoint-100" / MARK).write_text('{"epoch": 0.')
    by_rank = run_ranks(look_from_two_sides, 3, str(tmp_path))
    for seen in by_rank:
        assert seen["whole"] == str(tmp_path / "checkpoint-20")
        assert seen["one rank differs"] == str(tmp_path / "checkpoint-3")
        assert "rank 1 says that it is cut off" in seen["explicit"]
        assert "There is no whole checkpoint" in seen["none"]
    assert "checkpoint-100 (rank 0:" in by_rank[0]["logs"][0] and "checkpoint-20 (rank 1:" in by_rank[0]["logs"][0]


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
