"""Axolotl: a plugin that is named in the config, with the settings beside it.

    plugins: [hf_zeropp.integrations.axolotl.ZeroPPAxolotlPlugin]
    zeropp: {preset: balanced}
    fsdp_version: 2
    fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}

Axolotl's trainers are those of Transformers and TRL, so the plugin does what ``hf-zeropp launch`` does for scripts that do not
know this package (launch/unmodified.py), in every rank that Axolotl starts.

Axolotl replaces the function with which Accelerate shards a model by one of its own. That one does not let a plugin keep
parameters from being sharded, and would shard frozen weights a second time. So Accelerate's own is put back. What Axolotl's adds
beside it (expert parallelism, weights that torchao has quantized) is not for a model under ZeRO++.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import accelerate.accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from hf_zeropp.integrations.launch.unmodified import put_in_force


class ZeroPPArgs(BaseModel):
    """The plugin's part of an Axolotl config.

    Attributes:
        zeropp: a mapping of settings or a file of them, None or True for the environment, False for stock FSDP2.
    """

    zeropp: dict[str, Any] | str | bool | None = None


class ZeroPPAxolotlPlugin(BasePlugin):
    """Train under ZeRO++ what Axolotl trains with FSDP2."""

    def get_input_args(self) -> str:
        """Return the name of the class of our part of the config."""
        return f"{__name__}.{ZeroPPArgs.__name__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Put the settings in force, before anything is loaded.

        Args:
            cfg: the config as it was read, not checked by Axolotl yet.

        Raises:
            ValueError: the settings are wrong, or the config does not say FSDP2.
        """
        if (settings := cfg.get("zeropp")) is False:
            return
        if not cfg.get("fsdp_config") or str(cfg.get("fsdp_version")) != "2":
            raise ValueError(
                "ZeRO++ runs on FSDP2: expected fsdp_version: 2 and an fsdp_config in the Axolotl config, got fsdp_version: "
                f"{cfg.get('fsdp_version')} and fsdp_config: {cfg.get('fsdp_config')}. Set both, or zeropp: false."
            )
        put_in_force(None if settings is True else settings)

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Any) -> None:
        """Let Accelerate's own function shard the model."""
        if cfg.get("zeropp") is not False:
            accelerate.accelerator.fsdp2_prepare_model = fsdp2_prepare_model
