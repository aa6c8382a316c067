"""Writing that leaves no half files."""

from __future__ import annotations

import os
import resource

import pytest

from hf_zeropp.files import written_at_once


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(LookupError), written_at_once(tmp_path / "file") as place:
        place.write_text("half")
        raise LookupError
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("already", [False, True])
def test_a_writer_that_has_no_file_descriptor_left_leaves_nothing(tmp_path, already):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = []

    def take_all() -> None:
        while True:
            files.append(open(os.devnull))

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        if already:
            with pytest.raises(OSError):
                take_all()
        with pytest.raises(OSError, match="Too many open files"), written_at_once(tmp_path / "folder") as place:
            place.mkdir()
            (place / "file").write_text("half")
            take_all()
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files and os.listdir(tmp_path) == []
