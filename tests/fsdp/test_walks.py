"""The README of the package says in which files a gather, a reduction and an agreement read. What runs in steps must agree."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from harness import run_ranks
from toy import POLICIES, make_lm, shard, train

import hf_zeropp
from hf_zeropp import apply_zeropp

PACKAGE = Path(hf_zeropp.__file__).parent
PRESETS = ("balanced", "exact", "min_traffic")
# The functions at which each walk begins: PyTorch, FSDP2, or another part of the package calls them.
ENTRIES = {
    "gather": {("fsdp/hooks.py", "before_forward"), ("fsdp/weights/gather.py", "__call__")},
    "reduction": {
        ("fsdp/gradients/reduce.py", "__call__"),
        ("fsdp/gradients/reduce.py", "drop_unwanted"),
        ("fsdp/gradients/reduce.py", "after_post_backward"),
        ("fsdp/gradients/gradient_decisions.py", "keeps_unreduced"),
        ("fsdp/gradients/gradient_decisions.py", "end_backward"),
    },
    "agreement": {("fsdp/questions.py", "ask")},
}
# Functions of other files that files of a walk call, and that a reader need not look up: their names say what they do.
CALLED = {
    "gather": {
        "ask of questions",
        "note of questions",
        "note_in_node of questions",
        "thawed of questions",
        "largest of agreement",
        "drain of drivers",
        "current_backward of backward_passes",
        "device_type of topology",
        "of of weight_stamp",
        "matches of weight_stamp",
        "take of fingerprint",
        "has_found of fingerprint",
        "record_event of comm_objects",
        "gather_dtype_of of param_shard",
        "grad_dtype_of of param_shard",
        "is_extension of param_shard",
        "structure of unit_gradients",
        "take of wire_buffers",
        "take_rounded of wire_buffers",
        "give of wire_buffers",
    },
    "reduction": {
        "ask of questions",
        "note of questions",
        "confirm of agreement",
        "device_type of topology",
        "take of wire_buffers",
        "give of wire_buffers",
    },
    "agreement": {"__len__ of drivers"},
}


def listed() -> dict[str, tuple[list[str], int]]:
    """Return the files of each walk, and the lines that the README gives them together."""
    found = {}
    pattern = r"^\| an? (\w+) \| ([^|]+) \| ([\d,]+) \|"
    for name, files, lines in re.findall(pattern, (PACKAGE / "README.md").read_text(), re.MULTILINE):
        found[name] = re.findall(r"`([\w/]+\.py)`", files), int(lines.replace(",", ""))
    return found


@contextmanager
def recording(name: str, walked: set[str]) -> Iterator[dict[str, set[str]]]:
    """Record the functions that run, by file, and of files outside of the walk those that files of the walk call."""
    seen: dict[str, set[str]] = defaultdict(set)
    entered: list[FrameType] = []

    def place(frame: FrameType | None) -> tuple[str, str]:
        path = Path(frame.f_code.co_filename) if frame is not None else Path()
        inside = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""
        return inside, "" if frame is None else frame.f_code.co_name

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and entered and entered[-1] is frame:
            entered.pop()
        if event != "call":
            return
        file, function = place(frame)
        if (file, function) in ENTRIES[name]:
            entered.append(frame)
        if entered and file.startswith(("fsdp/", "comm/")) and (file in walked or place(frame.f_back)[0] in walked):
            seen[file].add(function)

    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def walk(rank: int, name: str, files: list[str]) -> dict[str, set[str]]:
    """Return what runs in steps of each preset."""
    found: dict[str, set[str]] = defaultdict(set)
    for preset in PRESETS:
        model = shard(make_lm(), POLICIES["bf16"])
        apply_zeropp(model, {"preset": preset, "ranks_per_node": 2})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, rank, range(1))
        with recording(name, set(files)) as seen:
            train(model, optimizer, rank, range(2))
        for file, functions in seen.items():
            found[file] |= functions
    return dict(found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENTRIES)
def test_a_walk_reads_in_the_files_that_are_listed(name):
    files, num_lines = listed()[name]
    lengths = [len((PACKAGE / file).read_text().splitlines()) for file in files]
    assert 0.95 * num_lines <= sum(lengths) <= num_lines, f"the files of a {name} have {sum(lengths)} lines together"
    found: dict[str, set[str]] = defaultdict(set)
    for of_rank in run_ranks(walk, 4, name, files):
        for file, functions in of_rank.items():
            found[file] |= functions
    assert set(files) <= found.keys() | {"comm/disagreement.py"}, "these run, but for the words of errors"
    called = {f"{function} of {Path(file).stem}" for file in found.keys() - set(files) for function in found[file]}
    called -= {f"{function} of {Path(file).stem}" for file, function in ENTRIES[name]}
    assert {one for one in called if not one.startswith("<")} == CALLED[name]
