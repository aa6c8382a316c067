"""Checkpoints that are damaged, cut off, renamed, linked, too large or made by an enemy are refused: which file, and why.

A refusal must come before anything is written or computed. So each attack runs against the function that a user calls, and
must end in an error that says which file is wrong. Settings, shared memory and compiled libraries are attacked in
test_hostile_state.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from frozen_runs import tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_zeropp import ZeroPPQuantConfig
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import FrozenFormat

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


class Bomb:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fail instead of waiting for a pipe that has no writer."""

    def give_up(*args):
        raise TimeoutError("the reader waits")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None], name: str = WEIGHTS) -> None:
    """Replace tensors of a safetensors file. None takes one out."""
    tensors = {**load_file(folder / name), **changes}
    tensors = {key: value.contiguous() for key, value in tensors.items() if value is not None}
    save_file(tensors, folder / name, metadata={"format": "pt"})


def split(folder: Path, **weight_map_changes) -> None:
    """Store the weights in two files with an index, whose ``weight_map`` may lie."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    halves = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        halves[f"model-{number * 2 // len(tensors) + 1}.safetensors"][name] = tensor
    for file, half in halves.items():
        save_file(half, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, half in halves.items() for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map | weight_map_changes}))


# ---- A packed checkpoint, read by ``from_pretrained``.


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a packed base."""
    folder = tmp_path_factory.mktemp("made")
    tiny_llama(num_hidden_layers=1).save_pretrained(folder / "dense")
    packed = ZeroPPQuantConfig(bits=4, pack_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=packed)
    model.save_pretrained(folder / "packed")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of what ``made`` holds, to damage."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def read_by_transformers(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder)


def cut_off(folder: Path, name: str = WEIGHTS) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-1000])


def lie_about_the_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{}")


def rename_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb(folder.parent / "exploded")))


def become_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def name_a_pickle_in_the_index(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "weights.bin")
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {UP: "weights.bin"}}))


def link_out(folder: Path, name: str = WEIGHTS) -> None:
    (folder / name).rename(folder.parent / "elsewhere.safetensors")
    (folder / name).symlink_to(folder.parent / "elsewhere.safetensors")


def climb_out(folder: Path) -> None:
    split(folder)
    (folder / "model-2.safetensors").rename(folder.parent / "model-2.safetensors")
    text = (folder / INDEX).read_text().replace("model-2.safetensors", "../model-2.safetensors")
    (folder / INDEX).write_text(text)


def name_an_absolute_path(folder: Path) -> None:
    climb_out(folder)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace("../model-2", str(folder.parent / "model-2")))


def lose_a_file(folder: Path) -> None:
    split(folder)
    (folder / "model-2.safetensors").unlink()


def hold_a_tensor_twice(folder: Path) -> None:
    split(folder)
    tensors = load_file(folder / "model-1.safetensors") | load_file(folder / "model-2.safetensors")
    save_file(tensors, folder / "model-2.safetensors", metadata={"format": "pt"})


def change(name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, {name: new(load_file(folder / WEIGHTS)[name])})


