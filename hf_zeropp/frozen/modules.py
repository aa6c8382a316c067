"""Modules that store frozen weights packed, and still look like the modules they were.

With LoRA nearly all weights are frozen. Nothing updates them, so it is enough to store INT8 or INT4 codes
(ops/frozen_format.py). Packing turns each frozen ``weight`` of a module into two parameters, ``weight_codes`` and
``weight_scales``, and the module's class into a subclass of itself. ``module.weight`` remains, as a ``PackedWeight``: a tensor
that knows its shape and dtype, and decodes when it is computed with. So PEFT wraps packed layers, DoRA takes norms of their
weights, and ``tie_weights`` ties them, without code for packed layers in any of these. A packed weight cannot be written.

The codes and scales are the parameters, rather than one tensor subclass that holds both, because plain tensors of bytes need
no support from others: FSDP2 shards them along dim 0 (storage.py says under which dtype), and safetensors and sharded
checkpoints store them, like any parameter.

Autograd keeps the codes for backward, which decodes them again. Keeping the decoded weights would hold the whole model in 16
bits between forward and backward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from hf_zeropp import devices
from hf_zeropp.frozen.storage import as_bytes, reinterpret
from hf_zeropp.frozen.weight import NOT_TRAINED, Owner, PackedForm, PackedWeight, refuse_write
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import FrozenFormat

if TYPE_CHECKING:
    from typing_extensions import Self

CODES, SCALES = "_codes", "_scales"  # what follows a weight's name in the names of its two parameters


packing_hooks: list[Callable[[], object]] = []
"""Functions that are called when a weight is packed. Integrations add them."""

_shows_weights = False

Place = tuple[nn.Module, str]  # a module, and the name of one of its parameters


@contextlib.contextmanager
def weights_shown() -> Iterator[None]:
    """Within the context a packed module lists packed weights as parameters, and not their codes and scales."""
    global _shows_weights
    before, _shows_weights = _shows_weights, True
    try:
        yield
    finally:
        _shows_weights = before


def packed_property(name: str) -> property:
    """Return the property of a class through which the packed weight ``name`` is read."""

    def read(self: Packed) -> PackedWeight:
        if name not in self._parameters:  # a parametrization has taken it out: there is no such attribute
            raise AttributeError(name)
        return self.packed_weight(name)

    return property(read)


class Packed(nn.Module):
    """Mixin of modules with packed weights.

    A packed weight can be read (``module.weight``) and tied (by assigning another module's packed weight), but not written or
    trained.

    Its name stays among the module's parameters, registered as None, which is how ``nn.Module`` writes that a parameter has no
    tensor of its own: nothing iterates over it or saves it. ``torch.nn.utils.parametrize`` asks whether a module has a parameter,
    deletes it, and registers it again at the end. PEFT adds its adapters on fused experts (``target_parameters``) this way.

    Attributes:
        packed_forms: how each packed weight decodes, by its name.
        scratch: where weights are decoded on CPU.
    """

    packed_forms: dict[str, PackedForm]
    scratch: Scratch

    def packed_weight(self, name: str) -> PackedWeight:
        """Return the weight ``name`` in the form of its codes, as they are at this moment: gathered, or a shard of them."""
        codes, scales = getattr(self, name + CODES), getattr(self, name + SCALES)
        return PackedWeight(codes, scales, self.packed_forms[name], Owner(self, name))

    def stored_params(self) -> dict[str, nn.Parameter]:
        """Return the parameters that hold codes and scales, by their names."""
        names = (name + suffix for name in self.packed_forms for suffix in (CODES, SCALES))
        return {name: cast(nn.Parameter, self._parameters[name]) for name in names}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over codes and scales, or in ``weights_shown`` over packed weights themselves."""
        if not _shows_weights or recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        stored = self.stored_params()
        for name, param in [*self._parameters.items()]:
            if param is not None and name not in stored:
                yield prefix + name, param
        for name in self.packed_forms:
            yield prefix + name, cast(nn.Parameter, self.packed_weight(name))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. A packed weight that comes back from a parametrization is there already."""
        if isinstance(param, PackedWeight) and name in self.packed_forms:
            self._parameters[name] = None
        else:
            super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module assigns attributes while it is constructed, before there are packed weights.
        if name not in self.__dict__.get("packed_forms", ()):
            super().__setattr__(name, value)
        elif not isinstance(value, PackedWeight) or value.owner is None:  # a view has no codes of its own
            refuse_write()
        elif value.owner != (self, name):  # ``module.weight = module.weight`` changes nothing
            tie(self, name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert as ``module.to(dtype)`` does: codes are bytes and stay, and decode to the new dtype from now on."""
        for name, form in self.packed_forms.items():
            # ``fn`` moves and casts tensors, and does not say to which dtype. An empty tensor of the old dtype shows it.
            self.packed_forms[name] = form._replace(dtype=fn(torch.empty(0, dtype=form.dtype)).dtype)
        stored = {id(param) for param in self.stored_params().values()}

        def convert(tensor: Tensor) -> Tensor:
            return reinterpret(fn(as_bytes(tensor)), tensor.dtype) if id(tensor) in stored else fn(tensor)

        return super()._apply(convert, recurse)

    # Checkpoints hold bytes as uint8, whatever the dtype under which FSDP2 shards them.
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.stored_params():
            destination[prefix + name] = as_bytes(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, param in self.stored_params().items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.dtype == torch.uint8:
                state_dict[prefix + name] = reinterpret(value, param.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the module.

        Raises:
            ValueError: ``requires_grad`` is True.
        """
        if requires_grad:
            raise ValueError(f"{type(self).__name__} holds packed weights. Such a weight {NOT_TRAINED}")
        return super().requires_grad_(requires_grad)

    def extra_repr(self) -> str:
        """Return what the module's own class says, and the bits of each packed weight."""
        bits = [f"{name}_bits={form.format.bits}" for name, form in self.packed_forms.items()]
        return ", ".join(filter(None, [super().extra_repr(), *bits]))


class PackedLinear(Packed, nn.Linear):
    """``nn.Linear`` with a packed weight."""

    weight_codes: Tensor
    weight_scales: Tensor

    weight = packed_property("weight")

    def forward(self, input: Tensor) -> Tensor:
        """Input [..., in] -> [..., out]."""
        format, columns, _ = self.packed_forms["weight"]
        input = _autocast(input)
        # Generation comes here for every layer of every token: parameters are taken without nn.Module's search for names.
        params = cast("dict[str, Tensor]", self._parameters)
        codes, scales = as_bytes(params["weight_codes"]), as_bytes(params["weight_scales"])
        bias: Tensor | None = params["bias"]
        if bias is not None and bias.dtype != input.dtype:
            bias = bias.to(input.dtype)
        if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
            return _PackedLinearFunction.apply(input, codes, scales, bias, format, columns)
        return _multiply(input, codes, scales, bias, format, columns)


class PackedEmbedding(Packed, nn.Embedding):
    """``nn.Embedding`` with a packed weight: only the rows looked up are decoded."""

    weight_codes: Tensor
    weight_scales: Tensor

    weight = packed_property("weight")

    def forward(self, input: Tensor) -> Tensor:
        """Indices [...] -> [..., columns]."""
        format, columns, dtype = self.packed_forms["weight"]
        # Codes and scales have one row for each row of the weight, so a row can be picked before it is decoded.
        codes, scales = as_bytes(self.weight_codes)[input], as_bytes(self.weight_scales)[input]
        return frozen_format.unpack(codes, scales, columns, format, dtype)


class _PackedLinearFunction(torch.autograd.Function):
    """Input [..., in] -> [..., out]. Backward decodes the weight again."""

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
        # Not the decoded weight: see the module's docstring. Under FSDP2 these are the gathered codes, whose memory is freed
        # after forward and filled again, with the same values, before backward.
        ctx.save_for_backward(codes, scales)
        ctx.format, ctx.columns = format, columns
        ctx.needs_bias = bias is not None and bias.requires_grad  # a frozen layer may have a trainable bias (BitFit)
        return _multiply(input, codes, scales, bias, format, columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            # With ``create_graph=True`` autograd keeps the weight for a backward pass of this one, in memory of its own then.
            decode = frozen_format.unpack if torch.is_grad_enabled() else _decode_to_scratch
            grad_input = grad @ decode(codes, scales, ctx.columns, ctx.format, grad.dtype)
        if ctx.needs_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_input, None, None, grad_bias, None, None


def _multiply(
    input: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, format: FrozenFormat, columns: int
) -> Tensor:
    """Return ``F.linear`` of a packed weight: input [..., columns] -> [..., rows]."""
    rows = input if input.dim() == 2 else input.reshape(-1, columns)
    if frozen_format.has_fast_matmul(rows):  # a few rows, as in generation: multiplies without decoding first
        output = frozen_format.matmul(rows, codes, scales, columns, format, bias)
        return output if input.dim() == 2 else output.view(*input.shape[:-1], codes.shape[0])
    return F.linear(input, _decode_to_scratch(codes, scales, columns, format, input.dtype), bias)


class Scratch(threading.local):
    """Memory in which layers decode their weights on CPU, one weight after the other: one buffer per dtype and thread.

    A fresh allocation of that size costs several times what the kernel does. Other devices have caching allocators. All packed
    modules of the process hold the same object, and it is freed with the last of them.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def __reduce__(self) -> tuple[Callable[[], Scratch], tuple[()]]:
        # A module that was copied or unpickled holds the object of its process.
        return shared_scratch, ()

    @property
    def nbytes(self) -> int:
        """Bytes of this thread's largest buffer."""
        return max((buffer.nbytes for buffer in self._buffers.values()), default=0)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory [numel], which is valid until this thread's next call. A buffer grows to the largest weight."""
        if dtype not in self._buffers or self._buffers[dtype].numel() < numel:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training later
                self._buffers[dtype] = torch.empty(numel, dtype=dtype)
        return self._buffers[dtype][:numel]


_living: weakref.WeakValueDictionary[str, Scratch] = weakref.WeakValueDictionary()
"""Holds the object as long as packed modules do."""


def shared_scratch() -> Scratch:
    """Return the object that packed modules hold, or a new one where there is none."""
    return _living.setdefault("scratch", Scratch())


def _decode_to_scratch(codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat, dtype: torch.dtype) -> Tensor:
    """Return the dense weight [rows, columns]. On CPU it is valid until the next call of this thread."""
    if devices.has_streams(codes.device) or torch.compiler.is_compiling():
        return frozen_format.unpack(codes, scales, columns, format, dtype)
    out = shared_scratch().take(codes.shape[0] * columns, dtype).view(-1, columns)
    return frozen_format.unpack(codes, scales, columns, format, dtype, out)


def _autocast(input: Tensor) -> Tensor:
    """Cast as autocast casts the input of ``F.linear``, which a custom autograd function must do itself."""
    device_type = input.device.type
    return input.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else input


# ---------------------------------------------------------------------------------------------- making a module packed


def convert_module(module: nn.Module, name: str, format: FrozenFormat, dtype: torch.dtype | None = None) -> Packed:
    """Make ``module`` one whose weight ``name`` is packed, in place, without values yet.

    Args:
        module: any module that has the weight as a parameter. Its class changes to a subclass.
        name: the parameter's name.
        format: bits and block.
        dtype: the dtype the weight decodes to; default: its own.

    Returns:
        The module. Codes and scales have the right shapes and lie on ``meta``.
    """
    weight = getattr(module, name)
    shape = weight.shape
    for hook in packing_hooks:
        hook()
    forms = {**getattr(module, "packed_forms", {}), name: PackedForm(format, shape[-1], dtype or weight.dtype)}
    # The parameter gives way to a property of the same name, which the new class has.
    delattr(module, name)
    # The class is changed and no new module made, so that hooks, and references that PEFT or the user hold, stay valid.
    module.__class__ = _packed_class(type(module), name)  # type: ignore[arg-type]  # classes are hashable
    packed = cast(Packed, module)
    packed.packed_forms = forms
    packed.scratch = shared_scratch()
    packed._parameters[name] = None
    codes = torch.empty(*shape[:-1], format.code_columns(shape[-1]), dtype=torch.uint8, device="meta")
    scales = torch.empty(*shape[:-1], format.scale_columns(shape[-1]), dtype=torch.uint8, device="meta")
    set_packed(packed, name, codes, scales)
    return packed


def unconvert_module(module: Packed, weights: dict[str, nn.Parameter]) -> None:
    """Make a packed module one of its own class again, in place.

    Args:
        module: its codes and scales go.
        weights: the dense parameters that take their places, by name.
    """
    for name in module.stored_params():
        del module._parameters[name]
    del module.packed_forms, module.scratch
    module.__class__ = next(cls for cls in type(module).__mro__ if not issubclass(cls, Packed))  # type: ignore[assignment]
    for name, weight in weights.items():
        del module._parameters[name]
        module.register_parameter(name, weight)


def set_packed(module: nn.Module, name: str, codes: Tensor, scales: Tensor) -> None:
    """Make ``codes`` and ``scales`` the parameters that hold the weight ``name``."""
    module.register_parameter(name + CODES, nn.Parameter(codes, requires_grad=False))
    module.register_parameter(name + SCALES, nn.Parameter(scales, requires_grad=False))


def tie(module: Packed, name: str, weight: PackedWeight) -> None:
    """Let the weight ``name`` of ``module`` share the codes and scales of ``weight``, another module's, and decode as it does."""
    module.packed_forms[name] = weight.form
    module.register_parameter(name + CODES, cast(nn.Parameter, weight.codes))
    module.register_parameter(name + SCALES, cast(nn.Parameter, weight.scales))


@functools.cache
def _packed_class(cls: type[nn.Module], name: str) -> type[Packed]:
    """Return the subclass of ``cls`` whose weight ``name`` is packed.

    ``nn.Linear`` and ``nn.Embedding`` themselves have forwards of ours. A subclass of theirs, or any other class, keeps its
    own forward, which reads the weight as a tensor.
    """
    known = {nn.Linear: PackedLinear, nn.Embedding: PackedEmbedding}
    if name == "weight" and cls in known:
        return known[cls]
    # A class of fused experts has two such weights or more, and is extended once for each.
    bases = (cls,) if issubclass(cls, Packed) else (Packed, cls)
    # The name stays: models list the classes of their blocks by name, and a block may own a weight itself.
    return type(cls.__name__, bases, {name: packed_property(name), "__module__": cls.__module__})


# ------------------------------------------------------------------------------------------- asking about packed modules


def packed_modules(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Iterate over the packed modules of ``model``, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Packed))


def dense_numel(model: nn.Module, params: Iterable[Tensor]) -> int:
    """Return the number of elements of ``params``, all of them parameters of ``model``, packed weights by their dense shape."""
    dense: dict[int, int] = {}
    for _, module in packed_modules(model):
        for weight in map(module.packed_weight, module.packed_forms):
            dense |= {id(weight.codes): weight.numel(), id(weight.scales): 0}
    return sum(dense.get(id(param), param.numel()) for param in params)
