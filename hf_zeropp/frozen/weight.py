"""``PackedWeight``: the tensor that ``module.weight`` of a packed module returns.

A packed weight has the shape and dtype of the dense weight it stands for, and holds codes and scales in its place. Operations
on it arrive in ``__torch_dispatch__`` and are of three kinds:

- A *view* (``weight.t()``, ``weight[expert]``) stays packed. It is noted, and replayed on the dense tensor after decoding.
  This saves memory in training: autograd keeps the operands of a multiplication for backward, and ``F.linear`` multiplies by
  the view ``weight.t()``. So autograd keeps codes and not the dense weight.
- A *write* (``weight.data += delta``, as PEFT merges an adapter) is refused. It would round all weights anew, and the ranks of a
  node hold parts of the codes.
- *Any other* operation decodes, and computes with the dense tensor.

A packed weight is made anew at every access of ``module.weight``, because the module's codes are other tensors at other times:
FSDP2 puts gathered tensors in the place of the sharded ones for the time of a forward or backward pass. A packed weight that
autograd keeps from forward to backward is still right: FSDP2 frees the memory of the gathered tensors in between, and gathers
into the same tensors again before backward needs them.

[Note: packed weights under FSDP2]
In a forward pass the codes are gathered, and decode like any plain tensor. Outside of it they are DTensors, each rank holding
rows of its node's copy. They are gathered within the node then, and decode to the whole weight on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hf_zeropp.frozen.adapters import MERGE_DENSE
from hf_zeropp.frozen.storage import as_bytes
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import FrozenFormat

aten = torch.ops.aten

NOT_TRAINED = (
    "cannot be trained. Exclude its module from packing (skip=[...] of quantize_frozen or ZeroPPQuantConfig; embeddings and "
    "heads: pack_embeddings=False), or train an adapter on it."
)

# Views that stay packed. All of them can be replayed on the dense tensor, with the arguments they came with.
_VIEWS = {
    aten.t.default,  # F.linear multiplies by ``weight.t()``, and its backward by the transpose of that
    aten.transpose.int,  # grouped multiplications of fused experts: ``weight.transpose(-2, -1)``
    aten.permute.default,  # ``weight.T``, which PEFT takes of layers that store [in, out] (Conv1D)
    aten.select.int,  # one expert: ``weight[expert]``
    aten.slice.Tensor,  # some rows, such as the gate's half of a fused projection
    # How ``torch.matmul`` and ``einsum`` shape an operand for a batched multiplication:
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
}
# These return the weight itself.
_IDENTITIES = {aten.detach.default, aten.alias.default}

Views = tuple[tuple[Any, tuple[Any, ...]], ...]


class PackedForm(NamedTuple):
    """How the codes and scales of one weight decode.

    Attributes:
        format: bits per code, and how wide blocks are.
        columns: columns of the dense weight. The codes do not tell: a row of 4-bit codes may end in half a byte.
        dtype: the dtype of the dense weight.
    """

    format: FrozenFormat
    columns: int
    dtype: torch.dtype


class Owner(NamedTuple):
    """The place that a packed weight was read from."""

    module: nn.Module
    name: str


class PackedWeight(Tensor):
    """A weight [..., columns] in the form of its codes and scales.

    Args:
        codes: bytes [..., bytes of a row], a plain tensor, or a DTensor where the weight is sharded. uint8, or a float dtype
            where FSDP2 asks for one (storage.py).
        scales: bytes [..., bytes of a row's scales], like ``codes``.
        form: what they decode to.
        owner: the module and the name that it was read from. None for views.
        views: operations to replay on the dense tensor: (operator, arguments) each.
    """

    # Transformers initializes weights that lack this mark: it would write random values into loaded weights.
    _is_hf_initialized = True
    # Makes ``isinstance(weight, nn.Parameter)`` true, which Transformers and PEFT ask before they touch a layer's weight.
    _is_param = True

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, form: PackedForm, owner: Owner | None = None, views: Views = ()
    ) -> PackedWeight:
        """Make a tensor with shape and strides of the dense weight, and no memory of its own."""
        # Views are replayed on a tensor on ``meta``, to learn their shape and strides.
        like = _replay(torch.empty(*codes.shape[:-1], form.columns, dtype=form.dtype, device="meta"), views)
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=form.dtype, device=codes.device, requires_grad=False
        )

    def __init__(
        self, codes: Tensor, scales: Tensor, form: PackedForm, owner: Owner | None = None, views: Views = ()
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.form = form
        self.owner = owner
        self._views = views

    # Tensor's own would turn every result into a PackedWeight. Without it, operations go straight to ``__torch_dispatch__``.
    # mypy knows this name and ``__repr__`` by what Tensor happens to hold, not by PyTorch's protocol for subclasses.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> PackedWeight:
        """The weight itself. A plain tensor's ``data`` shares its memory; a packed weight has no dense memory to share."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not _is_same_weight(self, value):
            refuse_write()

    def requires_grad_(self, requires_grad: bool = True) -> PackedWeight:
        """Do nothing to freeze it. To thaw it raises ValueError: the next access of ``module.weight`` would make a frozen one."""
        if requires_grad:
            raise ValueError(f"A packed weight {NOT_TRAINED}")
        return self

    @property
    def requires_grad(self) -> bool:
        """False. Set it as ``requires_grad_`` does."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def decode(self) -> Tensor:
        """Return the whole dense tensor, also where the codes are sharded. See [Note: packed weights under FSDP2]."""
        stored = (as_bytes(self.codes), as_bytes(self.scales))
        codes, scales = (each.full_tensor() if isinstance(each, DTensor) else each for each in stored)
        dense = frozen_format.unpack(codes, scales, self.form.columns, self.form.format, self.form.dtype)
        return _replay(dense, self._views)

    def _view(self, func: Any, args: tuple[Any, ...]) -> PackedWeight:
        is_expert = func is aten.select.int and args[0] == 0 and self.codes.ndim == 3 and not self._views
        if is_expert and not isinstance(self.codes, DTensor):
            # One expert of fused ones is cut out of the codes, so that the others need not be decoded.
            return PackedWeight(self.codes[args[1]], self.scales[args[1]], self.form)
        return PackedWeight(self.codes, self.scales, self.form, views=(*self._views, (func, args)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, kwargs = args[0], kwargs or {}
        if isinstance(first, cls) and func in _IDENTITIES:
            return PackedWeight(first.codes, first.scales, first.form, first.owner, first._views)
        if isinstance(first, cls) and func in _VIEWS and not kwargs:
            return first._view(func, args[1:])
        if func is aten.set_.source_Tensor and _is_same_weight(first, args[1]):
            return first  # a parametrization sets a weight to itself, in the middle of a forward pass
        if any(isinstance(each, cls) for each in _written(func, args, kwargs)):
            refuse_write()
        return func(*tree_map(lambda arg: arg.decode() if isinstance(arg, cls) else arg, args), **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, bits={self.form.format.bits})"

    # A copy belongs to no module, so it is dense. Tensor's own methods would read memory that a packed weight does not have.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.decode().clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.decode().__reduce_ex__(protocol)


def _is_same_weight(one: object, other: object) -> bool:
    """Whether both stand for the same weight of the same module. A view has no owner, and is never the same as another."""
    if not isinstance(one, PackedWeight) or not isinstance(other, PackedWeight):
        return False
    return one.owner is not None and one.owner == other.owner


def refuse_write() -> NoReturn:
    """Raise the error of a write to a packed weight.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "A packed weight cannot be written: its codes would be rounded anew, and ranks of a node hold parts of them. "
        f"{MERGE_DENSE} To add tokens, or to let an adapter change its base when it is made (PiSSA, OLoRA, LoftQ), do so while "
        "the model is dense, and pack it behind that (the setting frozen_bits, or quantize_frozen)."
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that an operator writes to, also those in lists (``torch._foreach_*``) and ``out``."""
    if not func._schema.is_mutable:
        return []
    parameters = func._schema.arguments
    given = [*zip(parameters, args, strict=False), *((each, kwargs.get(each.name)) for each in parameters[len(args) :])]
    written = [
        value for parameter, value in given if parameter.alias_info is not None and parameter.alias_info.is_write
    ]
    return [each for value in written for each in (value if isinstance(value, list | tuple) else [value])]


def _replay(dense: Tensor, views: Views) -> Tensor:
    for func, args in views:
        dense = func(dense, *args)
    return dense
