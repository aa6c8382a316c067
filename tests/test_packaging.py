"""The package as users meet it: version, metadata, the workflow of its repository, its wheel, and the script that sets it up."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hf_zeropp
from hf_zeropp import cli

ROOT = Path(__file__).parent.parent


def test_the_version_stands_in_one_place() -> None:
    """The metadata take it from there, the citation has none, and the release notes begin with its section."""
    assert f'__version__ = "{hf_zeropp.__version__}"' in (ROOT / "hf_zeropp" / "__init__.py").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert "version" not in yaml.safe_load((ROOT / ".github" / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / ".github" / "RELEASE_NOTES.md").read_text(), flags=re.MULTILINE)
    assert newest is not None and newest[1] == hf_zeropp.__version__


def test_the_workflow_runs_the_two_commands_of_the_readme() -> None:
    block = (ROOT / "README.md").read_text().partition("## Two commands")[2].split("```")[1]
    promised = [line.partition("#")[0].strip() for line in block.splitlines() if line.startswith("bash scripts/")]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    ran = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert len(promised) == 2
    assert [command for command in promised if not any(line.startswith(command) for line in ran)] == []


def test_the_commands_of_the_readme_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each takes what the README gives it; those that only compute run."""
    spans = re.findall(r"`(hf-zeropp [^`]*)`", " ".join((ROOT / "README.md").read_text().split()))
    lines = [shlex.split(span)[1:] for span in spans]
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    known = re.search(r"\{([\w,-]+)\}", capsys.readouterr().out)
    assert known is not None and {line[0] for line in lines} <= {*known[1].split(",")}
    (estimate,) = [line for line in lines if line[0] == "estimate"]
    cli.main(estimate)
    assert "zeropp_config:" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_wheel_works_without_a_compiler() -> None:
    command = ["bash", "scripts/check_wheel.sh"]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASSED") == 2 and "two ranks trained" in result.stdout


# ---- scripts/setup.sh, in the environment of a container: its python3 is first on PATH, and no variable tells of it.


def without_network() -> list[str]:
    """The command before one that shall reach no network, not even this machine's."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed: no network can be taken away")
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    refused = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"unshare --net is refused here: {refused.stderr.strip()}")
    return command


def needed_by(names: list[str]) -> set[str]:
    """The installed distributions that these need, with themselves."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            requirements = map(Requirement, metadata.requires(name) or [])
            names += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with one kernel, which compiles in seconds, beside ``environment``: what it needs, and nothing of its extras."""
    clone, environment = tmp_path / "clone", tmp_path / "environment"
    for name in ("hf_zeropp", "ops", "scripts"):
        others = shutil.ignore_patterns(
            "__pycache__", "_libs", "results", "cuda", "d*.cpp", "e*.cpp", "f*.cpp", "a*.cpp", "quantize_*.cpp"
        )
        shutil.copytree(ROOT / name, clone / name, ignore=others)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    names = [Requirement(text).name for text in metadata.requires("hf-zeropp") or [] if "extra ==" not in text]
    for name in needed_by([*names, "pip", "scikit-build-core"]):
        for file in metadata.files(name) or []:
            link = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(metadata.distribution(name).locate_file(file.parts[0]))
    return clone


def set_up(clone: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    script = "source scripts/setup.sh; make_environment; install_package test; echo $PYTHON"
    kept = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH")
    }
    path = f"{clone.parent / 'environment' / 'bin'}:{os.environ['PATH']}"
    environment = kept | {"PATH": path, "CMAKE_ARGS": "-DZEROPP_CUDA=OFF"} | variables
    return subprocess.run(
        [*command, "bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.one_rank
def test_it_is_set_up_without_a_network_in_the_environment_that_is_first_on_the_path(clone: Path) -> None:
    """What is checked: which python, that nothing is downloaded or made, the compiled library, and what is said to be missing."""
    done = set_up(clone, without_network(), HF_ZEROPP_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    environment = clone.parent / "environment"
    assert done.stdout.splitlines()[-1] == str(environment / "bin" / "python3") and not (clone / ".venv").exists()
    assert list(environment.glob("lib/python*/site-packages/hf_zeropp*.dist-info"))
    if shutil.which("c++") and shutil.which("cmake"):
        assert list(environment.glob("lib/python*/site-packages/hf_zeropp/_libs/libzeropp_cpu.*"))
    assert re.search(r"what needs them will not run: pytest .*ruff ", done.stderr)


@pytest.mark.thorough
def test_without_a_network_it_names_what_is_missing(clone: Path) -> None:
    packages = next((clone.parent / "environment").glob("lib/python*/site-packages"))
    for name in ("torch", "psutil", "scikit_build_core"):
        for path in (packages / name, *packages.glob(f"{name}-*.dist-info")):
            path.unlink()
    done = set_up(clone, without_network(), HF_ZEROPP_OFFLINE="1")
    assert done.returncode == 1
    assert re.search(
        r"downloads nothing, and the environment of \S+/bin/python3 lacks: scikit-build-core torch psutil *$",
        done.stderr,
    )
    assert not list(packages.glob("hf_zeropp*"))
