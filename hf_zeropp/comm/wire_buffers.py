"""The memory of wire buffers."""

from __future__ import annotations

import bisect

import torch

from hf_zeropp import devices


def new_wire(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a wire buffer with arbitrary content.

    It is no inference tensor, even when a forward pass under ``torch.inference_mode`` needs it first: buffers are kept, and
    a tensor made in that mode cannot be written in training.
    """
    if not torch.is_inference_mode_enabled():  # leaving a mode that is not on costs more than the allocation
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


ROUNDED_TO = 1 << 16
"""Bytes of which ``take_rounded`` makes multiples."""


class WireBuffers:
    """Wire buffers on CPU that are used again.

    A fresh allocation of many megabytes comes from the operating system page by page, and costs more than the kernel that
    fills it. On other devices the caching allocator reuses memory already, and orders the reuse by stream.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._sizes: list[int] = []  # of ``_free``, in ascending order

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a buffer [num_bytes] with arbitrary content. ``give`` it back when its bytes are no longer needed."""
        if devices.has_streams(device):
            return new_wire(num_bytes, device)
        fit = bisect.bisect_left(self._sizes, num_bytes)
        # A much larger buffer would be missed where its size is needed, and a second one of that size allocated there.
        if fit == len(self._sizes) or self._sizes[fit] > 2 * num_bytes:
            return new_wire(num_bytes, device)
        size, whole = self._sizes.pop(fit), self._free.pop(fit)
        return whole if size == num_bytes else whole[:num_bytes]

    def take_rounded(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a buffer [num_bytes] as ``take`` does, whose memory fits a size that differs a little from step to step."""
        return self.take(-(-num_bytes // ROUNDED_TO) * ROUNDED_TO, device)[:num_bytes]

    def give(self, *buffers: torch.Tensor) -> None:
        """Take buffers back. The caller must not use them any more."""
        for buffer in buffers:
            if not devices.has_streams(buffer.device):
                whole = buffer if buffer._base is None else buffer._base  # `take` may have cut it to size
                size = whole.numel()
                fit = bisect.bisect_right(self._sizes, size)
                self._sizes.insert(fit, size)
                self._free.insert(fit, whole)
