"""PEFT finds fused experts among a module's parameters, also where they are packed.

PEFT adapts fused experts through ``target_parameters``, which it adds by itself for "all-linear" on many models. It looks for
these names among a module's parameters. A packed module has codes and scales there, and PEFT would leave its experts without an
adapter, with no more than a warning.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from hf_zeropp.compat.extend import extend
from hf_zeropp.frozen.modules import expert_hooks, weights_shown


@functools.cache
def let_peft_find_experts() -> None:
    """Show packed experts to PEFT under their own names. Without PEFT this does nothing."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.tuners_utils import BaseTuner  # takes seconds, and most models have no fused experts

    extend(BaseTuner, "_inject_parameters", _inject)


def _inject(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with weights_shown():
        return original(*args, **kwargs)


expert_hooks.append(let_peft_find_experts)
