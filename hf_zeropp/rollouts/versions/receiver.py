"""The receiver: brings a server's weights from the version that it has to the newest one, or leaves them as they are."""

from __future__ import annotations

import json
import logging
import os

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from hf_zeropp.ops import apply_changes
from hf_zeropp.rollouts.versions.log import (
    LIST,
    MAX_LIST_BYTES,
    DamagedUpdateError,
    FileMetadata,
    Log,
    LogFile,
    checksum,
)
from hf_zeropp.rollouts.versions.source import reader_of

logger = logging.getLogger(__name__)


class UpdateReceiver:
    """Follow the weights that an ``UpdateSender`` publishes.

    ``weights`` is replaced as a whole when every file of an update has arrived and every checksum is right. Until then, and
    after an error, it is the version before. Tensors in it are never written to again, so a server may go on reading an old one.

    Args:
        place: the sender's folder, or the URL of a server of static files in front of it.

    Attributes:
        weights: by name, in host memory.
        version: the version they are; 0 before the first update.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self._read = reader_of(place)
        self._run = ""
        self.version = 0
        self.weights: dict[str, Tensor] = {}

    def update(self, version: int | None = None) -> bool:
        """Bring the weights to a newer version.

        A file that is damaged or gone is asked for again, and then passed over for a whole copy.

        Args:
            version: that the weights are to be. None for the newest. Processes that share a model name it, so that all of them
                take the same one.

        Returns:
            Whether the weights changed. They do not where they are this version already, or a newer one.

        Raises:
            DamagedUpdateError: the version could not be read whole. The weights are as they were.
            ValueError: ``version`` is below 1.
        """
        if version is not None and version < 1:
            raise ValueError(f"expected a version from 1 on, got {version}.")
        for _ in range(2):
            try:
                return self._update_from(self.version, version)
            except DamagedUpdateError as error:
                logger.warning("Version %d stays: %s Reading again.", self.version, error)
        return self._update_from(0, version)

    def _update_from(self, start: int, version: int | None) -> bool:
        # The list is read in each attempt, because a file that is gone may have been replaced by newer ones.
        log = Log.from_json(self._read(LIST, MAX_LIST_BYTES))
        wanted = log.version if version is None else version
        is_same_log = log.run == self._run
        if wanted == 0:  # nothing was published yet
            return False
        if is_same_log and wanted <= self.version:  # an older list comes late, from a cache or a slow file system
            return False
        if not is_same_log and wanted < self.version:
            logger.warning(
                "Version %d of another log follows version %d: was the folder made anew?", wanted, self.version
            )
        start = start if is_same_log else 0
        chain = log.chain(start, wanted)
        if chain is None:
            raise DamagedUpdateError(f"{LIST} has no files that make version {wanted} of version {start}.")
        weights = dict(self.weights)
        for file in chain:
            weights = _applied(file, log.run, self._read(file.name, file.num_bytes), weights)
        self.weights, self.version, self._run = weights, wanted, log.run
        return True


def _applied(file: LogFile, run: str, content: bytes, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights after a file of the log. Those before it stay as they are.

    Raises:
        DamagedUpdateError: the file is damaged, or another one than the list says.
    """
    try:
        metadata, tensors = _opened(content)
        if (metadata.run, metadata.version, metadata.base) != (run, file.version, file.base):
            raise ValueError(
                f"expected version {file.version} of {file.base} in log {run}, got {metadata.version} of {metadata.base} in "
                f"{metadata.run}"
            )
        if metadata.checksums.keys() != tensors.keys():
            raise ValueError("its checksums are those of other weights")
        new = tensors if file.base == 0 else {name: _changed(weights[name], wire) for name, wire in tensors.items()}
        wrong = [name for name, weight in new.items() if checksum(weight) != metadata.checksums[name]]
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedUpdateError(f"{file.name} is damaged, or another file: {error}.") from error
    if wrong:
        raise DamagedUpdateError(
            f"{file.name} gives {len(wrong)} weights another checksum than expected, first {wrong[0]}."
        )
    return new if file.base == 0 else weights | new


def _opened(content: bytes) -> tuple[FileMetadata, dict[str, Tensor]]:
    tensors = load(content)  # checks the header against the size of the content
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return FileMetadata.from_metadata(header.get("__metadata__")), tensors


def _changed(weight: Tensor, wire: Tensor) -> Tensor:
    """Return a copy of a weight with the changes of a wire."""
    if wire.dtype != torch.uint8 or wire.ndim != 1:
        raise ValueError(f"expected a wire of bytes, got {wire.dtype} of shape {tuple(wire.shape)}")
    new = weight.clone()
    one = torch.zeros(1, dtype=torch.int64)
    apply_changes(wire, one + wire.numel(), new, offsets=one)
    return new
