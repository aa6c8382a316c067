"""One declaration per operator: its schema, its checks and the prototype of its C function all derive from it.

An operator is declared as a Python function that checks its arguments and says what comes out (see ``wire.py``). The
annotations of the arguments say what each one is, and this module spells that out for the two sides that must agree:

    annotation             schema of torch.library    C arguments (ops/abi.h)
    ``Floats`` x           ``Tensor x``               ``const void* x, int64_t x_dtype``
    ``Bytes`` x            ``Tensor x``               ``const uint8_t* x``
    ``UpdatedBytes`` x     ``Tensor(x!) x``           ``uint8_t* x``
    ``Fp32`` x             ``Tensor x``               ``const float* x``
    ``Int64s`` x           ``Tensor x``               ``const int64_t* x``
    ``WireLayout`` x       ``str x`` (its spec)       ``const ZeroppLayout* x``
    ``torch.dtype`` x      ``ScalarType x``           ``int64_t x``
    ``int`` x              ``int x``                  ``int64_t x``
    ``float`` x            ``float x``                ``float x``

``| None`` makes a tensor optional: ``Tensor? x``, and a null pointer. The C function takes these arguments in the order of the
declaration, then the counts of the result (``num_slices``), then the addresses of the tensors to fill, and last a CUDA stream.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from hf_zeropp.ops.format import FLOAT_DTYPES, WireLayout


class Kind(NamedTuple):
    """A kind of argument, as PyTorch's schemas and C write it."""

    schema: str
    c_types: tuple[str, ...]  # a second one is for the dtype code of a tensor
    dtypes: tuple[torch.dtype, ...] = ()  # that a tensor may have; empty for arguments that are not tensors


# mypy sees these as plain tensors, so an operator's declaration type-checks like any function.
Floats = Annotated[Tensor, Kind("Tensor", ("const void*", "int64_t"), FLOAT_DTYPES)]
Fp32 = Annotated[Tensor, Kind("Tensor", ("const float*",), (torch.float32,))]
Bytes = Annotated[Tensor, Kind("Tensor", ("const uint8_t*",), (torch.uint8,))]
Int64s = Annotated[Tensor, Kind("Tensor", ("const int64_t*",), (torch.int64,))]
# The "!" tells PyTorch that the tensor is written. Without it, ``torch.compile`` could drop the call or move it past a
# read.
UpdatedBytes = Annotated[Tensor, Kind("Tensor({name}!)", ("uint8_t*",), (torch.uint8,))]

_KINDS: dict[Any, Kind] = {
    WireLayout: Kind("str", ("const ZeroppLayout*",)),
    torch.dtype: Kind("ScalarType", ("int64_t",)),
    int: Kind("int", ("int64_t",)),
    float: Kind("float", ("float",)),
}


class Argument(NamedTuple):
    """One argument of an operator."""

    name: str
    kind: Kind
    is_optional: bool

    @property
    def schema(self) -> str:
        """The argument in a schema, for example "Tensor? initial"."""
        return f"{self.kind.schema.format(name=self.name)}{'?' if self.is_optional else ''} {self.name}"

    @property
    def c_arguments(self) -> list[tuple[str, str]]:
        """The (type, name) of each C argument that stands for this one."""
        # Kinds without a dtype code have one C type, and ``zip`` drops the second name.
        return list(zip(self.kind.c_types, (self.name, f"{self.name}_dtype"), strict=False))

    @property
    def has_dtype_code(self) -> bool:
        """Whether C takes the dtype of this tensor as well as its address."""
        return len(self.kind.c_types) == 2


