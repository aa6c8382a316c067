"""Scripts that do not know this package: their Accelerator gets a ZeroPPPlugin, and a job that uses none fails.

``hf_zeropp.run`` calls ``put_in_force`` before such a script starts. From then on every Accelerator that would shard with FSDP
builds on a ZeroPPPlugin, whether the plugin that it replaces comes from the launcher's environment, from the script or from a
Trainer. Every Trainer gets a ZeroPPCallback: see default_callback.py.

The seam is the argument ``fsdp_plugin`` of ``Accelerator``, which is public and where all three ways meet. Replacing the class
``FullyShardedDataParallelPlugin`` by name would miss modules that have imported it already, and would break their checks of its
type.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_zeropp.apply import has_handles
from hf_zeropp.comm.backend_variables import set_backend_variables
from hf_zeropp.comm.gloo_exit import give_gloo_time_at_exit
from hf_zeropp.compat.extend import extend
from hf_zeropp.config import ENV_ENABLED, ZeroPPConfig, is_enabled
from hf_zeropp.fsdp.sharded_models import find_sharded_modules
from hf_zeropp.integrations.accelerate import ZeroPPPlugin, check_ranks_meet, launcher_says
from hf_zeropp.step_record import record_steps

logger = logging.getLogger(__name__)

Settings = ZeroPPConfig | Mapping[str, Any] | str | None

_settings: Settings = None
"""The settings that ``put_in_force`` was given. Plugins that are made later take them. None stands for the environment."""


def put_in_force(settings: Settings = None) -> None:
    """Let every Accelerator and Trainer of this process run under ZeRO++. With ``ZEROPP_ENABLED=0`` they run on FSDP2's own.

    Args:
        settings: as for ``apply_zeropp``. None stands for the environment.

    Raises:
        ValueError: the settings or the switch are wrong.
    """
    global _settings
    _settings = settings
    if is_enabled():
        ZeroPPConfig.resolve(settings)  # a mistake shows before the script has loaded anything
        _watch_first_steps()
    else:
        record_steps()
    set_backend_variables()
    give_gloo_time_at_exit()
    # It is imported here and not above, because that takes a second, and wrong settings should be refused before.
    from hf_zeropp.integrations.launch.default_callback import serve_scripts

    serve_scripts(settings)
    extend(Accelerator, "__init__", _initialize)


@functools.cache  # plugins of training programs may ask several times
def _watch_first_steps() -> None:
    register_optimizer_step_post_hook(_first_steps)


def _initialize(
    original: Callable[..., None],
    self: Accelerator,
    *args: Any,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    **kwargs: Any,
) -> None:
    original(self, *args, fsdp_plugin=_plugin_for(fsdp_plugin), **kwargs)
    check_ranks_meet()


def _plugin_for(stock: FullyShardedDataParallelPlugin | None) -> FullyShardedDataParallelPlugin | None:
    """Return the plugin that an Accelerator gets in place of ``stock``; None where it would not shard."""
    # A later Accelerator shares the state of the first, plugin included. Another plugin would be ignored.
    active = AcceleratorState._shared_state.get("fsdp_plugin")
    if isinstance(active, ZeroPPPlugin) and not isinstance(stock, ZeroPPPlugin):
        return active
    version = os.environ.get("FSDP_VERSION", "1") if stock is None else stock.fsdp_version
    if not is_enabled() and str(version) == "1":
        return stock  # ZeRO++ needs FSDP2, and a job without ZeRO++ does not
    if stock is None:
        return ZeroPPPlugin(zeropp=_settings) if launcher_says("ACCELERATE_USE_FSDP") else None
    return stock if isinstance(stock, ZeroPPPlugin) else ZeroPPPlugin.in_place_of(stock, _settings)


class FirstSteps:
    """Watches the optimizer steps of the process until a model that runs under ZeRO++ makes one.

    A script may train a small model on each rank by itself first: a probe, a classifier of its data. So a step without ZeRO++ is
    a warning, and an error at the end of the script if it never came to ZeRO++ (``check_use``). Every rank looks at its own
    process alone, and ranks run the same script.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._without: str | None = None
        """The optimizer of the first step without ZeRO++."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take note of a step. A hook of all optimizers."""
        # PyTorch makes an optimizer's states by a step with a rate of 0 before it loads them, when nothing has run yet.
        if self._is_over or all(group.get("lr") == 0 for group in optimizer.param_groups):
            return
        if _world_size() == 1:
            self._is_over = True
            logger.warning(
                "There is one process, so nothing is sharded and ZeRO++ does nothing. For more, set `distributed_type: FSDP` and "
                "`num_processes` in the Accelerate config."
            )
        elif _is_in_use():
            self._is_over = True
        elif self._without is None:
            self._without = type(optimizer).__name__
            logger.warning(
                "The first optimizer step (%s) has ended, and %s For a model that each rank trains by itself, such as a probe, "
                "this is right. If no other one comes under ZeRO++ later, the script will end with an error.",
                self._without,
                _remedy(),
            )

    def check_use(self) -> None:
        """Raise a ValueError if this process made optimizer steps and none of them under ZeRO++."""
        if self._without and not self._is_over:
            raise ValueError(f"The script has ended after optimizer steps ({self._without}), and {_remedy()}")


_first_steps = FirstSteps()


def check_use() -> None:
    """Raise a ValueError if the script that ``put_in_force`` preceded has trained, and never under ZeRO++."""
    _first_steps.check_use()


def _remedy() -> str:
    state = AcceleratorState._shared_state
    kind = f"distributed_type {state['distributed_type'].value}" if "distributed_type" in state else "no Accelerator"
    modules = "sharded models without a handle" if find_sharded_modules() else "no sharded model"
    # Accelerate's launcher exports this variable in any case. Behind another launcher nothing reads a file of Accelerate's.
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        shard = "Set `distributed_type: FSDP` and `fsdp_version: 2` in the Accelerate config"
    else:
        shard = (
            "This launcher (torchrun) tells Accelerate nothing: export ACCELERATE_USE_FSDP=true and FSDP_VERSION=2, on CPU also "
            "ACCELERATE_USE_CPU=true"
        )
    return (
        "no model runs under ZeRO++, though this job was started with it: expected a model that Accelerate or a Trainer shards "
        f"with FSDP2, got {kind} and {modules}. {shard} (or pass --fsdp full_shard to a script of the Trainer's), or call "
        f"apply_zeropp(model). {ENV_ENABLED}=0 trains without ZeRO++."
    )


def _world_size() -> int:
    # A probe may be trained before the process group is there. Launchers tell its size in the environment.
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _is_in_use() -> bool:
    """Return whether a model has a handle, or the script itself turned ZeRO++ off."""
    active = AcceleratorState._shared_state.get("fsdp_plugin")
    is_turned_off = isinstance(active, ZeroPPPlugin) and active.zeropp is False
    return is_turned_off or has_handles()
