"""Writing that leaves no half files."""

from __future__ import annotations

import os

import pytest

from hf_zeropp.files import written_at_once

pytestmark = pytest.mark.one_rank


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(LookupError), written_at_once(tmp_path / "file") as place:
        place.write_text("half")
        raise LookupError
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"
