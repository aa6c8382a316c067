"""Names that are not settings of this package: DeepSpeed's keys, other words for what a setting says, and misspelt names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_zeropp.setting_checks import flag, positive_int_or

DEEPSPEED_BLOCK = "zero_optimization"
"""The key by which a file is known to be DeepSpeed's."""

_DEEPSPEED_KEYS = ("zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_gradients")
_DEEPSPEED_REMEDIES = {
    "zero_quantized_nontrainable_weights": (
        "Frozen weights are stored in 8 or 4 bits by another setting: remove the key and set frozen_bits=8 "
        "(ZEROPP_FROZEN_BITS=8 goes over a DeepSpeed file)."
    ),
    "zeropp_loco_param": (
        "LoCo's error feedback made AdamW's loss no better here. qgz_bits=8, or qgz_intra_bits=8 with 4 across nodes, is more "
        "exact. Remove the key."
    ),
}
_DEEPSPEED_MARKS = ("zeropp", "quanti", "hpz")
"""A key of ``zero_optimization`` that contains one of these is about ZeRO++. It is translated or refused, never dropped."""

_NODES = "Nodes are told by {ranks_per_node}, the number of ranks of each node."
_MEANINGS = {
    "zero_quantized_weights": "It is DeepSpeed's key: set {qwz_bits} to 8.",
    "zero_hpz_partition_size": "It is DeepSpeed's key: set {hpz_size} to the same number.",
    "zero_quantized_gradients": "It is DeepSpeed's key: set {qgz_bits} and {qgz_intra_bits} to 4.",
    "zero_quantized_nontrainable_weights": "It is DeepSpeed's key: set {frozen_bits} to 8.",
    "zeropp_loco_param": f"It is DeepSpeed's key. {_DEEPSPEED_REMEDIES['zeropp_loco_param']}",
    DEEPSPEED_BLOCK: "It begins a DeepSpeed configuration: pass its file, or use ZeroPPConfig.from_deepspeed.",
    **dict.fromkeys(("nodes", "num_nodes", "nnodes", "node_size", "num_machines", "local_world_size"), _NODES),
}
"""Names of DeepSpeed and of launchers, and the setting to use in their place. A setting stands in braces, and ``hint`` writes it
as the user does: ``qwz_bits`` in a file, ``ZEROPP_QWZ_BITS`` in the environment."""


def hint(name: str, valid: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return what a user may have meant by ``name``, as a sentence with a space in front; nothing where none is known.

    Args:
        name: the name that was given.
        valid: those that are allowed.
        spell: how the user spells settings.
    """
    meaning = _MEANINGS.get(name)
    if meaning is None:
        return nearest(name, valid, spell=spell)
    return " " + re.sub(r"{(\w+)}", lambda setting: spell(setting[1]), meaning)


def nearest(name: str, valid: Iterable[str], *, spell: Callable[[str], str] = str, cutoff: float = 0.6) -> str:
    """Return a question, "Did you mean", with the valid name that begins with ``name`` or is most like it; "" without one."""
    folded = {each.lower(): each for each in valid}
    longer = [each for each in folded if len(name) > 2 and each.startswith(name.lower())]
    matches = longer or difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return f" Did you mean {spell(folded[matches[0]])!r}?" if matches else ""


def translate_deepspeed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings for a DeepSpeed configuration. DeepSpeed's qgZ uses INT4 in both hops.

    Raises:
        ValueError: it is not stage 3, has a ZeRO++ key that no setting stands for, or turns no part of ZeRO++ on.
    """
    zero = settings.get(DEEPSPEED_BLOCK, {})
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero_optimization in the DeepSpeed file must be a mapping, got {zero!r}.")
    if zero.get("stage") != 3:
        raise ValueError(f"ZeRO++ builds on ZeRO stage 3, the DeepSpeed file says stage {zero.get('stage')!r}.")
    _refuse_untranslated(zero)
    # Keys that are missing mean what they mean in DeepSpeed, where every part of ZeRO++ is off by default.
    quantizes_weights = zero.get("zero_quantized_weights", False)
    quantizes_gradients = zero.get("zero_quantized_gradients", False)
    hpz_size = zero.get("zero_hpz_partition_size", 1)
    flag("zero_quantized_weights", quantizes_weights)
    flag("zero_quantized_gradients", quantizes_gradients)
    positive_int_or()("zero_hpz_partition_size", hpz_size)
    if not quantizes_weights and not quantizes_gradients and hpz_size == 1:
        raise ValueError(
            f"The DeepSpeed file turns no part of ZeRO++ on: expected one of {', '.join(_DEEPSPEED_KEYS)}, as DeepSpeed leaves "
            "out what is not named. Set them, or give a preset in place of the file (ZEROPP_CONFIG_FILE=balanced). "
            "ZEROPP_ENABLED=0 trains without ZeRO++."
        )
    return {
        "qwz_bits": 8 if quantizes_weights else None,
        "hpz_size": hpz_size if hpz_size > 1 else None,
        "qgz_bits": 4 if quantizes_gradients else None,
        "qgz_intra_bits": 4 if quantizes_gradients else None,
    }


def _refuse_untranslated(zero: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a ZeRO++ key of DeepSpeed's that no setting of ours stands for."""
    for key, value in zero.items():
        if key in _DEEPSPEED_KEYS or not any(mark in str(key) for mark in _DEEPSPEED_MARKS):
            continue
        if key not in _DEEPSPEED_REMEDIES:
            raise ValueError(
                f"Unknown ZeRO++ key {key!r} in the DeepSpeed file.{nearest(str(key), _DEEPSPEED_KEYS)} Translated: "
                f"{', '.join(_DEEPSPEED_KEYS)}. Remove it, or write a zeropp_config: block in its place."
            )
        if value is not None and value is not False:  # off, as DeepSpeed has it by default
            raise ValueError(f"DeepSpeed's {key}={value!r} is not translated. {_DEEPSPEED_REMEDIES[key]}")
