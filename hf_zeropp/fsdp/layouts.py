"""Wire layouts of a unit: which of its parameters travel quantized, in how many bits, in blocks of which size.

A run and the estimate ask the same functions, so the bytes that are predicted are the bytes that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zeropp.comm.two_hops import GatherLayouts, ReduceLayouts
from hf_zeropp.config import AUTO, ZeroPPConfig
from hf_zeropp.fsdp.param_shard import ParamShard
from hf_zeropp.ops.format import DELTA_BLOCK, GRAD_BLOCK, WEIGHT_BLOCK, Segment, WireLayout

FROZEN_WIRE_BITS = 8
"""Bits of frozen weights on the wire, and in the copy, where trainable weights send deltas. Frozen weights cross nodes once
and stay as they crossed, so a coarse form would cost accuracy for ever."""


def wire_layout(shards: Sequence[ParamShard], bits: int | None, block: int, raw_dtype: torch.dtype) -> WireLayout:
    """Return the layout of a unit's flat shard.

    Matrices travel in ``bits``. Parameters with one dimension (norms, biases) travel unquantized in ``raw_dtype``: they are a
    thousandth of the bytes, and an error in them reaches every feature.

    Args:
        shards: the parameters of the flat shard, in order. Blocks never straddle two of them.
        bits: bits per element on the wire; None for ``raw_dtype``.
        block: elements that share one scale.
        raw_dtype: dtype of what is not quantized.
    """
    # The padding travels too: it makes the wires of all ranks equally long, as the collectives need them.
    segments = [Segment(shard.padded_numel, bits if shard.ndim > 1 else None) for shard in shards]
    return WireLayout(segments, block, raw_dtype)


def gather_layouts(
    config: ZeroPPConfig, shards: Sequence[ParamShard], dtype: torch.dtype, *, trains: bool
) -> GatherLayouts:
    """Return the wire layouts for gathering a unit in ``dtype``.

    Args:
        config: the settings of the run.
        shards: all parameters of the unit.
        dtype: the dtype in which FSDP2 gathers them.
        trains: whether any of them is trainable. Frozen weights have no use for deltas.
    """
    # With values there is one layout: what crosses nodes is what is kept. With deltas the copy is kept finer than the
    # wire, because it has to hold the sum of many deltas and not the rounding of one. Changed words need a copy of words, and
    # their ``qwz_bits`` are None.
    is_rounded = config.sends_deltas and trains
    delta = wire_layout(shards, config.qwz_bits, DELTA_BLOCK, dtype) if is_rounded else None
    kept_bits = config.qwz_bits
    if config.sends_deltas:
        kept_bits = config.hpz_bits if trains else FROZEN_WIRE_BITS
    assert config.qwz_intra_bits != AUTO, "settings are resolved where the device is known"
    return GatherLayouts(
        kept=wire_layout(shards, kept_bits, WEIGHT_BLOCK, dtype),
        delta=delta,
        sends_changes=config.sends_changes,
        is_native=config.qwz_intra_bits is None,
    )


def reduce_layouts(
    config: ZeroPPConfig, shards: Sequence[ParamShard], dtype: torch.dtype, *, quantizes: bool
) -> ReduceLayouts:
    """Return the wire layouts for reducing a unit's gradients in ``dtype``.

    Args:
        config: the settings of the run.
        shards: the parameters whose gradients are reduced.
        dtype: the dtype in which FSDP2 hands gradients to the reduction.
        quantizes: whether gradients are quantized at this point of training (``qgz_until``).
    """
    assert config.qgz_intra_bits != AUTO, "settings are resolved where the device is known"
    # Both hops change together: partial sums are sums of gradients that were encoded one way.
    node_bits, cross_bits = (config.qgz_intra_bits, config.qgz_bits) if quantizes else (None, None)
    return ReduceLayouts(
        node_hop=wire_layout(shards, node_bits, GRAD_BLOCK, dtype),
        cross_hop=wire_layout(shards, cross_bits, GRAD_BLOCK, dtype),
    )
