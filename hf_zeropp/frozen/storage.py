"""The dtype under which FSDP2 shards codes and scales.

Codes and scales are bytes (uint8): in memory, on disk, and for everything that decodes them. FSDP2 before torch 2.12 shards
floating-point parameters only. There the same bytes are sharded under a float dtype of one byte per element.

[Note: bytes under a float dtype]
As numbers these bytes mean nothing, and some are NaNs or infinities. So nothing may compute with them or cast them:

- *Reading.* Everything that reads codes or scales calls ``as_bytes`` first. It returns the same memory as uint8.
- *Casting.* FSDP2 casts floating-point parameters to the ``param_dtype`` of mixed precision. So packed weights share no unit with
  dense ones where that is set, and their unit has none. ``module.to(dtype)`` converts the bytes, which stay what they are.
- *Gathering.* gloo does not know float dtypes of one byte. FSDP2 gathers a unit of several dtypes as bytes. So codes and scales
  have different dtypes, and no unit of packed weights is of one dtype.
- *Saving.* ``state_dict`` returns uint8, and ``load_state_dict`` takes it. Checkpoints are the same with every torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp import compat
from hf_zeropp.dtensors import local_part, with_local_part

_FLOATS = {"codes": torch.float8_e4m3fn, "scales": torch.float8_e5m2}

force_floats = False
"""Tests set it, to shard floats under a torch whose FSDP2 shards integers too."""


def fsdp2_needs_floats() -> bool:
    """Whether codes and scales must be sharded under a float dtype."""
    return force_floats or not compat.is_at_least("torch", (2, 12))


def as_bytes(stored: Tensor) -> Tensor:
    """Return codes or scales as uint8: the same memory, sharded or not."""
    return reinterpret(stored, torch.uint8)


def as_floats(stored: Tensor, kind: str) -> Tensor:
    """Return codes or scales (``kind``) under the float dtype in which FSDP2 shards them: the same memory."""
    return reinterpret(stored, _FLOATS[kind])


def reinterpret(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the memory of ``tensor`` under another dtype of one byte per element; ``tensor`` itself if it has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    return with_local_part(tensor, local_part(tensor.detach()).view(dtype))
