"""Settings, shared memory and compiled libraries that an enemy or an accident put there are refused.

Checkpoints are attacked in test_hostile_files.py.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_zeropp
from hf_zeropp import ZeroPPConfig
from hf_zeropp.comm import node_memory
from hf_zeropp.integrations.launch.command import launch
from hf_zeropp.ops import native

PACKAGE = Path(__file__).parent.parent / "hf_zeropp"

# ---- Settings.

SETTINGS = {
    "two megabytes": ("zeropp.yaml", "qgz_bits: 4\n" + "#" * 2**21, "more than 1048576 bytes"),
    "many levels of YAML": ("zeropp.yaml", "qgz_bits: " + "[" * 10**4, "nested too deeply"),
    "many levels of JSON": ("zeropp.json", "[" * 10**5, "nested too deeply"),
    "a tag that calls a function": ("zeropp.yaml", "!!python/object/apply:os.mkdir [exploded]", "not valid YAML"),
    "a date that does not exist": ("zeropp.yaml", "qgz_bits: 2000-99-99", "not valid YAML"),
    "a number of many digits": ("zeropp.json", '{"qgz_bits": ' + "9" * 5000 + "}", "not valid YAML or JSON"),
    "a list as preset": ("zeropp.yaml", "preset: [paper]", "preset must be one of"),
    "bytes that are not text": ("zeropp.yaml", b"\xff\xfe\x00", "Cannot read the ZeRO"),
}


@pytest.mark.parametrize("attack", SETTINGS)
def test_hostile_settings_are_refused_in_few_words(tmp_path, monkeypatch, attack):
    name, content, match = SETTINGS[attack]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=match) as raised:
        ZeroPPConfig.from_file(tmp_path / name)
    assert len(str(raised.value)) < 1000 and not (tmp_path / "exploded").exists()
    if isinstance(content, bytes) or name.endswith(".json") or attack == "a list as preset":
        return
    with pytest.raises(SystemExit, match="cannot read the config file"):  # Accelerate's file, with our block in it
        launch(["--config_file", str(tmp_path / name), "train.py"])


# ---- Memory that the ranks of a node share.

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd (Linux)")
NOBODY = 65534


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = node_memory._create(4096)
    yield descriptor
    os.close(descriptor)


@needs_memfd
def test_shared_memory_is_for_its_owner_alone(descriptor):
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600


@needs_memfd
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("through", ["an inherited descriptor", "this process"])
@pytest.mark.parametrize("mode", ["<", ">>"], ids=["read", "write"])
def test_another_user_cannot_open_shared_memory(descriptor, through, mode):
    """Neither through this process, nor through a descriptor that the other user's process was handed."""
    options = {"pass_fds": [descriptor], "capture_output": True, "text": True}
    process = os.getpid() if through == "this process" else "self"
    command = ["/bin/sh", "-c", f": {mode} /proc/{process}/fd/{descriptor}"]
    assert subprocess.run(command, **options).returncode == 0
    other = subprocess.run(command, **options, user=NOBODY, group=NOBODY, extra_groups=[])
    assert other.returncode != 0 and "denied" in other.stderr.lower()


@needs_memfd
@pytest.mark.parametrize("size", [0, 2048, 8192])
def test_shared_memory_cannot_be_resized(descriptor, size):
    """A rank that reads a page behind the end would be killed with a SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)
    assert node_memory._map(os.getpid(), descriptor, 4096)[:] == bytes(4096)


@needs_memfd
@pytest.mark.parametrize("kind", ["a file", "a memfd that is not sealed", "a memfd of another size"])
def test_nothing_else_is_mapped_as_shared_memory(tmp_path, kind):
    """The first rank may have died, and another process have its number."""
    (tmp_path / "file").write_bytes(bytes(4096))
    opened = {
        "a file": lambda: os.open(tmp_path / "file", os.O_RDWR),
        "a memfd that is not sealed": lambda: os.memfd_create("other"),
        "a memfd of another size": lambda: node_memory._create(1024),
    }[kind]()
    os.fchmod(opened, 0o600)
    if kind == "a memfd that is not sealed":
        os.ftruncate(opened, 4096)
    with pytest.raises(OSError):
        node_memory._map(os.getpid(), opened, 4096)
    os.close(opened)


# ---- Compiled libraries.


@pytest.fixture
def library_folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A package folder for libraries, empty, whose libraries are looked for anew."""
    (tmp_path / "package/_libs").mkdir(parents=True)
    monkeypatch.setattr(hf_zeropp, "__path__", [str(tmp_path / "package")])
    native.cpu_library.cache_clear()
    yield tmp_path / "package/_libs"
    native.cpu_library.cache_clear()


