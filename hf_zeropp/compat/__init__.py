"""Names of other libraries that this package relies on although those libraries do not promise to keep them.

FSDP2, Accelerate, Transformers, PEFT, TRL and vLLM offer no public way to some of what ZeRO++ needs. Each such place is a *seam*.
All seams stand in one table here (``SEAMS``; pytorch.py, hugging_face.py and inference.py are its parts), so that a new release
of a library can be checked against it.

When a release renames or drops a name, most seams fail at once, with an ImportError or AttributeError that says what is
missing. Some do not: an attribute that is set and not read any more, a function that is replaced and not called any more, a
mark that no code asks for. Training would go on, with wrong gradients, with stale weights, or without ZeRO++. Those seams are
marked *silent*. ``check_seams`` asserts them at start-up, for the libraries that are imported. It also asserts the seams to
FSDP2 that are not silent, since all training relies on them: a newer PyTorch is then refused with a remedy when a model is
sharded, and not by an AttributeError in the first backward pass.

A new seam gets an entry; tests/style/test_layers.py fails where a private name of another library is used without one. A public
name that a module of this package imports at its top needs none, because the import is its check. This package imports none of
these libraries, and nothing else of hf_zeropp.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterable
from importlib import metadata

from hf_zeropp.compat.hugging_face import HUGGING_FACE
from hf_zeropp.compat.inference import INFERENCE
from hf_zeropp.compat.pytorch import PYTORCH
from hf_zeropp.compat.seam import Relation, Seam, numbers_of

SEAMS: tuple[Seam, ...] = (*PYTORCH, *HUGGING_FACE, *INFERENCE)

# The oldest versions that work. pyproject.toml says the same to pip, which does not ask when another version is installed later.
OLDEST = {
    "torch": (2, 11),
    "accelerate": (1, 15),
    "transformers": (5, 16),
    "peft": (0, 18),
    "trl": (0, 29),
}
REQUIRED = ("torch", "accelerate", "transformers")
"""Libraries that every use of this package imports."""

# The versions that the tests of this package were run with (scripts/test_versions.sh).
TESTED = {
    "torch": "2.11, 2.12, 2.13, 2.14 and 2.15",
    "accelerate": "1.15",
    "transformers": "5.16 and 5.24",
    "peft": "0.18 and 0.21",
    "trl": "0.29 and 1.16",
    "vllm": "0.30",  # its engine; 0.32 was only installed beside the other tests
}


class MovedNameError(RuntimeError):
    """An installed library has renamed or dropped a name that this package relies on."""


class OldVersionError(ImportError):
    """An installed library is older than this package supports."""


def check_versions(libraries: Iterable[str] = REQUIRED) -> None:
    """Assert that libraries are not too old.

    Raises:
        OldVersionError: one is. The message says what to install.
    """
    for library in libraries:
        oldest = ".".join(map(str, OLDEST[library]))
        if not is_at_least(library, OLDEST[library]):
            raise OldVersionError(
                f"{library} {version_of(library)} is older than this version of hf-zeropp supports: expected {oldest} or newer. "
                f"Install it: pip install '{library}>={oldest}'. Tested: {TESTED[library]}."
            )


def check_seams() -> None:
    """Assert the versions of the libraries that are imported, all silent seams, and all that training relies on.

    A call takes milliseconds.

    Raises:
        MovedNameError: a library has renamed or dropped a name.
        OldVersionError: a library is too old.
    """
    check_versions(library for library in OLDEST if library in sys.modules)
    for seam in SEAMS:
        # A library that is not imported is not used, and importing it here would take seconds. The check is repeated
        # wherever an integration starts, so a library that is imported later is seen then.
        is_asserted = (seam.is_silent or seam.serves_training) and seam.library in sys.modules
        if is_asserted and seam.applies_to(version_of(seam.library)) and (missing := _missing(seam)):
            raise MovedNameError(_message(seam, missing))


def _missing(seam: Seam) -> list[str]:
    """Return the names that are not as expected; none where the owner's module exists and is not imported yet."""
    if seam.module in sys.modules:
        return seam.missing()
    # Looking for a module imports the packages around it, so it is looked for only where these are imported already.
    is_parent_imported = seam.module.rpartition(".")[0] in sys.modules
    is_gone = is_parent_imported and importlib.util.find_spec(seam.module) is None
    return list(seam.names) if is_gone else []


def _message(seam: Seam, missing: list[str]) -> str:
    names, owner = ", ".join(map(repr, missing)), seam.owner.replace(":", ".")
    what = {
        Relation.HAS: f"{owner} has no {names}",
        Relation.CALLED: f"{owner} has no function {names}",
        Relation.SET: f"objects of {owner} do not let {names} be set",
        Relation.READS: f"{owner} does not use {names}",
        Relation.TAKES: f"the parameters of {owner} are not {names}",
        Relation.ACCEPTS: f"{owner} has no parameter {names}",
    }[seam.relation]
    users = " and ".join(f"hf_zeropp.{module}" for module in seam.used_by)
    return (
        f"{seam.library} {version_of(seam.library)} does not fit this version of hf-zeropp: {what}, and {users} relies on it. "
        f"{seam.note} So ZeRO++ does not start. Tested versions of "
        f"{seam.library}: {TESTED[seam.library]}. Install one of them, or a newer hf-zeropp."
    )


def is_at_least(library: str, release: tuple[int, ...]) -> bool:
    """Whether this version of a library, or a later one, is installed."""
    return numbers_of(version_of(library), len(release)) >= release


# The answer is cached, because it is read from a file of the installed package, and every seam asks for it.
@functools.cache
def version_of(library: str) -> str:
    """Return the version of a library that is imported or installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # built from source, or vendored
        return str(getattr(sys.modules[library], "__version__", "0"))
