"""The things that the units of one model share while ZeRO++ runs on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from hf_zeropp import devices
from hf_zeropp.comm.topology import ShardMesh
from hf_zeropp.comm.wire_buffers import WireBuffers
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.gradients.drivers import new_driver
from hf_zeropp.fsdp.gradients.micro_steps import MicroSteps
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.traffic import Traffic

logger = logging.getLogger(__name__)


class ModelRun:
    """The things that the units of one model share. They are made once, when ZeRO++ is applied, and passed to all parts of it.

    Args:
        config: the settings in force.
        mesh: the ranks over which the model is sharded, but for experts that have a mesh of their own.
        traffic: counts bytes and steps.
        checks: whether copies are compared with the masters, and ranks with each other (``ZEROPP_CHECK=1``).

    Attributes:
        config, mesh, traffic, checks: as given.
        micro_steps: where accumulation stands, and whether gradients are quantized now.
        buffers: of wires. One pool serves all hops of the model: few units are under way at a time, and a pool per unit would
            hold a buffer for each of them.
        driver: of reductions: it lets their hops run while the model computes.
    """

    def __init__(self, config: ZeroPPConfig, mesh: ShardMesh, traffic: Traffic, *, checks: bool = False) -> None:
        self.config = config
        self.mesh = mesh
        self.traffic = traffic
        self.checks = checks
        self.micro_steps = MicroSteps(config.quantizes_gradients)
        self.buffers = WireBuffers()
        self.driver = new_driver(mesh.device_type, overlaps=config.overlap)
        self._warned: set[tuple[str, str]] = set()

    @property
    def overlaps_by_itself(self) -> bool:
        """Whether hops run while the model computes on a backend without streams, where a collective blocks otherwise."""
        return self.config.overlap and not devices.has_streams(self.mesh.device_type)

    def warn(self, message: str, units: Sequence[Unit]) -> None:
        """Log ``message``, in which ``%s`` stands for the names of those units that it was not logged for before.

        Rank 0 alone logs, because all ranks hold the same units.
        """
        names = [unit.name for unit in units if (message, unit.name) not in self._warned]
        self._warned.update((message, name) for name in names)
        if names and dist.get_rank() == 0:
            logger.warning(message, ", ".join(names))
