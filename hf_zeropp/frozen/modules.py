"""Frozen weights stored packed, in modules that still look like the modules they were.

With LoRA nearly all weights are frozen: nothing updates them, so INT8 or INT4 codes (frozen_format.py) are all that needs to
be stored. `quantize_frozen(model)` turns each frozen matrix ``weight`` of a module, in place, into two parameters,
``weight_codes`` and ``weight_scales``, and the module's class into a subclass of itself. ``module.weight`` remains, as a
`PackedWeight`: a tensor that knows its shape and dtype, and decodes when somebody computes with it. So PEFT wraps, merges
and unmerges packed layers, DoRA takes norms of them, ``tie_weights`` ties them, without code of their own for it.

Why parameters and not a tensor subclass as *the* parameter: FSDP2, safetensors and DCP then see plain integer
tensors, sharded along dim 0 like any other. Why not save the decoded weight for backward: it would keep the 16-bit model
alive from forward to backward. Autograd saves the `PackedWeight` (or the codes), and backward decodes again.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from hf_zeropp.frozen.weight import PackedWeight, write_weight
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.ops.frozen_format import DEFAULT_BLOCK, FrozenFormat

if TYPE_CHECKING:
    from typing_extensions import Self

CODES, SCALES = "_codes", "_scales"


class Packed(nn.Module):
    """Mixin of modules with packed weights. ``packed_formats``: what each of them was, by name.

    A packed weight can be read (``module.weight`` decodes), assigned to (it is packed again: PEFT merges this way) and tied
    (assign another module's packed weight), but not trained.
    """

    packed_formats: dict[str, tuple[FrozenFormat, int, torch.dtype]]  # format, columns, dtype

    def packed_weight(self, name: str) -> PackedWeight:
        format, columns, dtype = self.packed_formats[name]
        codes, scales = getattr(self, name + CODES), getattr(self, name + SCALES)
        return PackedWeight(codes, scales, format, columns, dtype, owner=(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__.get("packed_formats", ()):
            super().__setattr__(name, value)
        elif isinstance(value, PackedWeight):
            if value.owner != (self, name):
                _tie(self, name, value)
        else:
            write_weight(self, name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``module.to(dtype)``: codes stay as they are, and decode to the new dtype."""
        for name, (format, columns, dtype) in self.packed_formats.items():
            self.packed_formats[name] = (format, columns, fn(torch.empty(0, dtype=dtype)).dtype)
        return super()._apply(fn, recurse)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            raise ValueError(
                f"{type(self).__name__} holds packed weights, which cannot be trained. Exclude the module from packing "
                "(skip=[...] of quantize_frozen or ZeroPPQuantConfig), or train an adapter on it."
            )
        return super().requires_grad_(requires_grad)


class PackedLinear(Packed, nn.Linear):
    """``nn.Linear`` with a packed weight."""

    weight_codes: Tensor
    weight_scales: Tensor

    weight = property(lambda self: self.packed_weight("weight"))

    def forward(self, input: Tensor) -> Tensor:
        format, columns, _ = self.packed_formats["weight"]
        input = _autocast(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return _PackedLinearFunction.apply(input, self.weight_codes, self.weight_scales, bias, format, columns)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.packed_formats['weight'][0].bits}"


class PackedEmbedding(Packed, nn.Embedding):
    """``nn.Embedding`` with a packed weight: only the rows looked up are decoded."""

    weight_codes: Tensor
    weight_scales: Tensor

    weight = property(lambda self: self.packed_weight("weight"))

    def forward(self, input: Tensor) -> Tensor:
        format, columns, dtype = self.packed_formats["weight"]
        codes, scales = self.weight_codes[input], self.weight_scales[input]
        return frozen_format.unpack(codes, scales, columns, format, dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.packed_formats['weight'][0].bits}"


class _PackedLinearFunction(torch.autograd.Function):
    """input [..., in] -> [..., out]; backward decodes again."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        format: FrozenFormat,
        columns: int,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.format, ctx.columns = format, columns
        ctx.needs_bias = bias is not None and bias.requires_grad
        rows = input.reshape(-1, columns)
        if frozen_format.has_fast_matmul(rows):
            output = frozen_format.matmul(rows, codes, scales, columns, format)
            output = output if bias is None else output + bias
            return output.view(*input.shape[:-1], -1)
        return F.linear(input, _decode_to_scratch(codes, scales, columns, format, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad @ _decode_to_scratch(codes, scales, ctx.columns, ctx.format, grad.dtype)
        if ctx.needs_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_input, None, None, grad_bias, None, None


_scratch: dict[torch.dtype, Tensor] = {}


def _decode_to_scratch(codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat, dtype: torch.dtype) -> Tensor:
    """The dense weight [rows, columns], good until the next call. On CPU in a buffer as large as the largest weight so
    far: fresh memory costs several times the kernel."""
    if codes.device.type != "cpu" or torch.compiler.is_compiling():
        return frozen_format.unpack(codes, scales, columns, format, dtype)
    numel = codes.shape[0] * columns
    if dtype not in _scratch or _scratch[dtype].numel() < numel:
        with torch.inference_mode(False):
            _scratch[dtype] = torch.empty(numel, dtype=dtype)
    out = _scratch[dtype][:numel].view(-1, columns)
    return frozen_format.unpack(codes, scales, columns, format, dtype, out)


def _autocast(input: Tensor) -> Tensor:
    device_type = input.device.type
    return input.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else input


# -------------------------------------------------------------------------------------------------------------- packing


def quantize_frozen(
    model: nn.Module, bits: int = 4, *, block: int = DEFAULT_BLOCK, skip: Iterable[str] = ()
) -> nn.Module:
    """Pack the frozen weights of ``model`` in place: linear layers, embeddings, fused experts (3-D), tied ones once.

    Args:
        model: its frozen parameters (``requires_grad=False``) are packed, trainable ones stay. Call it after
            ``get_peft_model``, or on a frozen model (``model.requires_grad_(False)``) before.
        bits: 8 or 4.
        block: weights of a row that share one scale.
        skip: modules to leave as they are, with all inside: names, or parts of names ("lm_head", "layers.0.mlp").

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
    for (module, name), *tied in packable_weights(model, skip, frozen_only=True):
        _tie_all(pack_weight(module, name, format), name, tied, format)
    return model


def convert_frozen(
    model: nn.Module, format: FrozenFormat, skip: Iterable[str] = (), *, frozen_only: bool = True
) -> nn.Module:
    """What ``quantize_frozen`` does, without values: codes and scales are on ``meta``, for a loader to fill in."""
    for (module, name), *tied in packable_weights(model, skip, frozen_only=frozen_only):
        _tie_all(convert_module(module, name, format), name, tied, format)
    return model


def _tie_all(module: Packed, name: str, others: Iterable[tuple[nn.Module, str]], format: FrozenFormat) -> None:
    for other, other_name in others:
        _tie(convert_module(other, other_name, format), other_name, module.packed_weight(name))


def pack_weight(module: nn.Module, name: str, format: FrozenFormat) -> Packed:
    """Replace a frozen parameter by its codes and scales. Returns the module, whose class is another now.

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


def convert_module(module: nn.Module, name: str, format: FrozenFormat, dtype: torch.dtype | None = None) -> Packed:
    """Make ``module`` one whose weight ``name`` is packed, with codes and scales of the right shapes on ``meta``.

    Args:
        dtype: what it decodes to; default: its own.
    """
    weight = getattr(module, name)
    shape = weight.shape
    formats = {**getattr(module, "packed_formats", {}), name: (format, shape[-1], dtype or weight.dtype)}
    delattr(module, name)
    module.__class__ = _packed_class(type(module), name)  # type: ignore[arg-type]  # classes are hashable
    object.__setattr__(module, "packed_formats", formats)
    codes = torch.empty(*shape[:-1], format.code_columns(shape[-1]), dtype=torch.uint8, device="meta")
    scales = torch.empty(*shape[:-1], format.scale_columns(shape[-1]), dtype=torch.uint8, device="meta")
    set_packed(module, name, codes, scales)
    return cast(Packed, module)


def set_packed(module: nn.Module, name: str, codes: Tensor, scales: Tensor) -> None:
    module.register_parameter(name + CODES, nn.Parameter(codes, requires_grad=False))
    module.register_parameter(name + SCALES, nn.Parameter(scales, requires_grad=False))


def unpack_weight(module: nn.Module, name: str) -> Tensor:
    """The dense weight of a packed or ordinary module, without DTensors' collectives."""
    weight = getattr(module, name)
    return weight.decode() if isinstance(weight, PackedWeight) else weight.detach()


def packable_weights(
    model: nn.Module, skip: Iterable[str] = (), *, frozen_only: bool
) -> list[list[tuple[nn.Module, str]]]:
    """Matrices that can be packed, each as the places (module, parameter name) where it is used: several if tied."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    left: set[nn.Parameter] = set()  # as they are, also where else they are used
    skip, adapters = tuple(skip), adapter_modules(model)
    for module_name, module in model.named_modules():
        is_left = module in adapters or is_skipped(module_name, skip)
        for name, param in module.named_parameters(recurse=False):
            if is_left:
                left.add(param)
            elif not (frozen_only and param.requires_grad) and is_packable(module, name, param):
                places[param].append((module, name))
    return [users for param, users in places.items() if param not in left]


def dense_numel(module: nn.Module) -> int:
    """Elements of a module's own parameters, packed ones counted as what they stand for."""
    if not isinstance(module, Packed):
        return sum(param.numel() for param in module.parameters(recurse=False))
    stored = {name + suffix for name in module.packed_formats for suffix in (CODES, SCALES)}
    plain = (param.numel() for name, param in module.named_parameters(recurse=False) if name not in stored)
    return sum(plain) + sum(module.packed_weight(name).numel() for name in module.packed_formats)


def packed_modules(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Packed))


