"""What ranks write in a trial of ``hf-zeropp tune`` is taken back, whichever library writes it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_zeropp.integrations.tune.traces import trace, undo


def listing(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write_everywhere(rank: int, folder: str, place: str) -> list[str]:
    os.chdir(place)
    trace(Path(folder))
    os.makedirs("new/deep", exist_ok=True)
    with open(f"new/deep/{rank}.txt", "w") as file:
        file.write("x")
    with open("kept.txt", "a") as file:
        file.write(f"rank {rank}")
    Path("other.txt").write_text("other")
    os.truncate("shortened.txt", 1)
    with contextlib.suppress(FileExistsError):  # the other rank has made it
        os.symlink("of_user", "link")
    Path("link/inside.txt").write_text("written behind a link")
    Path("to_nothing").write_text("written to a file that a link names")
    torch.save({"a": torch.ones(1)}, "written_by_cpp.pt")
    with torch.profiler.profile() as profile:
        torch.ones(1)
    profile.export_chrome_trace(f"profile_{rank}.json")
    with open(f"temporary_{rank}", "w"):
        pass
    os.replace(f"temporary_{rank}", "atomic.txt")
    said = []
    for forbidden in (
        lambda: os.remove("user.txt"),
        lambda: os.rename("user.txt", "gone.txt"),
        lambda: sys.audit("shutil.rmtree", "user.txt"),  # before Python 3.11 it has this argument alone
    ):
        with pytest.raises(PermissionError) as error:
            forbidden()
        said.append(str(error.value))
    return said


def test_what_ranks_write_is_taken_back(tmp_path: Path) -> None:
    place, folder = tmp_path / "place", tmp_path / "folder"
    (place / "of_user").mkdir(parents=True)
    folder.mkdir()
    for name in ("kept.txt", "other.txt", "atomic.txt", "user.txt", "shortened.txt", "of_user/inside.txt"):
        (place / name).write_text(name)
    (place / "to_nothing").symlink_to("nothing")
    before, began_s = listing(place), time.time()
    said = run_ranks(write_everywhere, 2, str(folder), str(place))
    assert all("'" + str(place / "user.txt") in message for message in said[0])
    written = {path.name for path in place.rglob("*")}
    assert {"new", "0.txt", "1.txt", "written_by_cpp.pt", "nothing", "profile_0.json"} <= written
    assert (place / "atomic.txt").read_text() == ""
    assert undo(folder, began_s) == []
    assert listing(place) == before
    assert {path.name for path in place.iterdir()} == {name.partition("/")[0] for name in before} | {"to_nothing"}


def save_adapters(rank: int, folder: str, place: str) -> None:
    os.chdir(place)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4))
    adapter = get_peft_model(layers, LoraConfig(target_modules=["0"]))
    trace(Path(folder))
    adapter.save_pretrained("adapter")
    torch.save({}, f="by_name.pt")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    tokenizer.save_pretrained(save_directory="adapter")
    adapter.save_pretrained("new")


def test_an_adapter_of_the_user_is_put_back(tmp_path: Path) -> None:
    """PEFT has bound ``save_file`` by name before the trial begins, and tokenizers write from Rust."""
    place, folder = tmp_path / "place", tmp_path / "folder"
    for each in (place / "adapter", folder):
        each.mkdir(parents=True)
    (place / "by_name.pt").write_text("mine")
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        (place / "adapter" / name).write_text("mine")
    before, began_s = listing(place), time.time()
    run_ranks(save_adapters, 1, str(folder), str(place))
    for path in place.rglob("*.*"):
        assert path.name == "README.md" or path.read_bytes() != b"mine"
    assert (place / "new").exists()
    assert undo(folder, began_s) == []
    assert listing(place) == before and not (place / "new").exists()
