"""The table of seams agrees with the installed libraries and with our own code, and a name that moved is an error."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from hf_zeropp import compat
from hf_zeropp.compat import OLDEST, SEAMS, TESTED, MovedNameError, OldVersionError, Relation, Seam, check_seams
from hf_zeropp.compat.extend import extend

pytestmark = pytest.mark.one_rank

ROOT = Path(__file__).parent.parent


def test_versions_are_known_for_every_library():
    assert TESTED.keys() == {seam.library for seam in SEAMS}


@pytest.mark.parametrize("library", OLDEST)
def test_pip_and_the_release_notes_name_the_versions_of_the_table(library):
    oldest = ".".join(map(str, OLDEST[library]))
    told = re.search(rf'"{library}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert told == oldest and TESTED[library].startswith(oldest)
    notes = (ROOT / ".github/RELEASE_NOTES.md").read_text()
    required, tested = re.search(rf"^\| {library}\b[^|]*\|([^|]*)\|([^|]*)\|$", notes, re.MULTILINE).groups()
    assert required.strip() == f"{oldest} or newer"
    assert set(re.findall(r"\d+\.\d+", tested)) == set(re.findall(r"\d+\.\d+", TESTED[library]))


@pytest.mark.parametrize("library", OLDEST)
def test_an_older_version_is_an_error_that_says_what_to_install(monkeypatch, library):
    major, minor = OLDEST[library]
    versions = dict.fromkeys(OLDEST, "99.0")
    monkeypatch.setattr(compat, "version_of", versions.get)
    versions[library] = f"{major}.{minor - 1}.7"
    with pytest.raises(OldVersionError, match=f"^{library} {versions[library]} .* '{library}>={major}.{minor}'"):
        compat.check_versions(OLDEST)
    versions[library] = f"{major}.{minor}.0+cpu"
    compat.check_versions(OLDEST)


def test_the_package_is_not_imported_beside_an_older_library(tmp_path):
    """The error comes before any import that would fail by a name."""
    folder = tmp_path / "accelerate-1.4.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.4.0\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hf_zeropp"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "OldVersionError: accelerate 1.4.0 is older" in result.stderr


def test_the_table_needs_none_of_the_libraries():
    """Its modules are loaded alone: importing the package would import torch and Accelerate."""
    script = f"""
import importlib.util, sys, types
sys.modules["hf_zeropp"] = types.ModuleType("hf_zeropp")
sys.modules["hf_zeropp"].__path__ = [{str(ROOT / "hf_zeropp")!r}]
from hf_zeropp.compat import SEAMS, check_seams
check_seams()
assert SEAMS and not {set(TESTED)!r} & sys.modules.keys(), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class Holder:
    """Stands for a class of another library."""

    declared = 1

    def __init__(self) -> None:
        self.set_in_init = 1

    def method(self, first, second):
        def inner():
            return self.read_inside(keyword=1, other="a string")

        return inner

    @property
    def shown(self):
        return self.read_by_a_property

    @staticmethod
    def of_the_class():
        return global_that_is_read  # noqa: F821


class Slotted:
    __slots__ = ("open",)


def planted(owner: str, *names: str, relation: Relation = Relation.HAS, user: str = "frozen.weight", **fields) -> Seam:
    return Seam(owner, names, (user,), "A test needs it. If it moved: weights are wrong.", relation, **fields)


READ = ("read_inside", "keyword", "a string", "read_by_a_property", "global_that_is_read")
# Each case: a relation, an object (of this module where none is named), the names that must stand in that relation to it, and
# those that do not.
ASKED = [
    (Relation.HAS, "Holder", ("declared", "set_in_init", "shown"), []),
    (Relation.HAS, "Holder", ("declared", "gone"), ["gone"]),
    (Relation.HAS, "", ("Holder", "gone"), ["gone"]),
    (Relation.HAS, "NoSuchClass", ("anything",), ["anything"]),
    # ``shown`` became a property without a setter: it is there, and cannot be set. So it was with a name of torch 2.15.
    (Relation.SET, "Holder", ("declared", "set_in_init"), []),
    (Relation.SET, "Holder", ("declared", "shown", "gone"), ["gone", "shown"]),
    (Relation.SET, "Slotted", ("open", "__doc__"), ["__doc__"]),
    (Relation.SET, "", ("Holder",), []),  # a module lets all be set
    (Relation.SET, "torch.distributed:ReduceScatterOptions", ("asyncOp",), []),  # a type of an extension
    (Relation.CALLED, "Holder", ("method", "of_the_class"), []),
    (Relation.CALLED, "Holder", ("method", "declared", "gone"), ["declared", "gone"]),
    (Relation.READS, "Holder", READ, []),
    (Relation.READS, "Holder.method", ("read_inside", "declared"), ["declared"]),
    (Relation.READS, "", READ, []),
    (Relation.TAKES, "Holder.method", ("self", "first", "second"), []),
    (Relation.TAKES, "Holder.method", ("self", "second", "first"), ["self", "second", "first"]),
    (Relation.ACCEPTS, "Holder.method", ("second", "first"), []),
    (Relation.ACCEPTS, "Holder.method", ("first", "gone"), ["gone"]),
]