def refuse_foreign_quantizer(model: nn.Module) -> None:
    """Raises: ValueError: weights of ``model`` were quantized by another library (bitsandbytes, torchao, ...)."""
    for name, param in model.named_parameters():
        origin = type(param.data).__module__.partition(".")[0]
        kind = type(param).__name__
        if kind in ("Params4bit", "Int8Params") or origin == "torchao":
            raise ValueError(
                f"{name} was quantized by {'torchao' if origin == 'torchao' else 'bitsandbytes'} ({kind}); frozen weights "
                "must be in 16 or 32 bits to be packed. Load the model without that quantization_config, or with "
                "hf_zeropp's own: quantization_config=ZeroPPQuantConfig(bits=4)."
            )


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """What PEFT added: frozen or not depends on which adapter is active, so none of it counts as frozen."""
    added: set[nn.Module] = set()
    for module in model.modules():
        names = getattr(module, "adapter_layer_names", ())
        if hasattr(module, "original_module"):  # a module that PEFT trains a full copy of (modules_to_save)
            names = [name for name, _ in module.named_children() if name != "original_module"]
        for part in (getattr(module, name, None) for name in names):
            added |= set(part.modules()) if isinstance(part, nn.Module) else set()
    return added


def is_skipped(module_name: str, skip: Iterable[str]) -> bool:
    """Whether whole components of the name are among ``skip``: PEFT puts prefixes before them and ``base_layer`` behind."""
    return any(f".{part}." in f".{module_name}." for part in skip)


def is_packable(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    if param.dtype not in FLOAT_DTYPES:
        return False
    if isinstance(module, nn.Embedding):
        return name == "weight" and module.max_norm is None and not module.sparse
    is_matrix = name == "weight" and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    return param.ndim == 3 or (is_matrix and param.ndim == 2)


def _tie(module: Packed, name: str, weight: PackedWeight) -> None:
    module.register_parameter(name + CODES, cast(nn.Parameter, weight.codes))
    module.register_parameter(name + SCALES, cast(nn.Parameter, weight.scales))


@functools.cache
def _packed_class(cls: type[nn.Module], name: str) -> type[Packed]:
    """Exactly nn.Linear and nn.Embedding have fast forwards; of all others a subclass reads the weight as a tensor."""
    known = {nn.Linear: PackedLinear, nn.Embedding: PackedEmbedding}
    if name == "weight" and cls in known:
        return known[cls]
    bases = (cls,) if issubclass(cls, Packed) else (Packed, cls)
    prefix = "" if issubclass(cls, Packed) else "Packed"
    weight = property(lambda self: self.packed_weight(name))
    return type(f"{prefix}{cls.__name__}", bases, {name: weight, "__module__": cls.__module__})
