"""Every seam of the table holds with the installed libraries, and is used where the table says."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize("module", sorted({module for seam in SEAMS for module in seam.used_by}))
def test_what_is_done_with_a_name_stands_in_its_row(module):
    """A name that a module sets or calls has a row that says so, and so its check tries it."""
    relations: dict[str, set[Relation]] = {}
    for seam in SEAMS:
        for name in seam.names if module in seam.used_by else ():
            relations.setdefault(name, set()).add(seam.relation)
    # A function that another library's code reads may be replaced, or called as that code does.
    settable = {Relation.SET, Relation.READS}
    assert {name for name in names_set(module) & relations.keys() if not relations[name] & settable} == set()
    assert {name for name in names_called(module) & relations.keys() if relations[name] == {Relation.HAS}} == set()


def names_set(module: str) -> set[str]:
    """Attributes that a module assigns to or deletes, but for those of ``self`` in its own classes."""
    tree = ast.parse(source_of(module))
    in_classes = {id(node) for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in ast.walk(each)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if not (id(node) in in_classes and ast.unparse(node.value) == "self")
    }


def names_called(module: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source_of(module))) if isinstance(node, ast.Call))
    return {function.attr for function in calls if isinstance(function, ast.Attribute)}


def source_of(module: str) -> str:
    return (ROOT / "hf_zeropp" / Path(*module.split(".")).with_suffix(".py")).read_text()
