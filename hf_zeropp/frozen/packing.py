"""Packing the frozen weights of a model: which weights can be packed, and which are left as they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from hf_zeropp.frozen.adapters import adapter_modules
from hf_zeropp.frozen.modules import Packed, Place, convert_module, packed_modules, set_packed, tie, unconvert_module
from hf_zeropp.heads import embeddings_and_heads
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.ops.frozen_format import DEFAULT_BLOCK, MIN_BLOCK, FrozenFormat


def quantize_frozen(
    model: nn.Module,
    bits: int = 4,
    *,
    block: int = DEFAULT_BLOCK,
    skip: Iterable[str] = (),
    pack_embeddings: bool = False,
) -> nn.Module:
    """Pack the frozen weights of ``model`` in place: linear layers and fused experts (3-D), tied ones once.

    Args:
        model: its frozen parameters (``requires_grad=False``) are packed, trainable ones stay. Call it after
            ``get_peft_model``, or on a frozen model (``model.requires_grad_(False)``) before.
        bits: 8 or 4.
        block: the fewest weights of a row that share 16 bits of scales: one scale in 8 bits, two in 4.
        skip: modules to leave as they are, with all inside: names, or parts of names ("lm_head", "layers.0.mlp").
        pack_embeddings: whether to pack embeddings and heads too (``heads.py``).

    Returns:
        The model.

    Raises:
        ValueError: nothing is frozen, or another library quantized the model.
    """
    format = FrozenFormat(bits, block)
    refuse_foreign_quantizer(model)
    if all(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "quantize_frozen packs frozen weights, and all parameters of this model are trainable. Add an adapter first "
            "(peft.get_peft_model), or freeze the model: model.requires_grad_(False)."
        )
    # A weight is packed where it is used first. The other places are tied to it, as they were tied before.
    dense = dense_modules(model, skip, pack_embeddings=pack_embeddings)
    for (module, name), *tied in packable_weights(model, dense, frozen_only=True):
        _tie_all(pack_weight(module, name, format), name, tied, format)
    return model


def convert_frozen(
    model: nn.Module, format: FrozenFormat, dense: Collection[nn.Module], *, frozen_only: bool = True
) -> None:
    """Do what ``quantize_frozen`` does, but without values: codes and scales are on ``meta``, for a loader to fill in.

    Args:
        model: the model, which may be on ``meta`` itself.
        format: bits and block.
        dense: modules whose own weights are left as they are.
        frozen_only: whether trainable weights stay; if not, they are packed too.
    """
    for (module, name), *tied in packable_weights(model, dense, frozen_only=frozen_only):
        _tie_all(convert_module(module, name, format), name, tied, format)


def unpack_frozen(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make packed weights dense ones of the values that they decode to, in place, tied ones once. They stay frozen.

    Args:
        model: not sharded.
        dtype: the dtype of these weights; default: the one to which each decodes.

    Raises:
        ValueError: the model is sharded.
    """
    dense: dict[int, nn.Parameter] = {}
    for _, module in list(packed_modules(model)):
        weights = {name: module.packed_weight(name) for name in module.packed_forms}
        for weight in weights.values():
            if isinstance(weight.codes, DTensor):
                raise ValueError(
                    "expected a model that is not sharded, got packed weights that are. Load it in one process."
                )
            if id(weight.codes) not in dense:
                dense[id(weight.codes)] = nn.Parameter(weight.decode().to(dtype or weight.dtype), requires_grad=False)
        unconvert_module(module, {name: dense[id(weight.codes)] for name, weight in weights.items()})


def pack_weight(module: nn.Module, name: str, format: FrozenFormat) -> Packed:
    """Replace the frozen parameter ``name`` of ``module`` by its codes and scales.

    Returns:
        The module, whose class is another now.

    Raises:
        ValueError: the parameter is trainable.
    """
    param = getattr(module, name)
    if param.requires_grad:
        raise ValueError(
            f"Only frozen weights can be packed, and {type(module).__name__}.{name} is trainable: its updates would be "
            "lost in rounding. Freeze it (requires_grad_(False)), or leave it out."
        )
    codes, scales = frozen_format.pack(param.detach(), format)
    packed = convert_module(module, name, format)
    set_packed(packed, name, codes, scales)
    return packed


