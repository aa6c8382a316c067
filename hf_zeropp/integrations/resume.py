"""Checkpoints of the Trainer that are whole, and resuming from the last of them.

A save that is interrupted leaves a folder ``checkpoint-N`` without some of its files. The Trainer takes the folder with the
largest N when it resumes, finds no ``trainer_state.json`` in it, and fails. Worse, its first rank writes that file and deletes
older checkpoints as soon as its own part is saved, while other ranks may still write theirs: if one of them is killed then, the
newest folder lacks a file, and no older checkpoint is left.

Under a ZeroPPCallback ``trainer_state.json`` is therefore the mark of a whole checkpoint:

1. It is removed before anything is written to a folder that exists already (``unmark_then_save``).
2. All ranks wait for each other when they have written their files (``save_then_wait``). The first rank writes the mark, and
   deletes older checkpoints, after that.
3. ``train(resume_from_checkpoint=True)`` takes the last folder with the mark, and says which it passed over.
   ``train(resume_from_checkpoint=folder)`` raises for one without it, and names the last whole one.

Ranks may see different files, for instance on a network file system that is slow to show them. So they tell each other what they
see. A checkpoint is whole if it is so for all of them, and all resume from the same or all raise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn as nn
from accelerate.state import PartialState
from accelerate.utils import gather_object
from accelerate.utils.constants import FSDP_MODEL_NAME
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from hf_zeropp.files import read_json

logger = logging.getLogger(__name__)

MARK = "trainer_state.json"
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def folder_to_resume(trainer: Trainer, wanted: str | bool | None) -> str | None:
    """Return the checkpoint that ``train(resume_from_checkpoint=wanted)`` goes on from, the same on all ranks; None for none.

    Raises:
        ValueError: on all ranks, if ranks want different ones, if there is none, or if nothing can be resumed from it.
    """
    folder = _resolve(wanted or None, trainer.args.output_dir or ".")
    if folder is not None and trainer.is_fsdp_enabled:
        _refuse_model_alone(folder)
    return folder


def why_not_whole(folder: str | os.PathLike[str]) -> str | None:
    """Say what a checkpoint's folder lacks, as this rank sees it; None for a whole one."""
    if not os.path.isdir(folder):
        return "there is no such folder"
    if not os.path.lexists(Path(folder, MARK)):
        return f"it has no {MARK}"
    try:
        read_json(Path(folder), MARK)
    except ValueError as error:
        return str(error)
    return None


def last_whole_checkpoint(output_dir: str) -> str | None:
    """Return the newest checkpoint that is whole for all ranks, or None. Collective; a warning names what is passed over."""
    own = _steps_in(output_dir)
    views: list[dict[int, str | None]] = gather_object([own])
    # A folder that a rank does not see at all is missing in its view, and not whole.
    steps = sorted(set().union(*views), reverse=True)
    found, passed_over = None, []
    for step in steps:
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        reasons = [view.get(step, "it does not see the folder") for view in views]
        if not any(reasons):
            found = os.path.join(output_dir, name)
            break
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        passed_over.append(f"{name} (rank {rank}: {reason})")
    if passed_over and PartialState().is_main_process:
        logger.warning(
            "The save of %s in %s was interrupted or is damaged. The last whole checkpoint is %s.",
            ", ".join(passed_over),
            output_dir,
            found,
        )
    return found


def _steps_in(output_dir: str) -> dict[int, str | None]:
    """Return what each checkpoint in a folder lacks, by its step."""
    found: dict[int, str | None] = {}
    with contextlib.suppress(OSError):  # no folder, no checkpoints
        for name in os.listdir(output_dir):
            if match := _CHECKPOINT.fullmatch(name):
                found[int(match[1])] = why_not_whole(os.path.join(output_dir, name))
    return found


def _resolve(wanted: str | bool | None, output_dir: str) -> str | None:
    """Return the checkpoint to resume from, the same on all ranks; None to begin anew.

    Raises:
        ValueError: on all ranks, if ranks want different ones, if it is not whole on one of them, or if there is none.
    """
    # A script may look for the last checkpoint by itself, and a slow network file system shows it to some ranks only.
    wishes = gather_object([wanted])
    if (rank := next((rank for rank, wish in enumerate(wishes) if wish != wishes[0]), None)) is not None:
        raise ValueError(
            f"Ranks must resume from one checkpoint: rank 0 asks for {wishes[0]!r}, rank {rank} for {wishes[rank]!r}. Pass "
            "resume_from_checkpoint=True on all of them."
        )
    if wanted is None:
        return None
    if wanted is True:
        found = last_whole_checkpoint(output_dir)
        if found is None:
            raise ValueError(
                f"There is no whole checkpoint in {output_dir!r} to resume from. Call train() without "
                "resume_from_checkpoint to begin anew."
            )
        return found
    folder = str(wanted)
    reasons = gather_object([why_not_whole(folder)])
    if not any(reasons):
        return folder
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    last = last_whole_checkpoint(os.path.dirname(os.path.abspath(folder)))
    remedy = f"resume from {last!r}, the last whole one beside it" if last else "begin anew: none beside it is whole"
    raise ValueError(
        f"{folder!r} is not a whole checkpoint: rank {rank} says that {reason}. Its save was interrupted, it is damaged, or that "
        f"rank does not see all of it. Make it whole on all ranks, or {remedy}."
    )


def _refuse_model_alone(folder: str) -> None:
    """Raise ``ValueError`` on all ranks for what ``save_only_model`` leaves. The first rank alone would raise in the Trainer."""
    names = os.listdir(folder)
    is_model = SAFE_WEIGHTS_NAME in names or WEIGHTS_NAME in names
    if any(gather_object([is_model and not any(name.startswith(FSDP_MODEL_NAME) for name in names)])):
        raise ValueError(
            f"{folder!r} holds a model without the state of its training, as save_only_model=True saves it: nothing can be "
            f"resumed from it. To train this model anew, load it by from_pretrained({folder!r}), and call train() without "
            "resume_from_checkpoint."
        )


def unmark_then_save(original: Callable[..., None], self: Trainer, model: nn.Module, trial: Any) -> None:
    """Extend ``_save_checkpoint``: see 1 above."""
    folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
    try:
        # The other ranks write nothing before the first has passed here: weights are saved together.
        if self.args.should_save:
            (folder / MARK).unlink(missing_ok=True)
        original(self, model, trial)
    except Exception as error:
        raise RuntimeError(_why_not_saved(self, folder, error)) from error


def _why_not_saved(trainer: Trainer, folder: Path, error: Exception) -> str:
    """Return the words for a save that failed. PyTorch's own tell a full disk as "unexpected pos 64 vs 0"."""
    place = folder if folder.exists() else folder.parent
    try:
        free = f"{shutil.disk_usage(place).free} bytes are free on its disk"
    except OSError as why:
        free = f"its disk cannot be asked: {why}"
    return (
        f"Rank {trainer.args.process_index} could not save {str(folder)!r} ({free}): {type(error).__name__}: {error}. "
        "train(resume_from_checkpoint=True) resumes from the last checkpoint that is whole."
    )


def save_then_wait(original: Callable[..., None], self: Trainer, output_dir: str) -> None:
    """Extend ``_save_rng_state``, which writes the last file of all ranks: see 2 above."""
    # The mark (``save_to_json``) and the deletion of older checkpoints (``rotate_checkpoints``) follow.
    original(self, output_dir)
    self.accelerator.wait_for_everyone()