class Filled(NamedTuple):
    """Shape and dtype of a tensor that an operator fills."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Result(NamedTuple):
    """All that an operator's arguments say about its result.

    Args:
        device: where the tensors to fill lie.
        counts: numbers that C takes beside the arguments, in the order in which the operator names them.
        filled: shape and dtype of each tensor to fill.
    """

    device: torch.device
    counts: tuple[int, ...]
    filled: tuple[Filled, ...]

    def empty(self) -> tuple[Tensor, ...]:
        """Return new tensors to fill."""
        return tuple([torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.filled])


@dataclass(frozen=True)
class Operator:
    """One operator of the namespace ``zeropp``.

    Args:
        name: its name in ``torch.ops.zeropp``; the C functions are ``zeropp_<name>_<instruction set>``.
        arguments: all but the tensors to fill.
        counts: names of the numbers that C takes after the arguments.
        outs: name and C type of each tensor to fill.
        find_result: checks the arguments that the annotations leave open, and returns the ``Result``.
        reference: the operator in PyTorch. Takes the arguments and returns the result or, for several, a tuple.
    """

    name: str
    arguments: tuple[Argument, ...]
    counts: tuple[str, ...]
    outs: dict[str, str]
    find_result: Callable[..., Result]
    reference: Callable[..., Any]

    @cached_property
    def _tensors(self) -> list[tuple[int, Argument]]:
        return [(index, argument) for index, argument in enumerate(self.arguments) if argument.kind.dtypes]

    @property
    def c_arguments(self) -> list[tuple[str, str]]:
        """The (type, name) of every argument of the C function, in order."""
        arguments = [pair for argument in self.arguments for pair in argument.c_arguments]
        counts = [("int64_t", name) for name in self.counts]
        outs = [(c_type, name) for name, c_type in self.outs.items()]
        return [*arguments, *counts, *outs, ("void*", "stream")]

    def check(self, arguments: Sequence[Any], outs: Sequence[Tensor] | None = None) -> Result:
        """Return what the operator makes of its arguments.

        Args:
            arguments: one for each of ``self.arguments``; layouts are ``WireLayout`` objects.
            outs: tensors to fill, which are checked as well; None where new ones will be made.

        Raises:
            TypeError: a tensor or a dtype argument of a dtype that the operator does not take.
            ValueError: arguments that do not fit each other. The text says what was expected and what came.
        """
        # Fake tensors come through here as well, so checks look at shapes, dtypes and devices, and never at values. On
        # a GPU, a look at a value would also make the host wait. Tensors are checked first: ``find_result`` relies on
        # it.
        try:
            self._check_tensors(arguments)
            result = self.find_result(*arguments)
            if outs is not None:
                self._check_outs(result, outs)
        except (TypeError, ValueError) as error:
            # The checks do not know for which operator they run. Changing the text keeps the type and the traceback.
            error.args = (f"{self.name}: {error}",)
            raise
        return result

    def _check_tensors(self, arguments: Sequence[Any]) -> None:
        """Raise unless all tensors are contiguous, on one device, and of the dtypes that the annotations allow."""
        device = None  # the device of the first tensor; optional tensors may be missing
        for index, argument in self._tensors:
            if (tensor := arguments[index]) is not None:
                device = device or tensor.device
                check_tensor(argument.name, tensor, argument.kind.dtypes, device)

    def _check_outs(self, result: Result, outs: Sequence[Tensor]) -> None:
        for name, (shape, dtype), out in zip(self.outs, result.filled, outs, strict=True):
            check_tensor(name, out, (dtype,), result.device)
            # The size is enough. Callers pass wire buffers, which are flat and reused, and gradients in shapes of their
            # own.
            check_size(name, out, math.prod(shape))


def declare(
    find_result: Callable[..., Result], reference: Callable[..., Any], counts: tuple[str, ...], outs: dict[str, str]
) -> Operator:
    """Return the operator that ``find_result`` declares by its name, without a leading underscore, and its annotations."""
    # Annotations are text in modules that postpone their evaluation. ``include_extras`` keeps the kinds that stand in
    # ``Annotated``.
    annotations = typing.get_type_hints(find_result, include_extras=True)
    annotations.pop("return")
    arguments = tuple(_argument(name, annotation) for name, annotation in annotations.items())
    return Operator(find_result.__name__.removeprefix("_"), arguments, counts, outs, find_result, reference)


def _argument(name: str, annotation: Any) -> Argument:
    # ``get_args`` of ``Bytes | None`` returns (Bytes, None). Of ``Bytes`` alone, which is an ``Annotated``, it returns the tensor
    # type and its kind.
    alternatives = typing.get_args(annotation)
    is_optional = type(None) in alternatives
    base = alternatives[0] if is_optional else annotation
    kind = base.__metadata__[0] if typing.get_origin(base) is Annotated else _KINDS[base]
    return Argument(name, kind, is_optional)


def check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Raise unless ``tensor`` has one of ``dtypes``, lies on ``device`` and is contiguous."""
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"expected {name} of dtype {expected}, got {tensor.dtype}: convert it first")
    if tensor.device != device:
        raise ValueError(f"expected {name} on {device}, got {tensor.device}: move it there first")
    if not tensor.is_contiguous():
        raise ValueError(
            f"expected {name} contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
            "call .contiguous(), or slice whole leading rows"
        )


def check_size(name: str, tensor: Tensor, numel: int) -> None:
    """Raise unless ``tensor`` has ``numel`` elements."""
    if tensor.numel() != numel:
        raise ValueError(f"expected {name} with {numel} elements, got {tensor.numel()}: size it by the layout")
