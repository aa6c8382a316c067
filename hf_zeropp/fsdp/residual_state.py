"""Checkpoints of error feedback: the residuals that a run needs besides weights and optimizer states, in one file per rank.

A residual fits one rank of one world with one layout. If it does not fit (another world, other settings, no file), it starts
from zero, and a log line says why: that step has a little more error, and nothing worse. Each rank decides this alone, because
a residual chooses no collective.

Secondary shards are not saved. At a checkpoint whole weights cross instead of a delta, both in the run that saves it and in the
run that resumes from it, so both continue from the same copies.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_zeropp.comm.topology import Topology
from hf_zeropp.fsdp.reduce_scatter import ZeroPPReduceScatter

logger = logging.getLogger(__name__)

_METADATA = "zeropp"


def state_file(folder: str | os.PathLike[str], rank: int, index: int = 0) -> Path:
    """Return the path of one rank's file in the checkpoint ``folder``. ``index`` tells models apart."""
    return Path(folder, f"zeropp_{index}_rank_{rank}.safetensors")


def save_residuals(path: Path, reduces: Sequence[ZeroPPReduceScatter], topology: Topology) -> None:
    """Write the residuals of all units. The file appears when it is whole, so a run that dies here leaves no damaged one."""
    tensors: dict[str, torch.Tensor] = {}
    units: dict[str, Any] = {}
    for reduce in reduces:
        wires, rest = reduce.residual.state()
        if wires:
            units[reduce.unit.name] = rest
            tensors |= {_key(reduce.unit.name, index): wire for index, wire in enumerate(wires)}
    state = {"world": _world(topology), "units": units}
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial, metadata={_METADATA: json.dumps(state)})
    partial.replace(path)


def load_residuals(path: Path, reduces: Sequence[ZeroPPReduceScatter], topology: Topology) -> None:
    """Take over what ``save_residuals`` wrote; if it does not fit, clear the residuals and log why."""
    for reduce in reduces:
        reduce.residual.clear()
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()[_METADATA])
            if state["world"] == _world(topology):
                for reduce in reduces:
                    _restore(file, state["units"], reduce)
                return
            reason = f"the checkpoint was saved by {_words(state['world'])}, this is {_words(_world(topology))}"
    except FileNotFoundError:
        reason = f"there is no {path.name} in the checkpoint"
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:  # cut off, or not ours
        reason = f"{path.name} cannot be read ({type(error).__name__}: {error})"
    for reduce in reduces:
        reduce.residual.clear()
    logger.warning("Error feedback begins anew, with residuals of zero: %s.", reason)


def _restore(file: Any, units: dict[str, Any], reduce: ZeroPPReduceScatter) -> None:
    name = reduce.unit.name
    if name in units:
        wires = [file.get_tensor(_key(name, index)) for index in range(len(units[name]["kinds"]))]
        reduce.residual.restore(wires, units[name], torch.device(reduce.unit.device_type))
    elif reduce.unit.trainable:
        logger.warning("The checkpoint has no residual of unit %s: it begins at zero.", name)


def _key(unit: str, chunk: int) -> str:
    return f"{unit}:{chunk}"


def _world(topology: Topology) -> list[int]:
    return [topology.world_size, topology.ranks_per_node]


def _words(world: list[int]) -> str:
    return f"{world[0]} ranks, {world[1]} to a node"
