"""``hf-zeropp bench-network`` under a launcher, on real gloo ranks: two emulated nodes of two ranks."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path

import pytest
from harness import run_ranks

from hf_zeropp import cli, measured_cluster
from hf_zeropp.measured_cluster import read_cluster


def bench_network(rank: int, path: str) -> str:
    measured_cluster.WIRE_BYTES = 102_400
    measured_cluster.HIDDEN_SIZE, measured_cluster.TOKENS, measured_cluster.REPEATS = 32, 16, 2
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        cli.main(["bench-network", "--output", path, "--ranks-per-node", "2"])
    return shown.getvalue()


def test_two_nodes_of_two_ranks_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The ranks are real gloo processes with a launcher's variables, and the command itself makes the process group."""
    path = tmp_path / "cluster.yaml"
    said, *others = run_ranks(bench_network, 4, str(path), init=False)
    assert path.read_text() in said and f"Wrote {path}" in said
    assert others == ["", "", ""]
    measured = read_cluster(path)
    assert (measured.world_size, measured.ranks_per_node, measured.backend) == (4, 2, "gloo")
    device, network = measured.device, measured.network
    assert device.wire_rate == measured.within.rate and device.memory == math.inf
    # Far wider bounds than any machine that runs this: what is checked is that bytes stand over seconds.
    assert 1e5 < network.rate < 1e12 and 1e-6 < network.latency < 10
    assert 1e6 < device.flops < 1e14 and device.kernel_rate > 1e5 and device.copy_rate > 1e5
    # The file is what ``estimate`` takes.
    cli.main(["estimate", "20M", "--world", "4", "--ranks-per-node", "2", "--cluster", str(path), "--recommend"])
    assert "is predicted to take" in capsys.readouterr().out


def test_without_a_launcher_it_says_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="expected a launcher.*; got none. Run torchrun --nnodes 2 --node-rank R"):
        cli.main(["bench-network", "--output", str(tmp_path / "c.yaml")])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output", "/no/such/folder/c.yaml"], "expected --output to name a file in a folder that can be written"),
        (
            ["--output", "c.yaml", "--ranks-per-node", "0"],
            "argument --ranks-per-node: expected a positive int, got '0'",
        ),
        (["--output", "c.yaml", "--repeats", "3"], "unrecognized arguments: --repeats 3"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        cli.main(["bench-network", *flags])
    message = str(error.value) if isinstance(error.value.code, str) else capsys.readouterr().err
    assert said in message and "\n" not in message.rstrip("\n")
