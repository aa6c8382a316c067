"""Checkpoints of gradients: what a run needs besides weights and optimizer states, in one file per rank.

These are the residuals of error feedback, and how many random numbers the rounding of partial sums has taken
(``qgz_accumulator="bfloat16"``).

A residual fits one rank of one world with one layout. If it does not fit (another world, other settings, no file), it starts
from zero, and a log line says why: that step has a little more error, and nothing worse. Each rank decides this alone, because
a residual chooses no collective.

A count that does not fit starts from zero as well: the run goes on with other random numbers than the one that was saved.
Partial sums are not saved, whatever their dtype: a checkpoint belongs between steps, as it does with stock FSDP2's gradients.

Secondary shards are not saved. At a checkpoint whole weights cross instead of a delta, both in the run that saves it and in the
run that resumes from it, so both continue from the same copies.

A file is checked as a whole before any residual is taken over. Sizes must be those of the layouts, because kernels write to a
residual in place, and every value must be finite, because a NaN would spread to all weights in one step.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from hf_zeropp import ops
from hf_zeropp.comm.topology import Topology
from hf_zeropp.comm.two_hops import Rounding
from hf_zeropp.files import check_file, open_tensors, written_at_once
from hf_zeropp.fsdp.reduce_scatter import ZeroPPReduceScatter
from hf_zeropp.ops.format import WireLayout

logger = logging.getLogger(__name__)

_METADATA = "zeropp"
_LOSS_SCALES = (2.0**-64, 2.0**64)
"""Loss scales beyond these are no result of a loss scaler, and a factor between two of them could overflow."""


_MAX_COUNT = 2**63


class _Saved(NamedTuple):
    """One unit's residual, as a file holds it: the two arguments of ``Residual.restore``."""

    wires: list[torch.Tensor]
    rest: dict[str, Any]


def state_file(folder: str | os.PathLike[str], rank: int, index: int = 0) -> Path:
    """Return the path of one rank's file in the checkpoint ``folder``. ``index`` tells models apart."""
    return Path(folder, f"zeropp_{index}_rank_{rank}.safetensors")


def save_residuals(
    path: Path, reduces: Sequence[ZeroPPReduceScatter], topology: Topology, rounding: Rounding | None = None
) -> None:
    """Write the residuals of all units and the count of ``rounding``. The file appears when it is whole, so no half is left."""
    tensors: dict[str, torch.Tensor] = {}
    units: dict[str, Any] = {}
    for reduce in reduces:
        wires, rest = reduce.residual.state()
        if wires:
            units[reduce.unit.name] = rest
            tensors |= {_key(reduce.unit.name, index): wire for index, wire in enumerate(wires)}
    # The name is kept, so that a file that was renamed is not taken for the residuals of another rank or model.
    count = 0 if rounding is None else rounding.count
    state = {"file": path.name, "world": _world(topology), "units": units, "roundings": count}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_at_once(path) as partial:
        save_file(tensors, partial, metadata={_METADATA: json.dumps(state)})


def load_residuals(
    path: Path, reduces: Sequence[ZeroPPReduceScatter], topology: Topology, rounding: Rounding | None = None
) -> None:
    """Take over what ``save_residuals`` wrote; if it does not fit, clear the residuals and the count, and log why."""
    for reduce in reduces:
        reduce.residual.clear()
    if rounding is not None:
        rounding.count = 0
    try:
        saved, count = _read(path, reduces, topology)
    except ValueError as error:
        logger.warning(
            "Error feedback begins anew, with residuals of zero, and rounding with other random numbers: %s.", error
        )
        return
    if rounding is not None:
        rounding.count = count
    for reduce in (reduce for reduce in reduces if reduce.residual.is_kept):
        name = reduce.unit.name
        if name in saved:
            reduce.residual.restore(*saved[name], torch.device(reduce.unit.device_type))
        elif reduce.unit.trainable:
            logger.warning("The checkpoint has no residual of unit %s: it begins at zero.", name)


