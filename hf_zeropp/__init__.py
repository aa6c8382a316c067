"""ZeRO++ for Hugging Face models: quantized, hierarchical FSDP2 communication for slow networks.

    from hf_zeropp import ZeroPPPlugin
    accelerator = Accelerator(fsdp_plugin=ZeroPPPlugin())      # settings from ZEROPP_CONFIG_FILE, or pass them
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The idea in one page: comm/two_hops.py. How it meets FSDP2: fsdp/weights/gather.py, fsdp/gradients/reduce.py.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_zeropp.compat import check_versions

check_versions()  # first: with an older library the imports below fail by names that tell a user nothing

# ruff: noqa: E402
from hf_zeropp.apply import apply_zeropp, get_handle
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.frozen.packing import quantize_frozen
from hf_zeropp.generation import generation_mode
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.integrations.accelerate import ZeroPPPlugin
from hf_zeropp.muon import Muon

if TYPE_CHECKING:
    from hf_zeropp.integrations.lora.quantizer import ZeroPPQuantConfig
    from hf_zeropp.integrations.trainer import ZeroPPCallback
    from hf_zeropp.rollouts.publish import publish_weights

__version__ = "0.1.0"

__all__ = [
    "Muon",
    "ZeroPPCallback",
    "ZeroPPConfig",
    "ZeroPPHandle",
    "ZeroPPPlugin",
    "ZeroPPQuantConfig",
    "apply_zeropp",
    "generation_mode",
    "get_handle",
    "publish_weights",
    "quantize_frozen",
    "traffic",
]

# They import parts of Transformers that take seconds: they are imported at the first use.
_LAZY = {
    "ZeroPPCallback": "hf_zeropp.integrations.trainer",
    "ZeroPPQuantConfig": "hf_zeropp.integrations.lora.quantizer",
    "publish_weights": "hf_zeropp.rollouts.publish",
}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
