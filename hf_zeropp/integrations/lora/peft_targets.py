"""PEFT makes adapters on packed weights.

PEFT adapts fused experts through ``target_parameters``, which it adds by itself for "all-linear" on many models. It looks for
these names among a module's parameters. A packed module has codes and scales there, and PEFT would leave its experts without an
adapter, with no more than a warning.

Some initializations (PiSSA, OLoRA) take a part out of the base when the adapter is made. Taken for a merge, this write would make
an unmerge of the first merge, which puts the part back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from hf_zeropp.compat.extend import extend
from hf_zeropp.frozen.modules import adapters_made, packing_hooks, weights_shown

_Context = contextlib.AbstractContextManager[None]


@functools.cache
def let_peft_make_adapters() -> None:
    """Show packed experts to PEFT under their own names, and tell what it writes first from a merge. Without PEFT do nothing."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.tuners_utils import BaseTuner  # takes a while, and only packed models need it

    extend(BaseTuner, "inject_adapter", functools.partial(_call_within, adapters_made))
    extend(BaseTuner, "_inject_parameters", functools.partial(_call_within, weights_shown))


def _call_within(context: Callable[[], _Context], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with context():
        return original(*args, **kwargs)


packing_hooks.append(let_peft_make_adapters)
