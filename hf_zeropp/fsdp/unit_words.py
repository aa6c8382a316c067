"""A unit in words, for errors that say how ranks differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hf_zeropp.comm.disagreement import NAMED_UNITS
from hf_zeropp.comm.exchange import words_of
from hf_zeropp.fsdp.param_shard import grad_dtype_of, is_extension, policy_of
from hf_zeropp.fsdp.units import Unit


def words_of_params(unit: Unit) -> Iterator[str]:
    """Iterate over name, full shape, dtype and training of each parameter, in words."""
    for shard, param, fsdp_param in zip(unit.param_shards, unit.params, unit.fsdp_params, strict=True):
        grad_dtype = grad_dtype_of(fsdp_param)
        words = f"{shard.name} {tuple(param.shape)} in {param.dtype}"
        words += "" if param.requires_grad else ", frozen"
        words += "" if grad_dtype in (None, param.dtype) else f", its gradient in {grad_dtype}"
        yield words + (", with a gather of its own" if is_extension(fsdp_param) else "")


def words_of_precision(unit: Unit) -> str:
    """Return the dtypes of FSDP2's mixed precision policy, in words."""
    policies = list(map(policy_of, unit.fsdp_params))
    param_dtypes = sorted({str(policy.param_dtype) for policy in policies})
    return f"param_dtype {', '.join(param_dtypes)}, reduce_dtype {policies[0].reduce_dtype}"


def words_of_structure(unit: Unit) -> str:
    """Return what of a unit ranks must have alike in a step: what trains, dtypes of weights and gradients, hooks, divisors."""
    shards = zip(unit.param_shards, unit.params, strict=True)
    frozen = [shard.name for shard, param in shards if not param.requires_grad]
    dtypes = sorted({str(param.dtype) for param in unit.params})
    said = f"{', '.join(dtypes)}, {'frozen: ' + ', '.join(frozen) if frozen else 'all parameters trainable'}"
    own_dtypes = {None, *(param.dtype for param in unit.params)}
    params = zip(unit.fsdp_params, unit.params, strict=True)
    kept = {grad_dtype_of(fsdp_param) for fsdp_param, param in params if param.requires_grad}
    grad_dtypes = sorted(map(str, kept - own_dtypes))
    said += f", some gradients in {', '.join(grad_dtypes)}" if grad_dtypes else ""
    said += ", with hooks on its gradients" if unit.gradients.are_looked_at else ""
    factor = unit.gradients.divide_factor
    return said + ("" if factor is None else f", gradients divided by {factor}")


def words_of_unseen_changes(found: Mapping[str, Sequence[int]]) -> str:
    """Return an error's text for units whose weights were written to unseen, by the ranks on which they were."""
    said = [f"unit {name} on {words_of(ranks)}" for name, ranks in found.items()]
    more = f" and {len(said) - NAMED_UNITS} more" if said[NAMED_UNITS:] else ""
    return (
        f"Weights have changed since they were gathered, and no version counter tells of it: {'; '.join(said[:NAMED_UNITS])}"
        f"{more}. Other nodes hold the old ones, and on accelerators the pass before this one has computed with them. Call "
        "handle.invalidate() after writes through param.data, NumPy, pointers or torch._foreach_* functions, and after a "
        "checkpoint was loaded in place."
    )
