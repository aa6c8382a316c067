"""The architecture holds: who imports whom (DESIGN 7), and who touches what PyTorch and Accelerate keep private."""

from __future__ import annotations

import ast
import ctypes
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel

from hf_zeropp.ops.format import Part

PACKAGE = Path(__file__).parent.parent / "hf_zeropp"

# Each package (or module of the top level) imports only from those that stand above it, and from itself.
LAYERS = [
    "config",
    "sizes",
    "ops",
    "traffic",
    "comm",
    "fsdp",
    "frozen",
    "estimate",
    "plan",
    "apply",
    "generation",
    "integrations",
    "cli",
]
# The only package that imports these at module level: everything else works without them.
HUGGING_FACE = {"accelerate", "transformers", "peft", "trl", "datasets"}
# Private modules of PyTorch that are imported outside of units.py: a tensor subclass needs both.
PRIVATE_IMPORTS = {"frozen.weight": {"torch.distributed.tensor._utils", "torch.utils._pytree"}}
# Private names of others that are used outside of units.py, where those of FSDP2 stand: in which module, and who has them.
FOREIGN_PRIVATE: dict[str, dict[str, object]] = {
    "comm.hop": {"_base": torch.Tensor},  # the buffer behind a slice of it
    "ops.format": {"_fields": Part},  # public, whatever its name: of every named tuple
    "fsdp.reduce_scatter": {"_local_tensor": DTensor},  # `to_local` without autograd
    "generation": {"_has_unfinished_sequences": GenerationMixin},  # which ranks must agree on another token
    "integrations.accelerate": {"_shared_state": AcceleratorState},  # a plugin for a state that exists
    "integrations.accelerate_frozen": {"_prepare_fsdp2": Accelerator},  # sees a model and its optimizers together
    "integrations.pretrained_shape": {
        "_no_split_modules": PreTrainedModel
    },  # what Accelerate wraps, before there is anything to wrap
    "ops.kernels": {"_name": ctypes.CDLL},  # the path of a loaded library
    "frozen.weight": {  # a tensor subclass has no public way to any of these
        "_C": torch,
        "_disabled_torch_function_impl": torch._C,
        "_make_wrapper_subclass": torch.Tensor,
        "_schema": torch.ops.aten.add.Tensor,
        "_unsafe_view": torch.ops.aten,
    },
}
# Marks on our tensors that others ask for (not to initialize them anew; to take them for parameters): in which module.
READ_BY_OTHERS = {"_is_hf_initialized": transformers.modeling_utils, "_is_param": torch.nn.parameter}


def modules() -> dict[str, ast.Module]:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = modules()


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Full names: ``from a.b import c`` gives a.b.c, and a.b as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the layer"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str:
    return name.partition(".")[0]


def own_imports(tree: ast.Module) -> set[str]:
    """Modules of this package that a module imports, wherever in it; a package stands for its ``__init__``."""
    names = {name.removeprefix("hf_zeropp.") for name in imported_modules(tree) if name.startswith("hf_zeropp.")}
    found = names & MODULES.keys()
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def test_every_package_has_a_layer():
    assert sorted(LAYERS) == sorted({package_of(name) for name in MODULES})


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_upwards(layer):
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    imported = {
        f"{name} imports {other}"
        for name, tree in MODULES.items()
        if package_of(name) == layer
        for other in own_imports(tree)
        if package_of(other) not in allowed
    }
    assert imported == set()


def test_no_circles():
    """Modules of one package import each other one way as well, also for annotations."""
    waiting = {name: {other for other in own_imports(tree) if other != name} for name, tree in MODULES.items()}
    while ready := [name for name, others in waiting.items() if not others & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert waiting == {}


def test_the_import_test_can_fail():
    tree = ast.parse("def f():\n    from hf_zeropp import apply\n    from hf_zeropp.cli import main")
    assert own_imports(tree) == {"apply", "cli"}


@pytest.mark.parametrize("name", [name for name in MODULES if package_of(name) != "integrations"])
def test_only_integrations_import_hugging_face(name):
    assert {package_of(other) for other in imported_modules(MODULES[name])} & HUGGING_FACE == set()


@pytest.mark.parametrize("name", [name for name in MODULES if name != "fsdp.units"])
def test_only_units_imports_private_names(name):
    def is_private(part: str) -> bool:
        return part.startswith("_") and not part.startswith("__")

    foreign = [other for other in imported_modules(MODULES[name]) if not other.startswith("hf_zeropp")]
    private = {other for other in foreign if any(map(is_private, other.split(".")))}
    known = PRIVATE_IMPORTS.get(name, set())
    assert {other for other in private if not any(other.startswith(module) for module in known)} == set()
    within = [other for other in imported_modules(MODULES[name]) if other.startswith("hf_zeropp")]
    assert [other for other in within if is_private(other.rsplit(".", 1)[-1])] == [], "private to another module"


def names_of_our_own() -> set[str]:
    """Functions, classes, variables and attributes of ``self`` that the package itself defines."""
    names = set()
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if getattr(node.value, "id", None) in ("self", "cls") else set()
    return names


def private_attributes(tree: ast.Module) -> set[str]:
    """Private names read as attributes, by dot or by ``getattr`` and ``hasattr``."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        is_getter = isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr")
        if is_getter and isinstance(node.args[1], ast.Constant):
            found.add(node.args[1].value)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "fsdp.units"])
def test_private_names_of_others_are_known(name):
    foreign = private_attributes(MODULES[name]) - names_of_our_own()
    torch_foreach = {attribute for attribute in foreign if attribute.startswith("_foreach_")}  # stable, if undocumented
    assert foreign - torch_foreach == FOREIGN_PRIVATE.get(name, {}).keys()


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in FOREIGN_PRIVATE for name in FOREIGN_PRIVATE[module]]
)
def test_private_names_of_others_are_there(module, name):
    """A release that moves one fails here first, with a name to look for. Behaviour is tested where it is used."""
    owner = FOREIGN_PRIVATE[module][name]
    assert hasattr(owner, name), f"{owner} has no {name} any more, which {module}.py uses"


@pytest.mark.parametrize("name", READ_BY_OTHERS)
def test_marks_are_read(name):
    assert f'"{name}"' in inspect.getsource(READ_BY_OTHERS[name]), f"{READ_BY_OTHERS[name]} does not ask for {name}"


def test_signatures_of_replaced_functions():
    """Ours stand in for these, and are called with what theirs take."""
    unfinished = inspect.signature(GenerationMixin._has_unfinished_sequences)
    assert list(unfinished.parameters) == ["self", "this_peer_finished", "synced_gpus", "device"]
    prepare = inspect.signature(Accelerator._prepare_fsdp2)
    assert [parameter.kind.name for parameter in prepare.parameters.values()] == [
        "POSITIONAL_OR_KEYWORD",
        "VAR_POSITIONAL",
    ]
