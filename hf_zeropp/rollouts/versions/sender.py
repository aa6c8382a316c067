"""The sender: writes each version of the weights to the log."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from hf_zeropp.files import PARTIAL, make_readable, read_text, written_at_once
from hf_zeropp.ops import encode_changes
from hf_zeropp.rollouts.versions.log import LIST, MAX_LIST_BYTES, FileMetadata, Log, LogFile, checksum

logger = logging.getLogger(__name__)

Weights = dict[str, Tensor]

_FILE = re.compile(r"(whole|changes)-\d+\.safetensors")

MAX_CHAIN = 1000
"""Files behind a whole copy, after which another is written, however small they are: the list must stay short."""


class UpdateSender:
    """Write versions of a model's weights to a folder, for ``UpdateReceiver``.

    Rank 0 writes. It keeps a copy of the last version in host memory. A sender that is made on a folder with a log, as in a run
    that resumes, begins a new log with the numbers behind the old one's, and its first version is a whole copy. So does the next
    version after one that could not be written.

    Args:
        folder: for the log. It is made if it does not exist, and no other sender may write to it.

    Attributes:
        log: the list as it was written last; empty on other ranks.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.is_writer = not dist.is_initialized() or dist.get_rank() == 0
        self._version = 0
        if self.is_writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"{PARTIAL}*"):  # of a sender that was killed: no other may write here
                shutil.rmtree(left, ignore_errors=True)
            if (self.folder / LIST).exists():
                self._version = Log.from_json(read_text(self.folder / LIST, MAX_LIST_BYTES)).version
        self._begin()

    def _begin(self) -> None:
        """Begin a log. Of one that is there only the numbers count: readers may have newer versions of it than its list says."""
        self.log = Log(run=uuid.uuid4().hex)
        self._last: Weights = {}

    def publish(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Write a version. Call it on all ranks.

        Args:
            weights: names and full weights, as ``publish_weights`` gives them. All ranks go to the end.

        Returns:
            The number of the version; 0 on ranks that write nothing.
        """
        if not self.is_writer:
            for _ in weights:
                pass
            return 0
        version = self._version = self._version + 1
        # All weights are taken before anything is written: a full disk must not stop an iteration that gathers.
        changes, latest = self._changes_to(weights)
        try:
            self._publish(changes, latest, version)
        except BaseException:
            # The folder may hold this version whole, in part, or not at all. If the next version were sent as changes from it,
            # a reader that lacks it would get wrong weights without an error. So the next version is a whole copy.
            self._begin()
            raise
        return version

    def _publish(self, changes: Weights | None, latest: Weights, version: int) -> None:
        files = []
        if changes is not None:
            files.append(self._write("changes", changes, latest, version))
        if changes is None or self._needs_whole(files):
            files.append(self._write("whole", latest, latest, version))
        self._list(Log(self.log.run, (*self.log.files, *files)))
        self._last = latest

    def _changes_to(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[Weights | None, Weights]:
        """Return the wires of the weights that changed, None where the last version has others, and a copy of all."""
        wires: Weights | None = {} if self._last else None
        latest: Weights = {}
        for name, weight in weights:
            latest[name] = now = weight.detach().to("cpu", copy=True).contiguous()
            last = self._last.get(name)
            if now.dtype.itemsize < 2:
                _warn_of_bytes(name, now.dtype)
            if last is None or (last.dtype, last.shape) != (now.dtype, now.shape) or now.dtype.itemsize < 2:
                wires = None
            elif wires is not None and now.numel() and not _same_bits(now, last):
                sizes, wire = encode_changes(now, last)
                wires[name] = wire[0, : int(sizes[0])].clone()  # the buffer behind it is as large as the weight
        return (wires if latest.keys() == self._last.keys() else None), latest

    def _needs_whole(self, new: list[LogFile]) -> bool:
        """Whether the changes since the newest whole copy have as many bytes as a whole copy."""
        files = [*self.log.files, *new]
        newest = max((i for i, file in enumerate(files) if file.base == 0), default=None)
        if newest is None or len(files) - newest > MAX_CHAIN:
            return True
        return sum(file.num_bytes for file in files[newest + 1 :]) >= files[newest].num_bytes

    def _write(self, kind: str, tensors: Weights, latest: Weights, version: int) -> LogFile:
        base = self.log.version if kind == "changes" else 0
        path = self.folder / f"{kind}-{version}.safetensors"
        checksums = {name: checksum(latest[name]) for name in tensors}
        metadata = FileMetadata(self.log.run, version, base, checksums).to_metadata()
        with written_at_once(path) as place:
            save_file(tensors, place, metadata=metadata)
            make_readable(place)  # a server of static files may be another user
        return LogFile(path.name, version, base, path.stat().st_size)

    def _list(self, log: Log) -> None:
        """Replace the list, and remove files that it has no longer."""
        # From the whole copy before the newest one on.
        wholes = [i for i, file in enumerate(log.files) if file.base == 0]
        log = Log(log.run, log.files[wholes[-2] if len(wholes) > 1 else 0 :])
        with written_at_once(self.folder / LIST) as place:
            place.write_text(log.to_json())
        self.log = log
        # Also those of earlier logs, and of versions that were never listed.
        names = {file.name for file in log.files}
        for path in self.folder.iterdir():
            if _FILE.fullmatch(path.name) and path.name not in names:
                path.unlink(missing_ok=True)


@functools.cache
def _warn_of_bytes(name: str, dtype: torch.dtype) -> None:
    """Warn once of weights that make every version a whole copy."""
    logger.warning(
        "Every version is a whole copy, because %s is %s: changes are those of words of 16 bits.", name, dtype
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    # ``torch.equal`` compares numbers: NaN differs from itself, and 0 equals -0.
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
