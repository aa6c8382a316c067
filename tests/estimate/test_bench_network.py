"""``hf-zeropp bench-network`` under a launcher, on real gloo ranks: two emulated nodes of two ranks."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path

import pytest
from harness import run_ranks

from hf_zeropp import cli
from hf_zeropp.estimate.measured_cluster import read_cluster

SMALL = ["--wire", "100KB", "--hidden-size", "32", "--tokens", "16", "--repeats", "2"]


def bench_network(rank: int, path: str) -> list[str]:
    with contextlib.redirect_stderr(io.StringIO()) as progress:
        cli.main(["bench-network", "--output", path, "--ranks-per-node", "2", *SMALL])
    return [line for line in progress.getvalue().splitlines() if line.startswith("Measuring ")]


def test_two_nodes_of_two_ranks_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The ranks are real gloo processes with a launcher's variables, and the command itself makes the process group."""
    path = tmp_path / "cluster.yaml"
    said, *others = run_ranks(bench_network, 4, str(path), init=False)
    assert [f"({number} of 5)" in line for number, line in enumerate(said, 1)] == [True] * 5
    assert others == [[], [], []]
    check_measured(path)
    # The file is what ``estimate`` takes.
    cli.main(["estimate", "20M", "--world", "4", "--ranks-per-node", "2", "--cluster", str(path), "--recommend"])
    assert "is predicted to take" in capsys.readouterr().out


def check_measured(path: Path) -> None:
    measured = read_cluster(path)
    assert (measured.world_size, measured.ranks_per_node, measured.backend) == (4, 2, "gloo")
    device, network = measured.device, measured.network
    assert device.wire_rate == measured.within.rate and device.memory == math.inf
    # Far wider bounds than any machine that runs this: what is checked is that bytes stand over seconds.
    assert 1e5 < network.rate < 1e12 and 1e-6 < network.latency < 10
    assert 1e6 < device.flops < 1e14 and device.kernel_rate > 1e5 and device.copy_rate > 1e5


def test_without_a_launcher_it_says_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="expected a launcher.* got no RANK. Run torchrun --nproc-per-node 4"):
        cli.main(["bench-network", "--output", str(tmp_path / "c.yaml")])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output", "/no/such/folder/c.yaml"], "expected --output to name a file in a folder that can be written"),
        (["--output", "c.yaml", "--wire", "10B"], "expected at least 1KB for --wire, got '10B'"),
        (["--output", "c.yaml", "--repeats", "0"], "expected a positive int for --repeats, got 0"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        cli.main(["bench-network", *flags])
    assert said in str(error.value) and "\n" not in str(error.value)
