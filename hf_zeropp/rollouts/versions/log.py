"""The log of versions: the files in a sender's folder, and the list that names them.

Versions count up from 1. Two kinds of safetensors files hold them, and neither changes once it is listed:

    whole-7.safetensors      every weight of version 7, as it is
    changes-7.safetensors    for every weight that changed from version 6 to 7: the wire of ``ops.encode_changes``

The metadata of a file says which version it makes of which, and has a checksum of each weight as it is afterwards.
``updates.json`` lists the files. A version begins to exist when the list is replaced, after its files are written.

[Note: no acknowledgements] A sender that waited for its receivers would have to know them, and one that is slow or gone would
hold up the others. Here receivers say nothing. The log keeps the changes back to the whole copy before the newest one, so a
receiver finds a chain of changes from its own version, or a whole copy and a chain from there, whatever it has missed.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import torch

LIST = "updates.json"
MAX_LIST_BYTES = 2**20
METADATA = "update"
"""The key in a safetensors file's metadata under which its ``FileMetadata`` stands as JSON."""


class DamagedUpdateError(ValueError):
    """A file of the log is cut off, changed, missing, or does not make of a version what it says."""


@dataclasses.dataclass(frozen=True)
class LogFile:
    """A file of the log.

    Attributes:
        name: of the file.
        version: the version that it makes.
        base: the version that it is applied to; 0 for a whole copy.
        num_bytes: its size.
    """

    name: str
    version: int
    base: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Log:
    """The list of files.

    Attributes:
        run: tells this log from others, whose versions may have the same numbers and other weights. Every sender has its own.
        files: sorted by version; within a version the changes stand before the whole copy.
    """

    run: str
    files: tuple[LogFile, ...] = ()

    @property
    def version(self) -> int:
        """The newest version; 0 for none."""
        return self.files[-1].version if self.files else 0

    def chain(self, version: int, wanted: int) -> list[LogFile] | None:
        """Return the files that make one version of another, in order.

        Args:
            version: the version that a receiver has; 0 for none.
            wanted: the version that it is to have.

        Returns:
            The chain with the fewest bytes; None if there is none.
        """
        # Bases are smaller than versions, and files lie by version, so one pass finds the best way to every version.
        best: dict[int, list[LogFile]] = {version: [], 0: []}
        for file in self.files:
            if file.base in best:
                way = [*best[file.base], file]
                if file.version not in best or _num_bytes(way) < _num_bytes(best[file.version]):
                    best[file.version] = way
        return best.get(wanted)

    def to_json(self) -> str:
        """Return the text of the list."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Log:
        """Read the text of a list.

        Raises:
            DamagedUpdateError: it is not a list.
        """
        try:
            fields = json.loads(text)
            files = tuple(LogFile(**_checked(LogFile, file)) for file in fields["files"])
            log = cls(**_checked(cls, {**fields, "files": files}))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedUpdateError(f"{LIST} is damaged, or no list of updates: {error!r}") from error
        is_in_order = all(0 <= file.base < file.version and file.num_bytes >= 0 for file in files)
        if not is_in_order or sorted(files, key=lambda file: file.version) != list(files):
            raise DamagedUpdateError(f"{LIST} is damaged: its versions are not in order.")
        return log


@dataclasses.dataclass(frozen=True)
class FileMetadata:
    """The account that a file of the log gives of itself.

    Attributes:
        run: the log it belongs to.
        version: as in ``LogFile``.
        base: as in ``LogFile``.
        checksums: of each weight in the file, as it is in ``version``.
    """

    run: str
    version: int
    base: int
    checksums: dict[str, str]

    def to_metadata(self) -> dict[str, str]:
        """Return it as the metadata of a safetensors file."""
        return {METADATA: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str] | None) -> FileMetadata:
        """Read it from the metadata of a safetensors file. Raises ValueError, KeyError or TypeError for others."""
        return cls(**_checked(cls, json.loads((metadata or {})[METADATA])))


def checksum(weight: torch.Tensor) -> str:
    """Return 8 digits that tell a weight's bits, dtype and shape from those of a damaged one."""
    data = weight.detach().cpu().contiguous()
    form = zlib.crc32(f"{data.dtype} {tuple(data.shape)}".encode())
    return f"{zlib.crc32(data.view(-1).view(torch.uint8).numpy(), form):08x}"  # type: ignore[arg-type]  # arrays are buffers


def _num_bytes(files: list[LogFile]) -> int:
    return sum(file.num_bytes for file in files)


_TYPES = {"run": str, "name": str, "version": int, "base": int, "num_bytes": int, "checksums": dict, "files": tuple}


def _checked(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a dataclass, if they have the types that it declares."""
    for name, value in fields.items():
        if type(value) is not _TYPES[name]:
            raise ValueError(f"{cls.__name__}.{name} is {value!r}")
    return fields