@pytest.mark.parametrize(("relation", "path", "names", "missing"), ASKED)
def test_what_is_missing_is_found(relation, path, names, missing):
    owner = path if ":" in path else f"{__name__}:{path}".removesuffix(":")
    assert planted(owner, *names, relation=relation).missing() == missing


def test_seams_are_asked_of_their_versions_alone():
    later = planted("somelib", "gone", since=(2, 13))
    earlier = planted("somelib", "gone", until=(2, 12))
    assert not later.applies_to("2.11.0+cpu") and later.applies_to("2.13.0") and later.applies_to("3.0")
    assert earlier.applies_to("2.11.0+cpu")
    assert not earlier.applies_to("2.12.0a0+git1f2e") and not earlier.applies_to("3.0")


@pytest.fixture
def library(monkeypatch):
    """A library with one module, of which we rely on a mark."""
    package, module = types.ModuleType("somelib"), types.ModuleType("somelib.core")
    package.__path__, package.__version__ = [], "7.1"
    module.ask = lambda tensor: getattr(tensor, "_is_loaded", False)
    module.ask.__module__ = "somelib.core"
    monkeypatch.setitem(sys.modules, "somelib", package)
    monkeypatch.setitem(sys.modules, "somelib.core", module)
    monkeypatch.setitem(TESTED, "somelib", "6.0")
    return module


def plant(monkeypatch, seam: Seam) -> None:
    monkeypatch.setattr(compat, "SEAMS", (*SEAMS, seam))


class Deprecated:
    """Like ``torch.distributed.reduce_op``: whoever looks at it is warned."""

    def __getattribute__(self, name: str) -> object:
        warnings.warn("it is deprecated", FutureWarning, stacklevel=2)
        return object.__getattribute__(self, name)


def test_what_a_library_deprecates_warns_no_user_of_this_package(monkeypatch, library):
    library.old = Deprecated()
    plant(monkeypatch, planted("somelib.core", "_is_loaded", relation=Relation.READS, is_silent=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_seams()


@pytest.mark.parametrize(
    "seam",
    [
        planted("somelib.core", "_was_loaded", relation=Relation.READS, is_silent=True),
        planted("somelib.core", "gone", is_silent=True),
        planted("somelib.core:ask", "other", relation=Relation.TAKES, is_silent=True),
        planted("somelib.moved", "anything", is_silent=True),
    ],
    ids=["not read", "not there", "other parameters", "no such module"],
)
def test_a_silent_name_that_moved_is_an_error_that_says_everything(monkeypatch, library, seam):
    plant(monkeypatch, seam)
    with pytest.raises(MovedNameError) as error:
        check_seams()
    parts = ["somelib 7.1", seam.names[0], "hf_zeropp.frozen.weight", "A test needs it.", "weights are wrong.", "6.0"]
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("user", ["fsdp.units", "comm.hop"])
def test_a_loud_name_is_an_error_before_training_if_all_training_relies_on_it(monkeypatch, library, user):
    plant(monkeypatch, planted("somelib.core", "gone"))  # only some training does, and meets the error of its own
    check_seams()
    plant(monkeypatch, planted("somelib.core", "gone", user=user))
    with pytest.raises(MovedNameError, match=rf"somelib 7.1 .* hf_zeropp.{user} .* Install one of them"):
        check_seams()


def test_every_way_into_the_package_checks_the_libraries_that_are_imported(monkeypatch, library):
    from hf_zeropp import ZeroPPCallback, ZeroPPPlugin

    plant(monkeypatch, planted("somelib.core", "gone", is_silent=True))
    for start in (ZeroPPPlugin, ZeroPPCallback):
        with pytest.raises(MovedNameError, match="somelib"):
            start()
    monkeypatch.delitem(sys.modules, "somelib")
    monkeypatch.delitem(sys.modules, "somelib.core")
    check_seams()


def test_a_function_is_extended_once_also_under_another_wrapper():
    def one_more(original, number):
        return original(number) + 1

    def ten_times(original, number):
        return 10 * original(number)

    module = types.SimpleNamespace(double=lambda number: 2 * number)
    extend(module, "double", one_more)
    ours = module.double
    module.double = functools.wraps(ours)(lambda number: ours(number))  # another library's, such as a profiler's
    extend(module, "double", one_more)
    assert module.double(3) == 7
    for _ in range(2):
        extend(module, "double", ten_times)
        extend(module, "double", one_more)
        assert module.double(3) == 70
