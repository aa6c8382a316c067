"""Registers the operators with PyTorch, and runs them.

Each operator is registered twice in the namespace ``zeropp``: ``quantize`` returns a new tensor, and ``quantize_out`` fills
its last argument. Both have a fake implementation, which runs the checks and computes nothing: it is what ``torch.compile``
and fake tensors see. One implementation serves every device, because ``kernels.py`` finds the kernels by the device of the
tensors.

Layouts travel through PyTorch's dispatcher as text (``WireLayout.spec``). A traced graph then carries everything an operator
needs, and neither fake tensors nor ``torch.compile`` ever see a lookup table. Where nothing stands between, a call goes to the
kernels at once (``direct_calls.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zeropp.ops.direct_calls import runs_directly
from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.kernels import kernels_of
from hf_zeropp.ops.operator import Operator, Result, declare

OPERATORS: dict[str, Operator] = {}
"""Every registered operator, by its name."""

# PyTorch removes the operators of a Library when the object is freed, so the module holds it.
_LIBRARY = torch.library.Library("zeropp", "DEF")


def operator(
    reference: Callable[..., Any], counts: tuple[str, ...] = ("num_slices",), **outs: str
) -> Callable[[Callable[..., Result]], Callable[..., Any]]:
    """Register the decorated function as an operator of its name, without a leading underscore.

    The function declares the operator: its annotations name the arguments (``operator.py``), and its body checks them and
    returns the ``Result``. What the decorator returns in its place calls the operator: it takes the arguments, layouts as
    ``WireLayout``, and ``out`` to fill a tensor in place of returning a new one.

    Args:
        reference: the operator in PyTorch; takes the same arguments.
        counts: names of the numbers in ``Result.counts``, as the C function calls them.
        **outs: name and C type of each tensor to fill, for example ``out="uint8_t*"``.
    """

    def register(find_result: Callable[..., Result]) -> Callable[..., Any]:
        declared = declare(find_result, reference, counts, outs)
        OPERATORS[declared.name] = declared
        _register(declared)
        return _caller(declared)

    return register


def _register(operator: Operator) -> None:
    # PyTorch calls implementations with one positional argument for each of the schema. The tensors to fill come last.
    def fake(*arguments: Any) -> Any:
        return _returned(operator.check(_with_layouts(arguments)).empty())

    def fake_out(*arguments: Any) -> None:
        inputs, outs = arguments[: len(operator.arguments)], arguments[len(operator.arguments) :]
        operator.check(_with_layouts(inputs), outs)

    def run(*arguments: Any) -> Any:
        inputs = _with_layouts(arguments)
        result = operator.check(inputs)
        outs = result.empty()
        _fill(operator, inputs, result, outs)
        return _returned(outs)

    def run_out(*arguments: Any) -> None:
        inputs, outs = _with_layouts(arguments[: len(operator.arguments)]), arguments[len(operator.arguments) :]
        _fill(operator, inputs, operator.check(inputs, outs), outs)

    # There are two operators, because a schema must say whether a result is new memory. The one that fills returns
    # nothing: ``torch.compile`` can make a mutation functional only if no result aliases an argument.
    schema = ", ".join(argument.schema for argument in operator.arguments)
    filled = ", ".join(f"Tensor({name}!) {name}" for name in operator.outs)
    returned = ", ".join("Tensor" for _ in operator.outs)
    _define(operator.name, f"({schema}) -> ({returned})", run, fake)
    _define(f"{operator.name}_out", f"({schema}, {filled}) -> ()", run_out, fake_out)


def _define(name: str, signature: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    # This key means: one implementation for every backend, which autograd does not trace into. It could not follow one,
    # since kernels write through raw addresses.
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zeropp::{name}", fake, lib=_LIBRARY)


def _caller(operator: Operator) -> Callable[..., Any]:
    # These are looked up once for each operator, and not in every call.
    new, fill = (getattr(torch.ops.zeropp, name) for name in (operator.name, f"{operator.name}_out"))

    # ``out`` is one tensor, or a tuple for an operator with several results.
    def call(*arguments: Any, out: Tensor | tuple[Tensor, ...] | None = None) -> Any:
        outs = () if out is None else out if isinstance(out, tuple) else (out,)
        if outs and runs_directly(arguments, outs):
            _fill(operator, arguments, operator.check(arguments, outs), outs)
            return out
        values = [value.spec if isinstance(value, WireLayout) else value for value in arguments]
        if not outs:
            return new(*values)
        fill(*values, *outs)
        return out

    return call


def _with_layouts(arguments: Iterable[Any]) -> list[Any]:
    """Turn specs into layouts: in every schema, strings are specs."""
    return [WireLayout.from_spec(value) if isinstance(value, str) else value for value in arguments]


def _returned(outs: tuple[Tensor, ...]) -> Any:
    return outs if len(outs) > 1 else outs[0]


def _fill(operator: Operator, arguments: Sequence[Any], result: Result, outs: tuple[Tensor, ...]) -> None:
    """Let the kernels of the device fill ``outs``, unless the first is empty: empty tensors have no address."""
    if outs[0].numel():
        kernels_of(result.device.type).run(operator, arguments, result.counts, outs)
