"""The benchmarks in their quick form: the direction of each result, and nothing left on the machine afterwards."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "scripts/benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from library import network, sandbox  # noqa: E402
from library.rounds import Measurement, busiest_link_bytes, largest_counted_bytes, step_seconds  # noqa: E402
from library.stages import Round, Stage, run_rounds  # noqa: E402
from library.study import Study, rank_environment  # noqa: E402
from library.variants import ModelShape  # noqa: E402

from hf_zeropp.step_record import read_records  # noqa: E402

pytestmark = pytest.mark.thorough

STUDIES = sorted(BENCHMARKS.glob("*.py"))
WHY_IMPOSSIBLE = sandbox.why_impossible() if sys.platform == "linux" else "this is not Linux."
needs_namespaces = pytest.mark.skipif(WHY_IMPOSSIBLE is not None, reason=f"no emulated cluster: {WHY_IMPOSSIBLE}")

LIMIT_S = 120

DRIVER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and hand that down
sys.path.insert(0, {benchmarks!r})
from library.cluster import Cluster
from library.sandbox import enter_sandbox
enter_sandbox()
with Cluster(2, 1):
    print("up", flush=True)
    time.sleep(300)
"""

ECHO = """
import os, socket, sys, time
if sys.argv[1] == "server":
    connection, _ = socket.create_server(("10.77.0.1", 5000)).accept()
    while received := connection.recv(1 << 16):
        connection.sendall(received)
    sys.exit()
while True:
    try:
        connection = socket.create_connection(("10.77.0.1", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
trips = []
for _ in range(20):
    began = time.perf_counter()
    connection.sendall(b"?")
    connection.recv(1)
    trips.append(time.perf_counter() - began)
sent, returned = os.urandom(3_000_000), bytearray()
for begin in range(0, len(sent), 100_000):
    connection.sendall(sent[begin : begin + 100_000])
    while len(returned) < min(begin + 100_000, len(sent)):
        returned += connection.recv(1 << 16)
print(1e3 * min(trips), bytes(returned) == sent)
"""

LATENCIES = """
import subprocess, sys
sys.path.insert(0, {benchmarks!r})
from library import network
from library.sandbox import enter_sandbox
enter_sandbox()
cables = network.build(2, delayed=True)
for link in {links!r}:
    for node, cable in enumerate(cables):
        network.set_link(node, link, cable)
    server, client = (["ip", "netns", "exec", f"node{{node}}", sys.executable, "-c", {echo!r}] for node in (0, 1))
    with subprocess.Popen([*server, "server"]):
        subprocess.run([*client, "client"], check=True)
for cable in cables:
    cable.communicate(timeout=10)
    assert cable.returncode == 0
"""


def ranks_alive(mark: str) -> list[int]:
    """Return the processes whose environment holds the mark."""
    alive = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                alive.append(int(folder.name))
        except OSError:
            continue
    return alive


@pytest.fixture
def untouched_network():
    """This machine's interfaces, and its named network namespaces, are the same behind the test."""

    def visible() -> tuple[set[str], str]:
        named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        return set(os.listdir("/sys/class/net")), named

    before = visible()
    yield
    assert visible() == before


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)


# ------------------------------------------------------------------------------------------------------------- stages


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and this would use it")
def test_checks_that_need_a_gpu_say_so(tmp_path: Path) -> None:
    for words, more in (("no CUDA device is visible", []), ("unknown stages ['speed']", ["--only", "speed"])):
        done = run(BENCHMARKS / "gpu_check.py", tmp_path, *more)
        assert done.returncode == 2 and words in done.stderr


def test_the_limits_of_all_gpu_checks_fit_in_their_time() -> None:
    from gpu_check import rounds

    assert sum(one.limit_s for one in rounds(Path("folder"), "cuda")) <= 530


