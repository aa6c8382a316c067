"""The tensors of a checkpoint in safetensors: where each is stored, and whether the packed ones are what their format says.

Everything is checked before the first tensor is used: from the headers, and for scales from their values. So a damaged checkpoint
is refused at once, on all ranks alike, and with the file's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_zeropp.files import open_tensors
from hf_zeropp.frozen.modules import CODES, SCALES
from hf_zeropp.ops import frozen_reference
from hf_zeropp.ops.frozen_format import FrozenFormat

METHOD = "zeropp"
"""The name of the quantization in a checkpoint's config."""
VERSION = 3
"""The version of the format, which a checkpoint's config says. The first one had other codes in 4 bits and said none. The second
had blocks of ``block`` columns in every row."""
_UINT8 = "U8"


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint. ``dtype`` is a name of safetensors' ("BF16")."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def tensors_in_files(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Read the headers of safetensors files.

    Raises:
        ValueError: a file is damaged or of another kind, or two hold tensors of one name.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                if name in stored:
                    raise ValueError(f"Both {str(stored[name].file)!r} and {str(file)!r} hold {name}.")
                # A slice that is never indexed reads the header alone. The tensors may be larger than the memory.
                header = tensors.get_slice(name)
                stored[name] = StoredTensor(file, header.get_dtype(), tuple(header.get_shape()))
    return stored


def check_version(version: object, source: str) -> None:
    """Check that this package can decode a packed checkpoint.

    Args:
        version: what the checkpoint's config says of it; None where it says nothing.
        source: the checkpoint's folder or hub name.

    Raises:
        ValueError: another version packed it.
    """
    # A checkpoint in 8 bits without a version is refused too: its codes still mean the same, but its config may not say whether
    # its embeddings are packed. One of version 2 is refused also where all its rows are multiples of 128, which did not
    # change: one rule is easier to know than two.
    if type(version) is not int or version != VERSION:
        stored = "an earlier version of hf_zeropp" if version is None else f"version {version!r} of hf_zeropp's format"
        raise ValueError(
            f"{source!r} was packed by {stored}, and this one decodes version {VERSION}. Pack the 16-bit checkpoint anew: "
            "from_pretrained(path, quantization_config=ZeroPPQuantConfig(bits=...)), then save_pretrained."
        )


def check_packed(stored: Mapping[str, StoredTensor], format: FrozenFormat) -> None:
    """Check every packed weight of a checkpoint: both its tensors are there, fit the format and decode to finite values.

    Args:
        stored: the tensors of the checkpoint.
        format: bits and block, as the checkpoint's config says.

    Raises:
        ValueError: a weight does not pass. The message names the file and the tensor.
    """
    scales_in: dict[Path, list[str]] = defaultdict(list)
    for name, tensor in stored.items():
        for suffix, other in ((CODES, SCALES), (SCALES, CODES)):
            partner = name.removesuffix(suffix) + other
            # A model may have tensors of its own with such names. They are floats, and ours are bytes.
            if name.endswith(suffix) and tensor.dtype == _UINT8 and partner not in stored:
                raise ValueError(f"{str(tensor.file)!r} holds {name}, and no file of the checkpoint holds {partner}.")
        if name.endswith(SCALES) and (codes := stored.get(name.removesuffix(SCALES) + CODES)):
            _check_pair(name, codes, tensor, format)
            scales_in[tensor.file].append(name)
    # Every byte is a valid code. Scales can be NaN or infinite, which would spread to a whole block. They are the small part
    # of a packed weight, so reading all of them is cheap.
    for file, names in scales_in.items():
        with open_tensors(file) as tensors:
            for name in names:
                if not _are_finite(tensors.get_tensor(name), format.bits):
                    raise ValueError(f"{str(file)!r} is damaged: {name} holds scales that are NaN or infinite.")


def _are_finite(scales: Tensor, bits: int) -> bool:
    if bits == 8:
        return bool(scales.view(torch.bfloat16).isfinite().all())
    # In 4 bits the upper 10 bits are the first scale, and all that is above the largest is NaN. The second depends on it.
    return bool(((scales.view(torch.int16) >> 6 & 0x3FF) <= frozen_reference.FIRST_MAX).all())


def _check_pair(name: str, codes: StoredTensor, scales: StoredTensor, format: FrozenFormat) -> None:
    """Raise ``ValueError`` unless there is a weight whose codes and scales have these shapes. ``name`` is that of the scales."""
    # The number of columns is not stored. It is inferred from the codes, and the scales have to agree with it.
    fits = False
    if codes.dtype == scales.dtype == _UINT8 and codes.shape and scales.shape and codes.shape[:-1] == scales.shape[:-1]:
        widest = codes.shape[-1] * 8 // format.bits
        # In 4 bits the last byte of a row may hold one code or two.
        fits = any(
            (format.code_columns(columns), format.scale_columns(columns)) == (codes.shape[-1], scales.shape[-1])
            for columns in {widest, max(widest - 1, 0)}
        )
    if not fits:
        raise ValueError(
            f"{str(scales.file)!r}: {name} is {scales.dtype} {scales.shape} beside codes that are {codes.dtype} "
            f"{codes.shape}. These are not a weight in {format.bits} bits with block={format.block}."
        )
