"""Codes sharded under a float dtype, as FSDP2 before torch 2.12 asks for: no byte changes, and the floats are never seen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_zeropp.frozen import storage
from hf_zeropp.frozen.modules import convert_module, set_packed
from hf_zeropp.frozen.storage import as_bytes, as_floats
from hf_zeropp.frozen.units import frozen_parameters, shard_frozen
from hf_zeropp.ops.frozen_format import FrozenFormat

pytestmark = pytest.mark.thorough

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
FORMAT = FrozenFormat(8)


@pytest.mark.parametrize("kind", ["codes", "scales"])
def test_every_byte_survives_what_happens_to_a_parameter(kind):
    """Among them are the NaNs and infinities of both dtypes."""
    floats = as_floats(EVERY_BYTE, kind)
    assert not torch.isfinite(floats.float()).all() and floats.data_ptr() == EVERY_BYTE.data_ptr()
    copied, joined = torch.empty_like(floats).copy_(floats), torch.cat([floats[:7], floats[7:]])
    for copy in (floats.clone(), copied, joined, floats.view(16, 16).t().contiguous().t().reshape(-1)):
        assert torch.equal(as_bytes(copy), EVERY_BYTE)


class Model(nn.Module):
    """A packed layer and a dense one, both frozen."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(5, dtype=torch.bfloat16)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(input))


def model_of_every_byte() -> Model:
    """A packed layer of 5 rows, which 2 ranks share unevenly. A row has each byte as a code, and other scales than the others."""
    layer = nn.Linear(256, 5, bias=False, dtype=torch.bfloat16)
    convert_module(layer, "weight", FORMAT)
    codes = torch.stack([EVERY_BYTE.roll(row) for row in range(5)])
    set_packed(layer, "weight", codes, EVERY_BYTE[-5 * FORMAT.scale_columns(256) :].view(5, -1))
    return Model(layer).requires_grad_(False)


def check_bytes(model: Model) -> None:
    """Shards and gathered parameters hold the bytes they should hold, and no float shows in the state dict."""
    plain = model_of_every_byte()
    expected, gathered = plain.state_dict(), {}

    def note(layer: nn.Module, args: object) -> None:
        gathered.update({f"layer.{name}": as_bytes(param).clone() for name, param in layer.stored_params().items()})

    input = torch.ones(1, 256, dtype=torch.bfloat16)
    hook = model.layer.register_forward_pre_hook(note)
    assert torch.equal(model(input).nan_to_num(7), plain(input).nan_to_num(7))
    hook.remove()
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert gathered and all(torch.equal(tensor, expected[name]) for name, tensor in gathered.items())
    assert full.keys() == expected.keys()
    assert all(
        torch.equal(full[name], tensor) and full[name].dtype == tensor.dtype for name, tensor in expected.items()
    )


@torch.no_grad()
def run_every_byte(rank: int, param_dtype: torch.dtype | None, folder: str) -> set[torch.dtype]:
    """Shard, gather, convert, save and load. Returns the dtypes of the packed weights' shards."""
    storage.force_floats = True
    model = model_of_every_byte()
    shard_frozen(model, [], init_device_mesh("cpu", (dist.get_world_size(),)), param_dtype=param_dtype)
    fully_shard(model, ignored_params=set(frozen_parameters(model)))
    check_bytes(model)
    model.to(torch.float16).to("cpu").bfloat16()
    check_bytes(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    for param in model.layer.stored_params().values():
        as_bytes(param.to_local()).zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    check_bytes(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    check_bytes(model)
    return {param.dtype for param in model.layer.parameters()}


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_every_byte_survives_sharding_gathers_conversions_and_checkpoints(tmp_path, param_dtype):
    dtypes = run_ranks(run_every_byte, 2, param_dtype, str(tmp_path))
    assert dtypes == [{torch.float8_e4m3fn, torch.float8_e5m2}] * 2


def run_integers(rank: int) -> bool:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.uint8), requires_grad=False)
    try:
        fully_shard(layer)
    except RuntimeError as error:
        assert "floating point" in str(error), error
        return False
    return True


def test_fsdp2_shards_integers_from_the_torch_on_that_we_say():
    assert run_ranks(run_integers, 2) == [not storage.fsdp2_needs_floats()] * 2