HANGING = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("so far", flush=True)
def waits_for_ever(): time.sleep(300)
waits_for_ever()
"""
DYING = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stage_that_hangs_or_dies_costs_its_own_result_only(tmp_path: Path) -> None:
    """Its stacks are in its log, nothing of it is left, and the other stages run, beside it and behind it."""
    mark = f"stages-test-{os.getpid()}"

    def stage(name: str, program: str, limit_s: float = 60.0) -> Stage:
        return Stage(name, ["-c", program], limit_s, {"TEST_MARK": mark})

    first = [stage("hangs", HANGING, 2.0), stage("dies", DYING), stage("raises", "raise ValueError('no')")]
    rounds = [
        Round(60.0, [first, [stage("beside", "print('here')")]]),
        Round(60.0, [[stage("behind", "print('there')")]]),
    ]
    found = {one.stage: one for one in run_rounds(rounds, tmp_path, "title")}
    results = {name: one.result for name, one in found.items()}
    assert results == {
        **dict.fromkeys(("beside", "behind"), "passed"),
        **dict.fromkeys(("dies", "raises"), "failed"),
        "hangs": "timed out",
    }
    assert found["hangs"].detail == "so far" and "in waits_for_ever" in (tmp_path / "hangs.log").read_text()
    assert "ValueError: no" in found["raises"].detail
    assert ranks_alive(mark) == []
    with tarfile.open(tmp_path / "all.tgz") as packed:
        assert {"summary.md", "summary.json", *(f"{name}.log" for name in results)} <= set(packed.getnames())


# --------------------------------------------------------------------------------------------------------- the cluster


@needs_namespaces
@pytest.mark.parametrize("how", [pytest.param("SIGINT", marks=pytest.mark.long), "SIGTERM", "SIGKILL"])
def test_nothing_survives_however_it_ends(how: str, tmp_path: Path, untouched_network: None) -> None:
    mark = f"cluster-test-{os.getpid()}-{how}"
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(benchmarks=str(BENCHMARKS)))
    environment = os.environ | {"TEST_MARK": mark, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, **pipes)
    assert process.stdout.readline() == "up\n"
    assert len(ranks_alive(mark)) > 2
    if how == "SIGINT":  # a terminal sends it to the whole group
        for pid in ranks_alive(mark):
            os.kill(pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[how])
    process.communicate(timeout=120)
    deadline = time.monotonic() + 20
    while (alive := ranks_alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive == []


@needs_namespaces
def test_a_link_is_as_late_as_it_says_and_keeps_every_byte(tmp_path: Path, untouched_network: None) -> None:
    """A ping goes there and back. The shortest of many is looked at: other programs make some longer."""
    links = ["unlimited+0ms", "200mbit+20ms", "unlimited+2ms"]
    script = tmp_path / "driver.py"
    script.write_text(LATENCIES.format(benchmarks=str(BENCHMARKS), links=links, echo=ECHO))
    done = run(script)
    if "needs /dev/net/tun" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    pings, whole = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert whole == ("True",) * 3
    for ping_ms, latency_ms in zip(map(float, pings), (0, 20, 2), strict=True):
        assert 2 * latency_ms <= ping_ms < 2 * latency_ms + 2


def test_links_are_read_named_and_sorted() -> None:
    assert network.NodeLink.parse("2.5gbit+10ms") == (2.5e9, 10.0)
    assert network.NodeLink.parse("unlimited") == (None, None)
    assert network.rate_text("200mbit+0ms") == "200 Mbit/s + 0 ms"
    links = ["unlimited+1ms", "1gbit+1ms", "200mbit+1ms", "1gbit+10ms"]
    assert sorted(links, key=network.speed) == ["200mbit+1ms", "1gbit+10ms", "1gbit+1ms", "unlimited+1ms"]
    for wrong in ("200", "200mbit+1", "fast", "1gbit+1ms+1ms"):
        with pytest.raises(ValueError, match="expected a link such as 200mbit, 1gbit"):
            network.NodeLink.parse(wrong)
    with pytest.raises(ValueError, match="a latency for every link or for none"):
        network.have_latencies(["1gbit", "1gbit+1ms"])


def test_without_namespaces_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(sandbox.SANDBOX_MARK, raising=False)
    with pytest.raises(SystemExit, match="No emulated cluster on this machine: unshare, ip, tc, mount not found"):
        sandbox.enter_sandbox()


# ------------------------------------------------------------------------------------------------------ the benchmarks


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_explains_its_command_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripts run in this process, as ``__main__``: PyTorch is imported once for all of them."""
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {path.name}")


def test_every_study_is_in_the_readme() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    assert [path.name for path in STUDIES if f"`{path.name}`" not in readme] == []
    modules = sorted((BENCHMARKS / "library").glob("[!_]*.py"))
    assert [path.name for path in modules if f"`{path.name}`" not in readme] == []


