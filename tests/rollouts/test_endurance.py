"""Two hundred versions over HTTP between processes that are killed, through everything that a network and a disk do to files.

The trainer and the server are processes of their own. Between them this process serves the folder, and harms what it serves.
All weights follow from the number of a step, which is among them, so every version of the server is compared with the truth.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_zeropp.rollouts.versions import UpdateReceiver, UpdateSender, sender
from hf_zeropp.rollouts.versions.log import LIST, DamagedUpdateError, checksum

NUM_STEPS = 200
SIZE = 40_000
MAX_LAG = 25
"""Versions by which the server may be behind before the trainer waits for it: more than from one whole copy to the next."""
MAX_WAIT_S = 3.0
"""Seconds that the trainer waits in a step."""
_context = multiprocessing.get_context("forkserver")
Weights = dict[str, torch.Tensor]


def weights_of(steps: int) -> list[Weights]:
    """The weights of steps 0 to ``steps``: one word in eight changes from one to the next."""
    generator = torch.Generator().manual_seed(0)
    big, small = torch.randn(SIZE, generator=generator).bfloat16(), torch.randn(7, generator=generator).bfloat16()
    found = []
    for step in range(steps + 1):
        places = torch.randint(SIZE, (SIZE // 8,), generator=generator)
        big = big.clone()
        big[places] *= 1 + 2**-7
        found.append({"big": big, "small": small * step, "step": torch.tensor([step], dtype=torch.int32)})
    return found


def trainer(folder: str, report: str, first: int, death: tuple[int, str] | None) -> None:
    """Publish versions from step ``first`` on. ``death`` is a step, and the moment of its version at which the process dies."""
    log, truth = UpdateSender(folder), weights_of(NUM_STEPS)
    for step in range(first, NUM_STEPS + 1):
        if death and step == death[0]:
            die_at(death[1], Path(folder))
        log.publish(truth[step].items())
        Path(folder, "checkpoint").write_text(str(step))
        time.sleep(0.01)
        # A server that starts on a busy machine must not miss all that is to happen. One that began anew may need a whole
        # copy, which comes with some more steps.
        end = time.monotonic() + MAX_WAIT_S
        while step - last_step(report) > MAX_LAG and time.monotonic() < end:
            time.sleep(0.05)


def last_step(report: str) -> int:
    """The newest step that the server has."""
    lines = Path(report).read_text().splitlines() if Path(report).exists() else []
    return max((int(line.split()[2]) for line in lines if line.startswith("has")), default=0)


def die_at(moment: str, folder: Path) -> None:
    write = sender.save_file

    def half_a_file(tensors, place, metadata) -> None:
        write(tensors, place, metadata=metadata)
        os.truncate(place, os.path.getsize(place) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def files_without_a_list(self, log) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "half a file":
        sender.save_file = half_a_file
    else:
        UpdateSender._list = files_without_a_list


def server(url: str, report: str) -> None:
    """Follow the newest version until the last step. Each change of the weights is a line of the report, and each complaint."""
    out = open(report, "a", buffering=1)
    complaints = logging.Handler()
    complaints.emit = lambda record: out.write(f"complains {record.getMessage()}\n")
    logging.getLogger("hf_zeropp.rollouts.versions").addHandler(complaints)
    receiver = UpdateReceiver(url)
    while True:
        try:
            if receiver.update():
                found = " ".join(checksum(receiver.weights[name]) for name in ("big", "small", "step"))
                out.write(f"has {receiver.version} {int(receiver.weights['step'])} {found}\n")
                if int(receiver.weights["step"]) == NUM_STEPS:
                    return
        except DamagedUpdateError as error:
            out.write(f"fails {error}\n")
        time.sleep(0.002)


class Folder(http.server.SimpleHTTPRequestHandler):
    """Serves the log. The first file of changes from a version on meets the harm that is due then."""

    harms: list[tuple[int, str]] = []
    kill_server: Callable[[], None]
    done: list[str] = []
    older = b""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        changes = re.fullmatch(r"changes-(\d+)\.safetensors", path.name)
        if path.name == LIST and self.older:
            content, type(self).older = self.older, b""
        elif not path.exists():
            return self.send_error(404)
        else:
            content = path.read_bytes()
        if changes and self.harms and int(changes[1]) >= self.harms[0][0]:
            harm = self.harms.pop(0)[1]
            self.done.append(harm)
            content = self.harmed(harm, path, content)
        with contextlib.suppress(ConnectionError):  # of a server that was killed
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def harmed(self, harm: str, path: Path, content: bytes) -> bytes:
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 4]) + content[half + 1 :]
        if harm == "server killed":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content[:half])
            self.wfile.flush()
            self.kill_server()
        elif harm == "bit flipped on the way":
            return flipped
        elif harm == "bit flipped on disk":
            path.write_bytes(flipped)
            return flipped
        elif harm == "lost":
            path.unlink()
            return b""
        elif harm == "reordered":  # the version before comes in its place
            before = path.with_name(f"changes-{int(path.stem.split('-')[1]) - 1}.safetensors")
            return before.read_bytes() if before.exists() else b""
        elif harm == "older list":
            type(self).older = (path.parent / LIST).read_bytes()
        return content

    def log_message(self, *args) -> None:
        pass


HARMS = [
    (15, "bit flipped on the way"),
    (25, "server killed"),
    (40, "reordered"),
    (45, "bit flipped on disk"),
    (85, "server killed"),
    (95, "older list"),
    (100, "lost"),
    (140, "reordered"),
    (150, "server killed"),
    (160, "bit flipped on the way"),
]
DEATHS = [(30, "half a file"), (75, "no list"), (135, "half a file"), (170, "no list"), None]


class Processes:
    """The trainer and the server, each replaced by another one when it is killed."""

    def __init__(self, folder: Path, url: str, report: Path) -> None:
        self.folder, self._server_args, self.starts = folder, (url, str(report)), 0
        self._is_killed = threading.Event()
        Folder.kill_server = self._kill_server

    def _kill_server(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.join()
        self._is_killed.set()

    def start_server(self) -> None:
        self._is_killed.clear()
        self.starts += 1
        self.server = _context.Process(target=server, args=self._server_args, daemon=True)
        self.server.start()

    def run(self) -> list[int]:
        """Run trainers one after the other, each from the checkpoint of the one before. Returns their exit codes."""
        codes = []
        self.start_server()
        for death in DEATHS:
            checkpoint = self.folder / "checkpoint"
            first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 0
            process = _context.Process(
                target=trainer, args=(str(self.folder), self._server_args[1], first, death), daemon=True
            )
            process.start()
            self._keep_server(process)
            codes.append(process.exitcode)
        self._keep_server(self.server)
        return codes

    def _keep_server(self, until: multiprocessing.Process) -> None:
        """Wait for the end of a process, and start another server for one that was killed."""
        end = time.monotonic() + 120
        while until.is_alive() or self._is_killed.is_set():
            assert time.monotonic() < end, "hangs"
            if self._is_killed.is_set():
                was_waited_for = until is self.server
                self.start_server()
                until = self.server if was_waited_for else until
            time.sleep(0.005)


@pytest.mark.long
def test_two_hundred_versions_through_deaths_and_damage(tmp_path):
    folder, report = tmp_path / "log", tmp_path / "report"
    folder.mkdir()
    Folder.harms, Folder.done = list(HARMS), []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Folder, directory=str(folder))) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{web.server_port}"
        processes = Processes(folder, url, report)
        codes = processes.run()
        late = UpdateReceiver(url)
        assert late.update()
        web.shutdown()
    assert codes == [-signal.SIGKILL] * 4 + [0] and Folder.done == [harm for _, harm in HARMS]
    assert processes.starts == 4 and processes.server.exitcode == 0  # three were killed; nothing else ended one

    truth = [" ".join(checksum(weight) for weight in weights.values()) for weights in weights_of(NUM_STEPS)]
    lines = report.read_text().splitlines()
    has = [line.split(" ", 3)[1:] for line in lines if line.startswith("has")]
    assert [(version, step) for version, step, found in has if found != truth[int(step)]] == []
    numbers = [(int(version), int(step)) for version, step, _ in has]
    steps = [step for _, step in numbers]
    assert numbers[-1][1] == NUM_STEPS and len(set(steps)) > NUM_STEPS / 2
    assert steps == sorted(steps) and [version for version, _ in numbers] == sorted(version for version, _ in numbers)
    assert {name: checksum(late.weights[name]) for name in late.weights} == {
        name: checksum(weight) for name, weight in weights_of(NUM_STEPS)[-1].items()
    }
    # A file that is damaged or gone for good is passed over for a whole copy of the same trainer.
    for harm, death in ((45, 75), (100, 135)):
        assert any(harm < version <= death for version, _ in numbers), (harm, numbers)
    complaints = [line for line in lines if not line.startswith("has")]
    for words in (r"expected version \d+ of \d+ in log", "another checksum than expected", "404: Not Found"):
        assert any(re.search(words, line) for line in complaints), words
