"""The architecture holds: who imports whom, and who uses names that other libraries keep private."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_zeropp
from hf_zeropp.compat import SEAMS, TESTED

PACKAGE = Path(__file__).parent.parent.parent / "hf_zeropp"


def layers_of_the_guide() -> list[str]:
    """Return the packages in the order in which the table of hf_zeropp/README.md has them."""
    table = (PACKAGE / "README.md").read_text().partition("## Packages")[2].partition("\n\nFour files")[0]
    first_cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in first_cells for name in re.findall(r"`(\w+)(?:\.py|/)`", cell)]


# Each package (or module of the top level) imports only from those that stand above it, and from itself.
LAYERS = layers_of_the_guide()
# A Trainer that feeds an engine imports what serves it, in a function. No other module imports from below.
LAZY = {"integrations.trainer": {"rollouts.callback", "rollouts.trl_sync"}}
# The only packages that import these at module level: everything else works without them.
HUGGING_FACE = {"accelerate", "transformers", "peft", "trl", "datasets"}
USES_HUGGING_FACE = ("integrations", "rollouts")
# Modules that import a library which the tests do without.
OPTIONAL = {
    "integrations.axolotl": "axolotl",
    "rollouts.vllm_transfer": "vllm",
    "ops.triton_device": "triton",
    "ops.triton_kernels": "triton",
}
# These are documented, in spite of the underscore: of named tuples, of ctypes.CDLL, and of os.
DOCUMENTED = {"_fields", "_replace", "_name", "_exit"}
# Functions whose second argument is the name of an attribute.
GETTERS = {"getattr", "hasattr", "setattr", "extend"}


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
        if package_of(other) not in allowed and other not in LAZY.get(name, ())
    }
    assert imported == set()


@pytest.mark.parametrize("name", LAZY)
def test_lazy_imports_stand_in_functions(name):
    at_module_level = ast.Module(
        [node for node in MODULES[name].body if not isinstance(node, ast.ClassDef | ast.FunctionDef)], []
    )
    assert own_imports(at_module_level) & LAZY[name] == set()
    assert own_imports(MODULES[name]) >= LAZY[name]


def test_no_circles():
    """Modules of one package import each other one way as well, also for annotations."""
    waiting = {name: own_imports(tree) - {name} - LAZY.get(name, set()) for name, tree in MODULES.items()}
    while ready := [name for name, others in waiting.items() if not others & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert waiting == {}


@pytest.mark.parametrize("name", [name for name in MODULES if package_of(name) not in USES_HUGGING_FACE])
def test_only_integrations_and_rollouts_import_hugging_face(name):
    assert {package_of(other) for other in imported_modules(MODULES[name])} & HUGGING_FACE == set()


# No module can load a pickle, or run a file's code.

PICKLES = {"pickle", "marshal", "dill", "cloudpickle", "joblib", "shelve"}


def ways_to_run_code(tree: ast.Module) -> set[str]:
    found = PICKLES & {package_of(name) for name in imported_modules(tree)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        is_loader = package_of(name) in ("torch", "yaml", "numpy", "np") and "load" in name.rpartition(".")[2]
        trusts = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
        if name in ("eval", "exec") or (is_loader and name != "yaml.safe_load"):
            found.add(name)
        found |= {"trust_remote_code" for value in trusts if ast.unparse(value) != "False"}
    return found


@pytest.mark.parametrize("name", MODULES)
def test_no_module_runs_code_from_files(name):
    assert ways_to_run_code(MODULES[name]) == set()


def test_the_search_for_such_modules_can_fail():
    source = "import pickle\ntorch.load(x)\nyaml.unsafe_load(x)\neval(x)\nf(trust_remote_code=True)\nyaml.safe_load(x)"
    assert len(ways_to_run_code(ast.parse(source))) == 5


# Private names of other libraries: each is a seam, in the table of hf_zeropp.compat.


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def known_names(module: str) -> set[str]:
    """Names in the entries of the table that ``module`` may use, and on the ways to their owners."""
    seams = [seam for seam in SEAMS if module in seam.used_by]
    owners = {part for seam in seams for part in seam.owner.replace(":", ".").split(".")}
    return owners.union(*(seam.names for seam in seams))


def names_defined_in(*trees: ast.Module) -> set[str]:
    """Functions, classes, variables and attributes of ``self``."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", None) in ("self", "cls") else set()
    return names


def private_attributes(tree: ast.Module) -> set[str]:
    """Private names of attributes, by dot or by ``getattr`` and its kin."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        is_getter = isinstance(node, ast.Call) and getattr(node.func, "id", None) in GETTERS
        if is_getter and isinstance(node.args[1], ast.Constant):
            found.add(node.args[1].value)
    return {name for name in found if is_private(name)}


@pytest.mark.parametrize("name", MODULES)
def test_private_imports_and_attributes_are_seams(name):
    foreign = [other for other in imported_modules(MODULES[name]) if not other.startswith("hf_zeropp")]
    imported = {part for other in foreign for part in other.split(".") if is_private(part)}
    within = [MODULES[name], *(MODULES[other] for other in own_imports(MODULES[name]))]
    attributes = private_attributes(MODULES[name]) - names_defined_in(*within) - DOCUMENTED
    assert (imported | attributes) - known_names(name) == set()


@pytest.mark.parametrize("name", MODULES)
def test_private_methods_that_are_overridden_are_seams(name):
    """Another library's base class calls them: if it calls others, ours are not called any more."""
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    module = importlib.import_module(f"hf_zeropp.{name}")
    classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    overridden = {
        method
        for each in classes
        for method, value in vars(each).items()
        for base in each.__mro__[1:]
        if is_private(method)
        and inspect.isfunction(value)
        and method in vars(base)
        and package_of(base.__module__) in TESTED
    }
    assert overridden - known_names(name) == set()


@pytest.mark.parametrize("name", MODULES)
def test_nothing_private_of_another_module_is_imported(name):
    within = [other for other in imported_modules(MODULES[name]) if other.startswith("hf_zeropp")]
    assert [other for other in within if is_private(other.rsplit(".", 1)[-1])] == []


def test_the_scan_can_fail():
    tree = ast.parse("import torch._new\ntorch.Tensor._newer\ngetattr(x, '_newest', None)")
    assert private_attributes(tree) == {"_newer", "_newest"}
    assert "torch._new" in imported_modules(tree)
    assert not {"_new", "_newer", "_newest"} & known_names("frozen.weight")


def test_the_package_lists_its_public_names():
    """``dir(hf_zeropp)`` has the names that are imported on first use, and none that the package imports for itself."""
    names = [name for name in dir(hf_zeropp) if not name.startswith("__")]
    assert names == sorted(hf_zeropp.__all__)