def _read(path: Path, reduces: Sequence[ZeroPPReduceScatter], topology: Topology) -> tuple[dict[str, _Saved], int]:
    """Return the residuals of the units that the file knows, and the count of roundings.

    Raises:
        ValueError: there is no such file, it cannot be used, or another rank or world wrote it. The message says which.
    """
    if not os.path.lexists(path):
        raise ValueError(f"there is no {path.name} in the checkpoint")
    try:
        check_file(path, path.parent)
        with open_tensors(path) as file:
            state = _state_in(file)
            saved = {
                reduce.unit.name: _saved_unit(file, state["units"][reduce.unit.name], reduce)
                for reduce in reduces
                if state["world"] == _world(topology) and reduce.unit.name in state["units"]
            }
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read ({error})") from error
    if state["file"] != path.name:
        raise ValueError(f"{path.name} was saved under another name, {state['file']!r}")
    if state["world"] != _world(topology):
        saver = _words(state["world"])
        raise ValueError(f"the checkpoint was saved by {saver}, this is {_words(_world(topology))}")
    return saved, state["roundings"]


def _state_in(file: Any) -> dict[str, Any]:
    """Return the metadata that ``save_residuals`` wrote: file, world and units."""
    state = json.loads((file.metadata() or {}).get(_METADATA, "null"))
    types = {"file": str, "world": list, "units": dict}
    if not isinstance(state, dict) or any(not isinstance(state.get(name), kind) for name, kind in types.items()):
        raise ValueError("it holds no state of error feedback")
    if [type(size) for size in state["world"]] != [int, int]:
        raise ValueError("it does not say which world saved it")
    count = state.setdefault("roundings", 0)  # files of earlier versions have no count
    if type(count) is not int or not 0 <= count < _MAX_COUNT:
        raise ValueError(f"it counts {count!r} roundings")
    return state


def _saved_unit(file: Any, rest: Any, reduce: ZeroPPReduceScatter) -> _Saved:
    """Read the residual of one unit, and check that it is one."""
    name = reduce.unit.name
    kinds, scale, num_steps = (
        rest.get(key) if isinstance(rest, dict) else None for key in ("kinds", "scale", "num_steps")
    )
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"it does not say what the residual of {name} means")
    if type(num_steps) is not int or num_steps < 0:
        raise ValueError(f"the residual of {name} has served {num_steps!r} steps")
    if not isinstance(scale, (int, float)) or not _LOSS_SCALES[0] <= scale <= _LOSS_SCALES[1]:
        raise ValueError(f"the residual of {name} has the loss scale {scale!r}")
    keys = [_key(name, index) for index in range(len(kinds))]
    wires = [_wire(file, key, kind, reduce.hops.cross_hop.size) for key, kind in zip(keys, kinds, strict=True)]
    return _Saved(wires, rest)


def _wire(file: Any, key: str, kind: str, num_slices: int) -> torch.Tensor:
    """Read one chunk of a residual, which ``kind`` describes: see ``_kinds_of`` in error_feedback.py."""
    try:
        layout = WireLayout.from_spec(kind.removeprefix("rotated "))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{key} has no layout: {kind!r}") from error
    stored, expected = file.get_slice(key), [num_slices * layout.nbytes]
    if (stored.get_dtype(), list(stored.get_shape())) != ("U8", expected):
        raise ValueError(f"{key} is {stored.get_dtype()} {stored.get_shape()}; its layout has U8 {expected}")
    wire = file.get_tensor(key)
    if not ops.dequantize(wire, layout, dtype=torch.float32).isfinite().all():
        raise ValueError(f"{key} holds values that are not finite")
    return wire


def _key(unit: str, chunk: int) -> str:
    return f"{unit}:{chunk}"


def _world(topology: Topology) -> list[int]:
    return [topology.world_size, topology.ranks_per_node]


def _words(world: list[int]) -> str:
    return f"{world[0]} ranks, {world[1]} to a node"
