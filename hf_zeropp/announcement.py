"""The lines that a user reads when ZeRO++ is applied: that it runs, on which nodes, and what crosses them; or why it does not.

These lines are logged at warning level, though nothing is wrong: it is the level that shows where a script configures no logging,
which is how Transformers and Accelerate speak to users. A line at info level would be seen by few, and a job that runs on other
nodes or settings than was meant looks like one that runs well.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch.distributed as dist

from hf_zeropp.comm.topology import Topology
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.traffic import Bytes, Traffic, total, with_noun

logger = logging.getLogger(__name__)


def log_inactive(topology: Topology, num_nodes: int, *, is_enabled: bool) -> None:
    """Say that FSDP2's own collectives stay, and what a user can do whose model is sharded within a node. Rank 0 speaks for all.

    Args:
        topology: one node.
        num_nodes: the nodes on which the model is trained, with all its replicas.
        is_enabled: False with ``ZEROPP_ENABLED=0``.
    """
    if not is_enabled or topology.num_ranks == 1:
        logger.info("%s: FSDP2's own collectives stay.", "One rank only" if is_enabled else "ZEROPP_ENABLED=0")
    elif topology.rank == 0 and num_nodes > 1:
        logger.warning(
            "Each replica of the model lies within one node (%d ranks), so ZeRO++ has nothing to do: FSDP2's own collectives "
            "stay, and average the gradients of %d nodes at their full size. Shard the model over several nodes "
            "(dp_replicate_size of 1, or a smaller one), and ZeRO++ quantizes what crosses them.",
            topology.num_ranks,
            num_nodes,
        )
    elif topology.rank == 0:
        logger.warning(
            "One node only (%d ranks), and nothing crosses nodes: FSDP2's own collectives stay. If the links between these "
            'ranks are slow (GPUs without NVLink), preset="pcie" quantizes what they exchange.',
            topology.num_ranks,
        )


def log_active(
    config: ZeroPPConfig, traffic: Traffic, predicted: Mapping[str, Bytes], *, num_units: int, on_cpu: bool
) -> None:
    """Say that ZeRO++ runs, and what is expected to cross nodes. Rank 0 speaks for all.

    Args:
        config: the settings.
        traffic: knows the nodes, and what stock FSDP2 sends at least.
        predicted: bytes that a rank receives in a step of one micro-step, by collective.
        num_units: number of units.
        on_cpu: whether ranks compute on CPUs.
    """
    if dist.get_rank() != 0:
        return
    name = config.preset_name(on_cpu=on_cpu)
    logger.warning(
        "ZeRO++ is on: %d nodes x %s, %s, %s. In a step of one micro-step a node is expected to receive %s%s from "
        "other nodes. FSDP2's own collectives would take %s or more.",
        traffic.num_nodes,
        with_noun(traffic.ranks_per_node, "rank"),
        f"preset {name!r}" if name else "settings of no preset",
        with_noun(num_units, "unit"),
        # How many words change is known after a step. Until then whole weights, or deltas, are counted.
        "at most " if config.sends_changes else "",
        _in_words(traffic.ranks_per_node * total(predicted.values()).cross_node),
        _in_words(traffic.zero3_bytes(1)),
    )


def _in_words(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
