"""ZeRO++ for Hugging Face models: quantized, hierarchical FSDP2 communication for slow networks.

    from hf_zeropp import ZeroPPPlugin
    accelerator = Accelerator(fsdp_plugin=ZeroPPPlugin())      # settings from ZEROPP_CONFIG_FILE, or pass them
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The idea in one page: collectives.py. How it meets FSDP2: fsdp_comm.py.
"""

from hf_zeropp.apply import ZeroPPHandle, apply_zeropp, get_handle
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.integrations.accelerate import ZeroPPPlugin

__version__ = "0.1.0"

__all__ = ["ZeroPPCallback", "ZeroPPConfig", "ZeroPPHandle", "ZeroPPPlugin", "apply_zeropp", "get_handle", "traffic"]


def __getattr__(name: str):
    if name == "ZeroPPCallback":  # the Trainer takes seconds to import: only for those who use it
        from hf_zeropp.integrations.trainer import ZeroPPCallback

        return ZeroPPCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
