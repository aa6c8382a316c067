"""Every seam of the table holds with the installed libraries, and is used where the table says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from hf_zeropp import compat
from hf_zeropp.compat import SEAMS, Relation, Seam

ROOT = Path(__file__).parent.parent.parent


def label(seam: Seam) -> str:
    return f"{seam.owner} {seam.relation.value} {seam.names[0]}"


@pytest.mark.parametrize("seam", SEAMS, ids=label)
def test_every_seam_holds_with_the_installed_versions(seam):
    if seam.library == "vllm":  # optional, with pins of its own: scripts/test_vllm.sh installs it
        pytest.importorskip("vllm")
    if not seam.applies_to(compat.version_of(seam.library)):
        pytest.skip("other versions of the library have it")
    importlib.import_module(seam.module)
    assert seam.missing() == []


@pytest.mark.parametrize("seam", SEAMS, ids=label)
def test_every_seam_is_used_where_the_table_says(seam):
    """Each name by one of the modules, and each module has one of the names."""
    # Parameters are passed by position, so it is the function that our code names.
    names = {seam.owner.split(".")[-1].split(":")[-1]} if seam.relation is Relation.TAKES else set(seam.names)
    words = {module: set(re.findall(r"\w+", source_of(module))) for module in seam.used_by}
    assert names <= set.union(*words.values())
    assert [module for module in words if not names & words[module]] == []


def source_of(module: str) -> str:
    return (ROOT / "hf_zeropp" / Path(*module.split(".")).with_suffix(".py")).read_text()