def dense_modules(model: nn.Module, skip: Iterable[str] = (), *, pack_embeddings: bool = False) -> set[nn.Module]:
    """Return the modules of ``model`` whose own weights stay as they are.

    Args:
        model: with or without adapters. These are small, and PEFT trains them in turn: they stay, active or not.
        skip: names of others, or parts of names.
        pack_embeddings: whether embeddings and heads are packed too.
    """
    names = tuple(skip)
    skipped = {module for name, module in model.named_modules() if is_skipped(name, names)}
    return skipped | adapter_modules(model) | (set() if pack_embeddings else embeddings_and_heads(model))


def packable_weights(model: nn.Module, dense: Collection[nn.Module], *, frozen_only: bool) -> list[list[Place]]:
    """Find the weights of ``model`` that can be packed.

    Returns:
        For each weight the places where it is used: one, or several if it is tied. A weight that is used in one of ``dense``
        is left out altogether, because tied weights are either all packed or all dense.
    """
    places: dict[nn.Parameter, list[Place]] = defaultdict(list)
    left_out: set[nn.Parameter] = set()
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if module in dense:
                left_out.add(param)
            elif not (frozen_only and param.requires_grad) and is_packable(module, name, param):
                places[param].append((module, name))
    return [users for param, users in places.items() if param not in left_out]


def is_skipped(module_name: str, skip: Iterable[str]) -> bool:
    """Whether an entry of ``skip`` occurs in the name as whole components.

    PEFT puts prefixes before a module's name and ``base_layer`` behind it, so an entry may stand anywhere in it.
    """
    return any(f".{part}." in f".{module_name}." for part in skip)


def is_packable(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    """Whether the parameter is a matrix that layers multiply by, an embedding, or the fused experts of a layer (3-D)."""
    # A row that is shorter than a block would be scales for the most part, and some models write to such weights.
    if param.dtype not in FLOAT_DTYPES or param.ndim < 2 or param.shape[-1] < MIN_BLOCK:
        return False
    if isinstance(module, nn.Embedding):
        # With ``max_norm`` a lookup writes to the weight; sparse gradients exist for dense weights only.
        return name == "weight" and module.max_norm is None and not module.sparse
    if param.ndim == 3:
        # Position embeddings and class tokens [1, n, columns] are small, and the kernels of convolutions have short rows.
        return min(param.shape) > 1 and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
    # Conv1D is GPT-2's linear layer, known by its name, so that Transformers need not be imported.
    is_matrix = name == "weight" and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    return is_matrix and param.ndim == 2


def refuse_foreign_quantizer(model: nn.Module) -> None:
    """Check that no weight of ``model`` was quantized by another library.

    Raises:
        ValueError: one was, by bitsandbytes or torchao.
    """
    for name, param in model.named_parameters():
        # The names alone are compared, because neither library need be installed.
        origin = type(param.data).__module__.partition(".")[0]
        kind = type(param).__name__
        if kind in ("Params4bit", "Int8Params") or origin == "torchao":
            library = "torchao" if origin == "torchao" else "bitsandbytes"
            stock = (
                " Accelerate by itself trains it as it is, and gathers it over all nodes (ZEROPP_ENABLED=0, or zeropp=False)."
                if kind == "Params4bit"
                else ""
            )
            raise ValueError(
                f"{name} was quantized by {library} ({kind}), and ZeRO++ does not serve FSDP2 units of {library}'s weights. Load "
                "the model with quantization_config=ZeroPPQuantConfig(bits=4) in place of that: this package's own packing of "
                f"frozen weights in 4 or 8 bits, which each node then holds once. Or load it in 16 bits.{stock}"
            )


def _tie_all(module: Packed, name: str, others: Iterable[Place], format: FrozenFormat) -> None:
    """Let the weights at ``others`` share the codes of the weight ``name`` of ``module``, as they shared the dense weight."""
    for other, other_name in others:
        tie(convert_module(other, other_name, format), other_name, module.packed_weight(name))
