"""Persistent buffers of a model, and which of them have changed since ZeRO++ was applied.

FSDP2 leaves buffers as they are, whole on every rank. Most never change. Some are trained by means of their own, such as the bias
by which a mixture of experts keeps its experts busy (``e_score_correction_bias``), and are part of a checkpoint as weights are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn as nn
import xxhash

_DIGESTS = "_zeropp_buffers"


def remember_buffers(model: nn.Module) -> None:
    """Note the values of the persistent buffers of ``model``."""
    setattr(model, _DIGESTS, {name: _digest(buffer) for name, buffer in persistent_buffers(model)})


def changed_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers whose values are others than ``remember_buffers`` noted, by name; all if it noted none."""
    known = vars(model).get(_DIGESTS, {})
    return {name: buffer for name, buffer in persistent_buffers(model) if _digest(buffer) != known.get(name)}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the buffers that checkpoints hold, with their names, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def _digest(buffer: torch.Tensor) -> bytes:
    if buffer.is_meta:
        return b""
    data = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_digest(data)  # type: ignore[arg-type]  # arrays are buffers
