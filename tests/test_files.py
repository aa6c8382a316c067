"""Writing that leaves no half files: not after an error, and not after a writer that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zeropp import files
from hf_zeropp.files import written_at_once

WRITER = """
import runpy, sys, time
from pathlib import Path
written_at_once = runpy.run_path(sys.argv[1])["written_at_once"]  # without the package, which imports PyTorch
with written_at_once(Path(sys.argv[2])) as place:
    place.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    """Another process that is writing tmp_path / "file"."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, files.__file__, str(tmp_path / "file")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()


def write(path: Path) -> list[str]:
    """Write a file, and return what lies beside it meanwhile."""
    with written_at_once(path) as place:
        place.write_text("whole")
        return sorted(name for name in os.listdir(path.parent) if name != place.parent.name)


def test_what_a_killed_writer_left_goes_with_the_next_writer_of_the_same_file(tmp_path, writer):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".partial-file-")
    assert left in write(tmp_path / "another")  # of another rank, say
    assert left not in write(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["another", "file"]


def test_a_writer_that_is_alive_keeps_its_place(tmp_path, writer):
    (its,) = os.listdir(tmp_path)
    assert its in write(tmp_path / "file")
    assert os.listdir(tmp_path / its) == ["file"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(LookupError), written_at_once(tmp_path / "file") as place:
        place.write_text("half")
        raise LookupError
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"
