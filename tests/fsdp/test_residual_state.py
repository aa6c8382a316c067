"""Checkpoints with deltas and error feedback: resumed bit for bit by Accelerate and the Trainer, and whatever was switched."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path

import accelerate.accelerator
import accelerate.utils
import pytest
import transformers.trainer
from accelerate_runs import handle_of, new_accelerator, prepared, tiny_llama
from accelerate_runs import train as train_steps
from accelerate_runs import weights as weights_of
from harness import run_ranks
from trainer_runs import TWO_NODES, build_trainer, callback_of, losses, same_weights, weights

from hf_zeropp.fsdp.residual_state import state_file
from hf_zeropp.integrations.accelerate_checkpoints import LOAD, SAVE

HALF = TWO_NODES | {"qwz_mode": "delta", "qwz_bits": 4, "qgz_hadamard": True, "qgz_error_feedback": "full"}
KINDS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
SAVING = {"save_strategy": "steps", "save_steps": 2, "bf16": True}


def log_lines() -> list[str]:
    """Collect the log messages of the package from now on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hf_zeropp").addHandler(handler)
    return lines


def train(rank: int, folder: str, zeropp: dict, kind: str, resume_from: str | None, arguments: dict):
    lines = log_lines()
    trainer = build_trainer(folder, zeropp, fsdp_config={"state_dict_type": kind}, **arguments)
    trainer.train(resume_from_checkpoint=resume_from)
    return losses(trainer), weights(trainer), lines, callback_of(trainer).handle.residual_bytes()


# ---- The Trainer.


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_resumes_bit_for_bit(tmp_path, kind):
    """With accumulation, and a residual that is reset on the way: the count of steps goes on too."""
    zeropp = HALF | {"qgz_reset_steps": 5}
    arguments = SAVING | {"gradient_accumulation_steps": 2}
    straight = run_ranks(train, 4, str(tmp_path), zeropp, kind, None, arguments)
    checkpoint = tmp_path / "checkpoint-2"
    assert len(list(checkpoint.glob("zeropp_0_rank_*.safetensors"))) == 4
    resumed = run_ranks(train, 4, str(tmp_path / "resumed"), zeropp, kind, str(checkpoint), arguments)
    for ours, theirs in zip(resumed, straight, strict=True):
        assert ours[0] == theirs[0]
        assert same_weights(ours[1], theirs[1])
        assert not any("residual" in line for line in ours[2])


