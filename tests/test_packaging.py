"""The package as users of a registry meet it: its version, its metadata, the workflow of its repository, and its wheel."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


def test_a_wheel_works_without_a_compiler() -> None:
    command = ["bash", "scripts/check_wheel.sh"]
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASSED") == 2 and "two ranks trained" in result.stdout
