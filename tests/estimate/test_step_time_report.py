"""``hf-zeropp estimate`` with a cluster: what it prints and writes, and how it answers mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from unittest import mock

import pytest
import yaml

from hf_zeropp import cli
from hf_zeropp.config import PRESETS, ZeroPPConfig, is_enabled
from hf_zeropp.estimate.cluster import GPUS, Cluster, Device, Link
from hf_zeropp.estimate.unit_work import METHODS
from hf_zeropp.measured_cluster import read_cluster
from hf_zeropp.sizes import parse_rate

pytestmark = pytest.mark.one_rank

METHOD_NAMES = (*METHODS, *PRESETS)
JOB = ["estimate", "350M", "--world", "16", "--ranks-per-node", "4"]
CLUSTER = ["--network", "100gbit", "--gpu", "h100"]
MEASURED = Cluster(
    4, 4, Link(1e8, 1e-3), Link(1e9, 1e-4), Device("CPU", 5e10, 5e10, math.inf, 5e9, 9e9, 1e9), "gloo"
)  # fmt: skip


def run(capsys: pytest.CaptureFixture, *flags: str) -> str:
    cli.main([*JOB, *flags])
    return capsys.readouterr().out


def test_table_of_every_method_in_80_columns(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(capsys, *CLUSTER, "--accumulation", "8", "--batch-tokens", "2048")
    assert max(map(len, shown.splitlines())) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in shown
    rows = [line.strip() for line in shown.splitlines()]
    for method in METHOD_NAMES:
        cells = next(row for row in rows if row.startswith(f"{method} ")).removeprefix(method).split()
        assert len(cells) == 6 and float(cells[0]) > 0 and cells[2].endswith("%"), method
    for word in ("Simulated, not measured", "85 Gbit/s attainable", "382 GB/s within", "50% of the peak"):
        assert word in shown


def test_json_says_that_it_is_simulated(capsys: pytest.CaptureFixture) -> None:
    answer = json.loads(run(capsys, *CLUSTER, "--json", "--mfu", "0.25", "--gpu-memory", "1GB"))
    assert answer["simulated"] is True and answer["estimates"]
    assert answer["cluster"]["device"]["flops"] == 0.25 * GPUS["h100"].flops
    # With one micro-step there is nothing to synchronize before it, or to leave for later.
    left_out = ("FSDP2 synced", "ZeRO++ coalesced")
    assert [row["method"] for row in answer["times"]] == [name for name in METHOD_NAMES if name not in left_out]
    assert all(row["fits"] == (row["memory"] <= 1e9) for row in answer["times"])
    assert {row["fits"] for row in answer["times"]} == {True, False}


def test_json_has_all_that_was_asked_for(capsys: pytest.CaptureFixture) -> None:
    flags = [*CLUSTER, "--recommend"]
    answer, shown = json.loads(run(capsys, *flags, "--json")), run(capsys, *flags)
    assert answer["recommendation"] in shown and "per step, against" in answer["recommendation"]
    assert "recommendation" not in json.loads(run(capsys, *CLUSTER, "--json"))


def test_recommendation_can_be_pasted(capsys: pytest.CaptureFixture) -> None:
    shown = run(capsys, "--network", "1gbit", "--gpu", "v100", "--recommend", "--learning-rate", "1e-3")
    block = yaml.safe_load(shown[shown.index("zeropp_config:") :])
    assert ZeroPPConfig.resolve(block["zeropp_config"]) == ZeroPPConfig.resolve({"preset": "min_traffic"})
    reason = next(line for line in shown.splitlines() if line.startswith("# "))
    assert "min_traffic is predicted to take" in reason and "FSDP2" in reason and "HSDP" in reason
    assert "# Learning rate: 0.001 (--learning-rate)." in shown
    shown = run(capsys, "--network", "1gbit", "--gpu", "v100", "--recommend")
    assert "preset: exact" in shown and "# Learning rate: 1e-05 (--learning-rate)." in shown


def test_leaving_it_off_can_be_pasted(capsys: pytest.CaptureFixture) -> None:
    """A network without limits: FSDP2 without quantization is faster. The lines switch this package off, and comments say why."""
    shown = run(capsys, "--network", "90tbit", "--gpu", "v100", "--recommend")
    assert "zeropp_config" not in shown and "FSDP2 kept without this package is as fast, within 3%, or faster." in shown
    assert is_switched_off(shown)
    # For LoRA on a base that a node can hold HSDP is recommended. The lines have the sizes that Accelerate reads.
    shown = run(capsys, "--network", "25gbit", "--gpu", "v100", "--recommend", "--lora", "16")
    assert is_switched_off(shown)
    block = yaml.safe_load(shown[shown.index("parallelism_config:") :])["parallelism_config"]
    assert block == {"parallelism_config_dp_replicate_size": 4, "parallelism_config_dp_shard_size": 4}


def is_switched_off(shown: str) -> bool:
    with mock.patch.dict(os.environ, exported(shown)):
        return not is_enabled()


def exported(shown: str) -> dict[str, str]:
    """Return the variables that a shell would have behind the lines that are shown."""
    lines = [
        line.removeprefix("export ").partition("#")[0] for line in shown.splitlines() if line.startswith("export ")
    ]
    return dict(line.strip().split("=") for line in lines)


def test_settings_of_a_file_are_a_row_of_their_own(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "zeropp.yaml"
    path.write_text("qgz_bits: 8\n")
    answer = json.loads(run(capsys, *CLUSTER, "--json", "--zeropp", str(path)))
    rows = {row["method"]: row["step_s"] for row in answer["times"]}
    assert list(rows)[-1] == "these settings" and rows["these settings"] > rows["balanced"]


def test_a_measured_cluster_is_read_back(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(MEASURED)))
    assert read_cluster(path) == MEASURED
    answer = json.loads(run(capsys, "--cluster", str(path), "--json", "--batch-tokens", "64"))
    assert answer["cluster"]["backend"] == "gloo" and answer["cluster"]["network"]["rate"] == 1e8
    assert answer["cluster"]["world_size"] == 16  # more nodes of the kind that was measured


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "h1000", "--network", "1gbit"], "argument --gpu: invalid choice: 'h1000'"),
        (["--gpu", "h100", "--network", "100"], "expected a rate above zero with its unit, such as 100gbit"),
        (["--gpu", "h100"], "expected --gpu and --network, or --cluster alone, which holds all, got --gpu. Say --gpu h100"),
        (["--mfu", "0.4", "--batch-tokens", "64"], "which holds all, got --batch-tokens, --mfu."),
        ([*CLUSTER, "--mfu", "50"], "expected an attainable MFU above 0 and at most 1, got 50.0"),
        ([*CLUSTER, "--batch-tokens", "0"], "argument --batch-tokens: expected a positive int, got '0'"),
        ([*CLUSTER, "--gpu-memory", "much"], 'argument --gpu-memory: A size must be a number of bytes or a text such as "800MB"'),
        ([*CLUSTER, "--gpu-memory", "0B", "--recommend"], "expected settings that fit the memory of a GPU, got"),
        ([*CLUSTER, "--learning-rate", "0"], "expected a learning rate above zero, such as 1e-5, got 0.0"),
        ([*CLUSTER, "--learning-rate", "nan"], "expected a learning rate above zero, such as 1e-5, got nan"),
        ([*CLUSTER, "--active", "1B"], "parameters for --active, such as 37B, got '1B'"),
        ([*CLUSTER, "--cluster", "c.yaml"], "expected --gpu and --network, or --cluster alone"),
        (["--cluster", "no.yaml"], "expected a file of hf-zeropp bench-network, cannot use 'no.yaml'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main([*JOB, *flags])
    # argparse prints what it finds itself, and exits with a number.
    message = str(error.value) if isinstance(error.value.code, str) else capsys.readouterr().err.rstrip("\n")
    assert message.startswith("hf-zeropp estimate: ") and said in message and "\n" not in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranks_per_node": 2}, "expected a file measured with 4 ranks per node, got one with 2"),
        ({"device": dataclasses.asdict(MEASURED.device) | {"flops": -1.0}}, "expected flops above zero, got -1.0"),
        ({"network": {"rate": "1gbit", "latency": 0}}, "'>' not supported"),
        ({"network": {"rate": 1.0, "latency": math.nan}}, "expected latency above zero, got nan"),
        ({"backend": "mpi"}, "got 'mpi'"),
        ({"device": 3}, "must be a mapping"),
        ({"extra": 1}, "unexpected keyword argument 'extra'"),
    ],
)
def test_files_of_other_clusters_are_refused(change: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(MEASURED) | change))
    with pytest.raises(SystemExit) as error:
        cli.main([*JOB, "--cluster", str(path)])
    message = str(error.value)
    assert said in message and "bench-network" in message and "\n" not in message


def test_a_file_without_a_key_or_a_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for content in ({"backend": "gloo"}, ["a"]):
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(ValueError, match="expected a file of hf-zeropp bench-network, cannot use"):
            read_cluster(path)


@pytest.mark.parametrize(("text", "rate"), [("100gbit", 1.25e10), ("3.2Tbit", 4e11), ("200mbit", 2.5e7)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "100", "gbit", "0gbit", "100Gb", "100Gbps", "600GBps", "-1gbit", "1e3gbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate above zero with its unit"):
        parse_rate(text)


def test_presets_have_an_order_of_preference() -> None:
    from hf_zeropp.estimate.comparison import EXACTNESS

    assert set(PRESETS) == {*EXACTNESS, "pcie"}  # which is for one node
