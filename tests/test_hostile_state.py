"""Settings, residuals, shared memory and compiled libraries that an enemy or an accident put there are refused.

Checkpoints are attacked in test_hostile_files.py.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_zeropp
from hf_zeropp import ZeroPPConfig, ops
from hf_zeropp.comm import node_memory
from hf_zeropp.fsdp.error_feedback import LossScale, Residual
from hf_zeropp.fsdp.residual_state import load_residuals, save_residuals, state_file
from hf_zeropp.integrations.launch import launch
from hf_zeropp.ops import native
from hf_zeropp.ops.format import Segment, WireLayout

PACKAGE = Path(__file__).parent.parent / "hf_zeropp"

# ---- Settings.

ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 7)
)
SETTINGS = {
    "two megabytes": ("zeropp.yaml", "qgz_bits: 4\n" + "#" * 2**21, "more than 1048576 bytes"),
    "lists of lists of aliases": ("zeropp.yaml", ALIASES + "qgz_bits: *a6\n", "aliases are written out"),
    "many levels of YAML": ("zeropp.yaml", "qgz_bits: " + "[" * 10**4, "nested too deeply"),
    "many levels of JSON": ("zeropp.json", "[" * 10**5, "nested too deeply"),
    "a tag that calls a function": ("zeropp.yaml", "!!python/object/apply:os.mkdir [exploded]", "no valid YAML"),
    "a date that does not exist": ("zeropp.yaml", "qgz_bits: 2000-99-99", "no valid YAML"),
    "a number of many digits": ("zeropp.json", '{"qgz_bits": ' + "9" * 5000 + "}", "no valid YAML or JSON"),
    "a list as preset": ("zeropp.yaml", "preset: [paper]", "preset must be one of"),
    "bytes that are no text": ("zeropp.yaml", b"\xff\xfe\x00", "Cannot read the ZeRO"),
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


# ---- Residuals of error feedback: a file that cannot be trusted starts them at zero, with a log line.

LAYOUT = WireLayout([Segment(256, 8)], 128, torch.float32)
NUM_NODES = 2
TOPOLOGY = SimpleNamespace(world_size=4, ranks_per_node=2)
UNIT = "layers.0"
KEY = f"{UNIT}:0"


def make_reduce() -> SimpleNamespace:
    """Stand in for a comm object of reductions, with a residual of ones."""
    residual = Residual(ZeroPPConfig(qgz_error_feedback="full"), LossScale())
    wire = ops.quantize(torch.ones(NUM_NODES * 256), LAYOUT)
    residual.restore([wire], {"kinds": [LAYOUT.spec], "scale": 1.0, "num_steps": 3}, torch.device("cpu"))
    unit = SimpleNamespace(name=UNIT, trainable=True, device_type="cpu")
    hops = SimpleNamespace(cross_hop=SimpleNamespace(size=NUM_NODES))
    return SimpleNamespace(residual=residual, unit=unit, hops=hops)


def rewrite(path: Path, new: Callable[[torch.Tensor], torch.Tensor] = lambda wire: wire, **changes) -> None:
    """Store another wire, and other entries of the metadata: of the unit, or ``file`` and ``world`` of the whole."""
    with safe_open(path, "pt") as file:
        state = json.loads(file.metadata()["zeropp"])
    for name, value in changes.items():
        (state if name in state else state["units"][UNIT])[name] = value
    save_file({KEY: new(load_file(path)[KEY]).contiguous()}, path, metadata={"zeropp": json.dumps(state)})


def set_metadata(text: str) -> Callable[[Path], None]:
    return lambda path: save_file(load_file(path), path, metadata={"zeropp": text})


def link_out(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere.safetensors")
    path.symlink_to(path.parent.parent / "elsewhere.safetensors")


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damage_scales(wire: torch.Tensor) -> torch.Tensor:
    wire[: LAYOUT.parts[0].codes] = 255
    return wire


RESIDUALS = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read .* is cut off"),
    "no safetensors": (lambda path: path.write_bytes(b"\x80\x04K\x01."), "cannot be read .* is cut off"),
    "a link out of the checkpoint": (link_out, "cannot be read .* leads out of its folder"),
    "a pipe": (become_a_pipe, "cannot be read .* is no regular file"),
    "of another rank": (lambda path: rewrite(path, file="zeropp_0_rank_1.safetensors"), "was saved under another name"),
    "of another model": (
        lambda path: rewrite(path, file="zeropp_1_rank_0.safetensors"),
        "was saved under another name",
    ),
    "no world": (lambda path: rewrite(path, world=[]), "does not say which world"),
    "a world of words": (lambda path: rewrite(path, world="4x2"), "holds no state of error feedback"),
    "no metadata": (lambda path: save_file(load_file(path), path), "holds no state of error feedback"),
    "metadata that are a list": (set_metadata("[]"), "holds no state of error feedback"),
    "metadata of many levels": (set_metadata("[" * 10**5), "cannot be read"),
    "a short wire": (lambda path: rewrite(path, lambda wire: wire[:-16]), "its layout has U8"),
    "a wire of one node": (lambda path: rewrite(path, lambda wire: wire[: len(wire) // 2]), "its layout has U8"),
    "a wire of floats": (lambda path: rewrite(path, torch.Tensor.float), "is F32 .* its layout has U8"),
    "scales that are NaN": (lambda path: rewrite(path, damage_scales), "holds values that are not finite"),
    "a layout that is none": (lambda path: rewrite(path, kinds=["128 evil int8*256"]), "has no layout"),
    "a layout of negative size": (lambda path: rewrite(path, kinds=["128 float32 int8*-256"]), "cannot be read"),
    "more layouts than wires": (lambda path: rewrite(path, kinds=[LAYOUT.spec] * 2), "cannot be read"),
    "layouts that are a number": (lambda path: rewrite(path, kinds=1), "does not say what the residual"),
    "a loss scale of zero": (lambda path: rewrite(path, scale=0), "has the loss scale 0"),
    "a loss scale that is NaN": (lambda path: rewrite(path, scale=float("nan")), "has the loss scale nan"),
    "a loss scale in words": (lambda path: rewrite(path, scale="1"), "has the loss scale '1'"),
    "a count of roundings in words": (lambda path: rewrite(path, roundings="7"), "it counts '7' roundings"),
    "a count of roundings below zero": (lambda path: rewrite(path, roundings=-1), "it counts -1 roundings"),
    "steps in words": (lambda path: rewrite(path, num_steps="3"), "has served '3' steps"),
}


@pytest.mark.parametrize("attack", RESIDUALS)
def test_a_hostile_residual_starts_at_zero(tmp_path, caplog, attack):
    damage, match = RESIDUALS[attack]
    path, reduce = state_file(tmp_path / "checkpoint", 0), make_reduce()
    save_residuals(path, [reduce], TOPOLOGY)
    damage(path)
    with caplog.at_level(logging.WARNING):
        load_residuals(path, [reduce], TOPOLOGY)
    assert reduce.residual.nbytes() == 0
    assert path.name in caplog.text
    assert re.search(match, caplog.text), caplog.text


def test_the_residual_that_is_attacked_is_a_good_one(tmp_path, caplog):
    path, reduce = state_file(tmp_path / "checkpoint", 0), make_reduce()
    save_residuals(path, [reduce], TOPOLOGY)
    rewrite(path)
    load_residuals(path, [reduce], TOPOLOGY)
    assert reduce.residual.nbytes() == NUM_NODES * LAYOUT.nbytes and caplog.text == ""
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_saving_residuals_follows_no_link(tmp_path):
    """Somebody who may write to the folder put links where the file, or a part of it, will be written."""
    victim, path = tmp_path / "victim", state_file(tmp_path, 0)
    victim.write_text("precious")
    for place in (path, path.with_suffix(".partial")):
        place.symlink_to(victim)
    save_residuals(path, [make_reduce()], TOPOLOGY)
    assert victim.read_text() == "precious"
    assert not path.is_symlink() and KEY in load_file(path)


def test_saving_residuals_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("hf_zeropp.fsdp.residual_state.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_residuals(state_file(tmp_path, 0), [make_reduce()], TOPOLOGY)
    assert list(tmp_path.iterdir()) == []


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
