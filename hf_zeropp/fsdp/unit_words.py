"""A unit in words, for errors that say how ranks differ."""

from __future__ import annotations

from collections.abc import Iterator

from hf_zeropp.fsdp.units import Unit


def words_of_params(unit: Unit) -> Iterator[str]:
    """Iterate over name, full shape, dtype and training of each parameter, in words."""
    params = zip(unit.param_shards, unit.params, unit.grad_dtypes, unit.have_own_gathers, strict=True)
    for shard, param, grad_dtype, has_own_gather in params:
        words = f"{shard.name} {tuple(param.shape)} in {param.dtype}"
        words += "" if param.requires_grad else ", frozen"
        words += "" if grad_dtype in (None, param.dtype) else f", its gradient in {grad_dtype}"
        yield words + (", with a gather of its own" if has_own_gather else "")


def words_of_precision(unit: Unit) -> str:
    """Return the dtypes of FSDP2's mixed precision policy, in words."""
    param_dtypes = sorted({str(policy.param_dtype) for policy in unit.precisions})
    return f"param_dtype {', '.join(param_dtypes)}, reduce_dtype {unit.precisions[0].reduce_dtype}"


def words_of_structure(unit: Unit) -> str:
    """Return what of a unit ranks must have alike in a step: what trains, dtypes of weights and gradients, hooks, divisors."""
    shards = zip(unit.param_shards, unit.params, strict=True)
    frozen = [shard.name for shard, param in shards if not param.requires_grad]
    dtypes = sorted({str(param.dtype) for param in unit.params})
    said = f"{', '.join(dtypes)}, {'frozen: ' + ', '.join(frozen) if frozen else 'all parameters trainable'}"
    own_dtypes = {None, *(param.dtype for param in unit.params)}
    kept = {dtype for dtype, param in zip(unit.grad_dtypes, unit.params, strict=True) if param.requires_grad}
    grad_dtypes = sorted(map(str, kept - own_dtypes))
    said += f", some gradients in {', '.join(grad_dtypes)}" if grad_dtypes else ""
    said += ", with hooks on its gradients" if unit.gradients.are_looked_at else ""
    factor = unit.gradients.divide_factor
    return said + ("" if factor is None else f", gradients divided by {factor}")