@needs_namespaces
def test_cluster_benchmark(tmp_path: Path, untouched_network: None) -> None:
    """Its own checks: faster than stock at the lowest rate, fewer bytes, interface and accounting within 3 %."""
    output = tmp_path / "cluster.json"
    quick = [BENCHMARKS / "bench_cluster.py", "--quick", "--output", output, "--variants", "stock", "balanced"]
    first = run(*quick)
    assert first.returncode == 0, first.stdout + first.stderr
    study = json.loads(output.read_text())
    assert [cell["variant"] for cell in study["cells"]] == ["stock", "balanced"]
    assert study["conditions"]["kernels"] in first.stdout
    assert run(*quick).returncode == 0  # from file
    assert json.loads(output.read_text())["cells"] == study["cells"]


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_program_that_tune_tries_is_recorded(switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, as ``bench_tune.py`` starts it, on stock FSDP2 and under a preset."""
    variables = rank_environment(threads=1) | {"ZEROPP_ENABLED": switch, "ZEROPP_RECORD": str(tmp_path)}
    paths = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    variables |= {"ZEROPP_PRESET": "exact", "ZEROPP_RANKS_PER_NODE": "1", "PYTHONPATH": paths}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    steps, micro_steps, learning_rate, sequence_length = 2, 2, 1e-4, 8
    numbers = steps, micro_steps, learning_rate, sequence_length, *dataclasses.astuple(ModelShape(64, 64, 2, 2, 64))
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    done = run(*launcher, BENCHMARKS / "library/tuned_program.py", *map(str, numbers))
    assert done.returncode == 0, done.stderr
    ranks = read_records(tmp_path)
    assert [len(lines) for lines in ranks] == [steps] * 2
    assert [bool(line["settings"]) for lines in ranks for line in lines] == [switch == "1"] * 4


def test_intervals_over_seeds() -> None:
    """Student's interval of a textbook example, and none for one seed."""
    from library.losses import Interval

    interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])  # 3 -/+ 2.776 * sqrt(2.5 / 5)
    assert interval.mean == 3.0 and interval.low == pytest.approx(1.0370, abs=1e-3)
    assert interval.text("{:.1f}".format, 1.0) == "**3.0 [1.0, 5.0]**"
    assert interval.text("{:.1f}".format, 3.5) == "3.0 [1.0, 5.0]"
    assert Interval.of([2.0]).text("{:.1f}".format, 1.0) == "2.0"


def test_a_page_is_written_anew_from_the_file_alone(tmp_path: Path) -> None:
    """Rows keep their figures, and the file is not written."""
    output = tmp_path / "cluster.json"
    output.write_text((BENCHMARKS.parent / "results" / "pcie.json").read_text())
    before = output.read_bytes()
    done = run(BENCHMARKS / "bench_cluster.py", "--output", output, "--from-file")
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == before
    page = output.with_suffix(".md").read_text()
    assert "| pcie | 0.647 |" in page and "--from-file" not in page
    assert output.with_suffix(".png").stat().st_size > 10_000


def test_a_study_is_not_continued_under_other_conditions(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    Study(path, {"model": "small", "note": 1}, ["model"], fresh=False).add("cells", {"a": 1, "value": 2})
    assert Study(path, {"model": "small", "note": 2}, ["model"], fresh=False).find("cells", a=1) == {"a": 1, "value": 2}
    assert Study(path, {"model": "large"}, ["model"], fresh=True).rows("cells") == []
    with pytest.raises(SystemExit, match="measured under other conditions"):
        Study(path, {"model": "large"}, ["model"], fresh=False)


# ----------------------------------------------------------------------------------- measurements of several ranks


def test_a_step_ends_with_its_last_rank_and_bytes_are_those_of_the_busiest_node() -> None:
    """Two nodes of one rank, two rounds. Node 1 receives most, in both rounds together."""

    def measured(ends: list[float], sent: int, received: int, counted: int | None) -> Measurement:
        return Measurement(ends, {"tx": sent, "rx": received}, counted, loss=0.0)

    rounds = [
        [measured([0, 1, 3], 10, 5, 4), measured([0, 2, 3], 5, 10, 9)],
        [measured([4, 5], 7, 2, 2), measured([4, 5], 2, 8, 7)],
    ]
    assert step_seconds(rounds[0]) == [2, 1]
    assert busiest_link_bytes(rounds, ranks_per_node=1) == 18
    assert largest_counted_bytes(rounds, ranks_per_node=1) == 16
    assert largest_counted_bytes([[measured([0, 1], 1, 1, None)]], ranks_per_node=1) is None
