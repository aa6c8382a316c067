"""PEFT makes adapters on packed weights.

PEFT adapts fused experts through ``target_parameters``, which it adds by itself for "all-linear" on many models. It looks for
these names among a module's parameters. A packed module has codes and scales there, and PEFT would leave its experts without an
adapter, with no more than a warning.

Single tokens (``trainable_token_indices``) are trained in the head too where it is tied to the embedding. PEFT finds the head by
the name of its weight, and a packed one has codes there: it would go on with the tokens of the base.

Copies of whole modules (``modules_to_save``) are trained, which a packed weight cannot be. PyTorch would say of the codes that
they are no floating-point tensors.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from hf_zeropp.compat.extend import extend
from hf_zeropp.frozen.adapters import wrapped_model
from hf_zeropp.frozen.modules import packed_modules, packing_hooks, weights_shown
from hf_zeropp.frozen.weight import NOT_TRAINED


@functools.cache
def let_peft_make_adapters() -> None:
    """Show packed experts to PEFT under their own names. Without PEFT do nothing."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners import tuners_utils  # takes a while, and only packed models need it
    from peft.utils import other

    extend(tuners_utils.BaseTuner, "_inject_parameters", _show_weights)
    extend(other.ModulesToSaveWrapper, "update", _copy_of_dense)
    for module in (other, tuners_utils):  # both look it up under a name of their own
        extend(module, "_get_module_names_tied_with_embedding", _tied_with_embedding)


def _show_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with weights_shown():
        return original(*args, **kwargs)


def _copy_of_dense(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    for name, module in packed_modules(self.original_module):
        what = f"{type(self.original_module).__name__} of modules_to_save" + (f" ({name})" if name else "")
        raise ValueError(f"{what} holds packed weights ({module.extra_repr()}). Such a weight {NOT_TRAINED}")
    original(self, *args, **kwargs)


def _tied_with_embedding(original: Callable[..., list[str]], model: Any) -> list[str]:
    """Return the names of the modules that share the input embedding's weight, packed ones too."""
    base: Any = wrapped_model(model)
    base = base.model if hasattr(base, "tuner_layer_cls") else base
    packed, config = dict(packed_modules(base)), getattr(base, "config", None)
    # Some models that tie no weights have no embedding either. PEFT calls this for all models, packed or not.
    ties = isinstance(getattr(base, "_tied_weights_keys", None), dict)
    if not packed or not ties or getattr(config, "tie_word_embeddings", None) is False:
        return original(model)
    within = set(base.get_input_embeddings().modules())
    codes = {param for module in packed.values() if module in within for param in module.stored_params().values()}
    tied = {
        name for name, module in packed.items() if module not in within and codes & {*module.stored_params().values()}
    }
    return sorted(tied.union(original(model)))


packing_hooks.append(let_peft_make_adapters)
