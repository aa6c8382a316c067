"""A warning for training whose steps are too small for deltas of few bits."""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist

from hf_zeropp.config import ZeroPPConfig

logger = logging.getLogger(__name__)

LOWEST_RATES = {4: 1e-5, 3: 1e-4, 2: 1e-4}
"""Bits of a delta, and the lowest learning rate of AdamW at which ranks compute with weights that are not far behind.

At a tenth of it a trained model shows half of stock FSDP2's progress behind 40 steps (``scripts/results/real_model.md``). 3 bits
are not measured, and have the limit of 2."""


def lowest_rate(config: ZeroPPConfig) -> float:
    """Return the lowest learning rate at which a model trains under these settings; 0.0 where they set no limit."""
    return LOWEST_RATES.get(config.qwz_bits or 0, 0.0) if config.sends_deltas else 0.0


def warn_of_low_rate(config: ZeroPPConfig, optimizer: torch.optim.Optimizer) -> None:
    """Tell a user, on rank 0, that the optimizer's learning rate is too low for the deltas in force."""
    lowest = lowest_rate(config)
    if not lowest or (rate := _highest_rate(optimizer)) >= lowest or dist.get_rank() != 0:
        return
    logger.warning(
        "The highest learning rate of %s is %.3g. Changes of weights in %d bits are too coarse for steps of rates under %g: "
        "ranks compute with weights that lag behind (at a tenth of that rate with half of stock FSDP2's progress, "
        "scripts/results/real_model.md). Set preset 'exact', which rounds no weight and sends fewer bytes at such rates.",
        type(optimizer).__name__,
        rate,
        config.qwz_bits,
        lowest,
    )


def _highest_rate(optimizer: torch.optim.Optimizer) -> float:
    # A schedule that warms up begins far under the rate that it is meant for. PyTorch's schedulers note that rate in the group.
    rates = [group.get(key) for group in optimizer.param_groups for key in ("lr", "initial_lr", "max_lr")]
    return max((float(rate) for rate in rates if rate is not None), default=math.inf)