def test_without_its_residuals_a_run_goes_on_otherwise(tmp_path):
    """So the test above can fail; and a checkpoint of a run without error feedback can be resumed with it."""
    straight = run_ranks(train, 4, str(tmp_path), HALF, "SHARDED_STATE_DICT", None, SAVING)
    checkpoint = tmp_path / "checkpoint-2"
    for file in checkpoint.glob("zeropp_*"):
        file.unlink()
    resumed = run_ranks(train, 4, str(tmp_path / "resumed"), HALF, "SHARDED_STATE_DICT", str(checkpoint), SAVING)
    for rank, (ours, theirs) in enumerate(zip(resumed, straight, strict=True)):
        assert not same_weights(ours[1], theirs[1])
        assert any(f"there is no zeropp_0_rank_{rank}.safetensors in the checkpoint" in line for line in ours[2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[str, list[float]]:
    """A checkpoint after four steps of four ranks, and the losses up to there."""
    folder, arguments = (
        tmp_path_factory.mktemp("saved"),
        SAVING | {"save_steps": 4, "learning_rate": 1e-3, "max_steps": 4},
    )
    found = run_ranks(train, 4, str(folder), HALF, "SHARDED_STATE_DICT", None, arguments)[0][0]
    return str(folder / "checkpoint-4"), found


@pytest.mark.parametrize(
    ("world_size", "zeropp", "line"),
    [
        (4, TWO_NODES, "are left out, because error feedback is off"),
        (4, HALF | {"qgz_chunks": 2}, "was saved with other settings"),
        (4, HALF | {"qgz_hadamard": False}, "was saved with other settings"),
        (2, HALF | {"ranks_per_node": 1}, "was saved by 4 ranks, 2 to a node, this is 2 ranks, 1 to a node"),
        (6, HALF | {"ranks_per_node": 3}, "there is no zeropp_0_rank_5.safetensors in the checkpoint"),
    ],
    ids=["features off", "in chunks", "unrotated", "2 ranks", "6 ranks"],
)
def test_other_settings_and_worlds_load_it(tmp_path, saved, world_size, zeropp, line):
    checkpoint, before = saved
    arguments = SAVING | {"save_steps": 10, "learning_rate": 1e-3, "max_steps": 8, "ignore_data_skip": True}
    results = run_ranks(train, world_size, str(tmp_path), zeropp, "SHARDED_STATE_DICT", checkpoint, arguments)
    after, _, _, residual_bytes = results[-1]
    lines = [line for _, _, of_rank, _ in results for line in of_rank]  # some reasons are one rank's, others all ranks'
    assert max(after[4:]) < before[0], (before, after)  # it went on from there
    assert any(line in each for each in lines), lines
    assert (residual_bytes > 0) == ("qgz_error_feedback" in zeropp)


# ---- Accelerate.


def accelerate_run(rank: int, folder: str, steps: tuple[int, ...], resume: bool):
    """Trains the steps; saves after the first two, or begins from what was saved then."""
    accelerator = new_accelerator(HALF, mixed_precision="bf16")
    model, optimizer = prepared(accelerator, tiny_llama())
    if resume:
        accelerator.load_state(folder)
        return train_steps(accelerator, model, optimizer, rank, steps), weights_of(model)
    train_steps(accelerator, model, optimizer, rank, steps[:2])
    accelerator.save_state(folder)
    return train_steps(accelerator, model, optimizer, rank, steps[2:]), weights_of(model)


def test_accelerate_resumes_bit_for_bit(tmp_path):
    straight = run_ranks(accelerate_run, 4, str(tmp_path), (0, 1, 2, 3, 4), False, init=False)
    resumed = run_ranks(accelerate_run, 4, str(tmp_path), (2, 3, 4), True, init=False)
    for ours, theirs in zip(resumed, straight, strict=True):
        assert ours[0] == theirs[0]
        assert all((ours[1][name] == weight).all() for name, weight in theirs[1].items())


def load_damaged(rank: int, folder: str) -> tuple[list[str], int]:
    """One rank's file is cut off: that rank begins at zero, the others go on, and so does the run."""
    lines = log_lines()
    accelerator = new_accelerator(HALF | {"ranks_per_node": 1})
    model, optimizer = prepared(accelerator)
    train_steps(accelerator, model, optimizer, rank, (0,))
    handle = handle_of(accelerator, model)
    handle.save_state(os.path.join(folder, "made", "on the way"))
    path = state_file(os.path.join(folder, "made", "on the way"), rank)
    if rank == 1:
        path.write_bytes(path.read_bytes()[:100])
    handle.load_state(path.parent)
    restored = handle.residual_bytes()
    train_steps(accelerator, model, optimizer, rank, (1,))
    return lines, restored


def test_a_damaged_file_is_named_and_the_run_goes_on(tmp_path):
    (lines, restored), (lines_of_damaged, nothing) = run_ranks(load_damaged, 2, str(tmp_path), init=False)
    assert not lines and restored > 0 == nothing
    assert any("zeropp_0_rank_1.safetensors cannot be read" in line for line in lines_of_damaged)


def save_and_list(rank: int, folder: str) -> list[str]:
    accelerator = new_accelerator(TWO_NODES)
    model, optimizer = prepared(accelerator)
    train_steps(accelerator, model, optimizer, rank, (0,))
    accelerator.save_state(folder)
    return os.listdir(folder)


def test_runs_without_error_feedback_write_nothing_more(tmp_path):
    for names in run_ranks(save_and_list, 4, str(tmp_path), init=False):
        assert not [name for name in names if name.startswith("zeropp")]


def test_both_libraries_look_up_the_functions_that_are_wrapped():
    """Fails when they save optimizers by other names or arguments."""
    for name, folder in ((SAVE, "output_dir"), (LOAD, "input_dir")):
        parameters = inspect.signature(getattr(accelerate.utils, name)).parameters
        assert {"fsdp_plugin", "model", folder, "optimizer_index"} <= parameters.keys()
        for place in (accelerate.accelerator, transformers.trainer):
            assert f"{name}(" in Path(inspect.getsourcefile(place)).read_text()