BUILT = native.library_path("cpu")
needs_library = pytest.mark.skipif(BUILT is None, reason="no compiled library in this install")


@needs_library
def test_a_library_in_the_working_directory_is_not_loaded(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "_libs", tmp_path / "hf_zeropp/_libs"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(BUILT, folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert native.library_path("cpu") == BUILT and Path(BUILT).is_absolute()


@needs_library
@pytest.mark.parametrize(
    "name", ["libzeropp_cpu.txt", "libzeropp_cpu.so.bak", "libzeropp_cpu.evil.so", "zeropp_cpu.so"]
)
def test_a_library_of_another_name_is_not_loaded(library_folder, name):
    shutil.copy(BUILT, library_folder / name)
    assert native.library_path("cpu") is None


@needs_library
def test_a_link_out_of_the_package_is_not_loaded(library_folder):
    elsewhere = library_folder.parent.parent / "elsewhere.so"
    shutil.copy(BUILT, elsewhere)
    (library_folder / Path(BUILT).name).symlink_to(elsewhere)
    library, reason = native.cpu_library()
    assert library is None and "leads out of the package's folder" in reason and str(elsewhere) in reason


@needs_library
def test_a_package_that_an_installer_linked_as_a_whole_loads(library_folder, monkeypatch):
    store = library_folder.parent.parent / "store/hf_zeropp"
    (store / "_libs").mkdir(parents=True)
    shutil.copy(BUILT, store / "_libs")
    (store / "__init__.py").touch()
    (library_folder / Path(BUILT).name).symlink_to(store / "_libs" / Path(BUILT).name)
    (library_folder.parent / "__init__.py").symlink_to(store / "__init__.py")
    monkeypatch.setattr(hf_zeropp, "__file__", str(library_folder.parent / "__init__.py"))
    assert native.cpu_library()[1] is None


# ---- No module of the package can load a pickle or run a file's code.

LOADERS = {"torch", "pickle", "yaml", "numpy", "np", "marshal", "dill", "cloudpickle", "joblib", "shelve"}
FORBIDDEN_IMPORTS = LOADERS - {"torch", "yaml", "numpy"}


def ways_to_run_code(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (name for name in names if name.partition(".")[0] in FORBIDDEN_IMPORTS)
        elif isinstance(node, ast.Call):
            owner, name = getattr(getattr(node.func, "value", None), "id", ""), getattr(node.func, "attr", "")
            if owner in LOADERS and ("load" in name and name != "safe_load"):
                yield f"{owner}.{name}"
            if getattr(node.func, "id", "") in ("eval", "exec"):
                yield node.func.id
            yield from (
                "trust_remote_code"
                for word in node.keywords
                if word.arg == "trust_remote_code" and getattr(word.value, "value", None) is not False
            )


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_runs_code_from_files(path):
    assert list(ways_to_run_code(ast.parse(path.read_text()))) == []


def test_the_search_for_such_modules_can_fail():
    source = "import pickle\ntorch.load(x)\nyaml.unsafe_load(x)\neval(x)\nf(trust_remote_code=True)\nyaml.safe_load(x)"
    assert len(list(ways_to_run_code(ast.parse(source)))) == 5
