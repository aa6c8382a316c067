"""The gradient of one parameter at full size, as FSDP2 keeps it until a reduction takes it. FSDP2's private names stand here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from hf_zeropp.fsdp.param_shard import grad_dtype_of, policy_of

# [Note: unused parameters]
# A token meets a few experts of a layer, so an expert that is a module gets a gradient on some ranks only. FSDP2 leaves out what
# has no gradient, and ranks would exchange pieces of different sizes. So a unit in which any parameter has a gradient on this
# rank gets zeros for its others, and all ranks reduce all of them. An expert that no rank has used then has a gradient of zeros,
# as in DeepSpeed's ZeRO-3, and not None: weight decay and momentum go on. A unit in which no parameter has a gradient is left
# out, as in stock FSDP2, and ranks must leave out the same ones. (``set_reduce_scatter_unused_params``, which FSDP2 has since
# torch 2.13, fills in zeros as well, and sends also those of units that were skipped.)


def reduce_dtype_of(fsdp_param: FSDPParam) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradient of a parameter that is alone in its unit."""
    policy = policy_of(fsdp_param)
    computed = policy.param_dtype or fsdp_param.sharded_param.dtype
    # Up to torch 2.14 FSDP2 reduces a gradient in the dtype in which backward made it.
    return policy.reduce_dtype or grad_dtype_of(fsdp_param) or computed


def was_gathered(fsdp_param: FSDPParam) -> bool:
    """Return whether any pass has used the parameter. FSDP2 sets the attribute then."""
    return getattr(fsdp_param, "_unsharded_param", None) is not None


def unreduced_of(fsdp_param: FSDPParam) -> list[torch.Tensor]:
    """Return the gradients that a rank keeps of a parameter at full size, because FSDP2 was told not to reduce them."""
    own = fsdp_param._unsharded_param.grad if was_gathered(fsdp_param) else None
    return [grad for grad in (_accumulated_of(fsdp_param), own) if grad is not None]


def gets_gradient(fsdp_param: FSDPParam, reduces_unused: bool) -> bool:
    """Return whether FSDP2's next reduction takes a gradient of this parameter. The condition is FSDP2's own.

    ``reduces_unused``: FSDP2 was told to reduce zeros for parameters without a gradient.
    """
    if not was_gathered(fsdp_param):
        return False
    return bool(unreduced_of(fsdp_param)) or (reduces_unused and fsdp_param._unsharded_param.requires_grad)


def fill_in_zeros(fsdp_params: Sequence[FSDPParam]) -> None:
    """Give trainable parameters of a unit gradients of zeros at full size where they have none, if any of them has one.

    See [Note: unused parameters].
    """
    gradients = list(map(unreduced_of, fsdp_params))
    if not any(gradients):
        return
    missing = [
        param
        for param, own in zip(fsdp_params, gradients, strict=True)
        if not own and param.sharded_param.requires_grad and was_gathered(param)
    ]
    # From torch 2.15 on each parameter says in which dtype its gradient is, and FSDP2 reduces gradients of several.
    if "unsharded_accumulated_grad" not in vars(fsdp_params[0]):
        for param in missing:
            full = param._unsharded_param
            full.grad = torch.zeros_like(full, dtype=full.grad_dtype, requires_grad=False)
        return
    # Before, all have one: the dtype of what earlier micro-steps left at full size, or that in which backward made them.
    accumulated = next((grad for grad in map(_accumulated_of, fsdp_params) if grad is not None), None)
    dtype = next(filter(None, gradients))[0].dtype if accumulated is None else accumulated.dtype
    for param in missing:
        zeros = torch.zeros_like(param._unsharded_param, dtype=dtype, requires_grad=False)
        vars(param)["unsharded_accumulated_grad"] = zeros
    for param in fsdp_params if accumulated is not None else ():
        if _accumulated_of(param) is None and (own := unreduced_of(param)):  # this micro-step alone has used it
            vars(param)["unsharded_accumulated_grad"] = own[0].to(dtype)
            param._unsharded_param.grad = None


def _accumulated_of(fsdp_param: FSDPParam) -> torch.Tensor | None:
    # Up to torch 2.14 FSDP2 moves it to an attribute. Later it stays where it is, and a property of that name shows it again.
    return vars(fsdp_param).get("unsharded_accumulated_grad")


def drop_unreduced(fsdp_param: FSDPParam) -> None:
    """Drop the gradients that ``unreduced_of`` returns."""
    if "unsharded_accumulated_grad" in vars(fsdp_param):
        vars(fsdp_param)["unsharded_accumulated_grad"] = None
    if was_gathered(fsdp_param):
        fsdp_param._unsharded_param.grad = None