def rename_a_weight(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    moved = {f"{UP[:-7]}_new.weight{suffix}": tensors[UP + suffix] for suffix in ("_codes", "_scales")}
    edit_tensors(folder, {UP + "_codes": None, UP + "_scales": None} | moved)


def say(**quantization) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        edit_json(folder / "config.json", quantization_config=config["quantization_config"] | quantization)

    return edit


class Attack(NamedTuple):
    damage: Callable[[Path], None]
    match: str  # in the message of the error


ATTACKS = {
    "a file cut off": Attack(cut_off, "model.safetensors' is cut off"),
    "a header longer than any file": Attack(lie_about_the_header, "model.safetensors' is cut off"),
    "a pickle named safetensors": Attack(rename_a_pickle, "model.safetensors' is cut off"),
    "a pickle in an index": Attack(name_a_pickle_in_the_index, "weights.bin' is not a safetensors file"),
    "a link out of the folder": Attack(link_out, "model.safetensors' leads out of its folder"),
    "an index that climbs out": Attack(climb_out, "model-2.safetensors"),
    "an index with an absolute path": Attack(name_an_absolute_path, "model-2.safetensors"),
    "a file of the index is missing": Attack(lose_a_file, "model-2.safetensors' cannot be opened"),
    "a tensor in two files": Attack(hold_a_tensor_twice, "Both .*model-1.* and .*model-2.* hold"),
    "no codes": Attack(change(UP + "_codes", lambda codes: None), "no file of the checkpoint holds .*weight_codes"),
    "no scales": Attack(change(UP + "_scales", lambda scales: None), "no file of the checkpoint holds .*weight_scales"),
    "codes are floats": Attack(change(UP + "_codes", torch.Tensor.float), "codes that are F32"),
    "scales are signed": Attack(change(UP + "_scales", lambda scales: scales.to(torch.int8)), "weight_scales is I8"),
    "a row of codes is missing": Attack(
        change(UP + "_codes", lambda codes: codes[1:]), "These are not a weight in 4 bits"
    ),
    "a scale of each row is missing": Attack(
        change(UP + "_scales", lambda scales: scales[:, :-1]), "These are not a weight"
    ),
    "scales are a number": Attack(change(UP + "_scales", lambda scales: scales[0, 0]), "These are not a weight"),
    "scales are NaN": Attack(
        change(UP + "_scales", lambda scales: torch.full_like(scales, 255)),
        f"damaged: {UP}_scales holds scales that are NaN",
    ),
    "other bits": Attack(say(bits=8), "not a weight in 8 bits"),
    "bits as text": Attack(say(bits="4"), "8 or 4 bits, got bits='4'"),
    "bits as a float": Attack(say(bits=4.0), "8 or 4 bits, got bits=4.0"),
    "an impossible block": Attack(say(block=0), "multiple of 32 from 32 to 4096, got 0"),
    "a block as a float": Attack(say(block=128.0), "multiple of 32 from 32 to 4096, got 128.0"),
    "a renamed weight": Attack(rename_a_weight, "does not fit"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_packed_checkpoint_is_refused(folder, attack):
    ATTACKS[attack].damage(folder / "packed")
    with pytest.raises(ValueError, match=ATTACKS[attack].match):
        read_by_transformers(folder / "packed")
    assert not (folder / "exploded").exists()


def test_the_checkpoint_that_is_attacked_is_a_good_one(folder):
    split(folder / "packed")
    read_by_transformers(folder / "packed")


def test_transformers_is_kept_from_pickles_of_packed_weights(folder):
    become_a_pickle(folder / "packed")
    with pytest.raises(ValueError, match="pytorch_model.bin' is not a safetensors file"):
        read_by_transformers(folder / "packed")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"skip": ["lm_head"]}, r"holds lm_head.weight_codes, but by config.json .* says skip=\['lm_head'\]"),
        ({"pack_embeddings": False}, r"weight_codes, but by config.json .* says skip=\[\] and pack_embeddings=False"),
        ({"skip": "lm_head"}, "skip must be"),
        ({"pack_embeddings": "no"}, "pack_embeddings must be true or false"),
    ],
)
def test_a_config_that_hides_packed_weights_is_refused(folder, settings, match):
    """Transformers would fill the dense weight that is not there with random values."""
    say(**settings)(folder / "packed")
    with pytest.raises(ValueError, match=match):
        read_by_transformers(folder / "packed")


def test_the_links_of_the_hub_cache_are_followed(folder):
    snapshot, blobs = folder / "models--a--b/snapshots/0123", folder / "models--a--b/blobs"
    shutil.copytree(folder / "packed", snapshot)
    blobs.mkdir()
    for file in snapshot.iterdir():
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    read_by_transformers(snapshot)


@pytest.mark.parametrize(("rows", "width"), [(3, 2), (4, 0), (4, 4)])
def test_operators_refuse_scales_of_another_size(rows, width):
    """Compiled kernels get addresses, and would read what lies behind the tensor."""
    format = FrozenFormat(4)
    codes, _ = frozen_format.pack(torch.ones(4, 64), format)
    scales = torch.zeros(rows, width, dtype=torch.uint8)
    with pytest.raises(ValueError, match="xpected scales of shape .4, 2."):
        frozen_format.unpack(codes, scales, 64, format, torch.float32)
    with pytest.raises(ValueError, match="xpected scales of shape .4, 2."):
        frozen_format.matmul(torch.ones(1, 64), codes, scales, 64, format)
