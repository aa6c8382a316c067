"""Training on a GPU over gloo, and what holds whatever the backend is: the host does not wait, memory does not grow."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import DEVICE, needs_ranks_on_gpus, run_on_gpus
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from toy import loss_of, make_lm, shard, tokens_of

from hf_zeropp import apply_zeropp, ops
from hf_zeropp.ops.format import Segment, WireLayout

pytestmark = needs_ranks_on_gpus

NATIVE = {"ranks_per_node": 2, "qwz_intra_bits": None, "qgz_intra_bits": None}
"""Two nodes; node hops as on GPUs by default, also on a CPU."""
STEPS = 8
WORLD = 4


def losses(rank: int, device: str) -> list[float]:
    """Losses of a model that trains on random tokens with ZeRO++, on two emulated nodes."""
    model = shard(make_lm(hidden=64, inner=160).to(device), mesh=init_device_mesh(device, (dist.get_world_size(),)))
    apply_zeropp(model, NATIVE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        loss = loss_of(model, tokens_of(rank, step, (4, 32)).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_gloo_ranks_on_one_gpu_train_as_on_the_cpu():
    """Equal up to the rounding of the matrix products, which is the devices' own."""
    on_cpu = run_ranks(losses, WORLD, "cpu")
    on_gpu = run_on_gpus(losses, WORLD, DEVICE, backend="gloo")
    assert torch.allclose(torch.tensor(on_gpu), torch.tensor(on_cpu), rtol=2e-3, atol=2e-3)
    assert on_gpu[0][-1] != on_gpu[0][0]


@pytest.mark.gpu
def test_operators_do_not_synchronize():
    """With CUDA asked to raise where the host waits."""
    layout = WireLayout([Segment(4096, 8), Segment(64, None), Segment(1024, 4)], 128)
    values, total = torch.randn(4, layout.numel, device="cuda"), torch.zeros(2, layout.numel, device="cuda")
    wire = ops.quantize(values, layout)
    ops.dequantize_sum_quantize(wire, layout, layout, num_sources=2)  # the layout's table is on the device from here on
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.quantize(values, layout, slice_rows=2, out=wire)
        ops.dequantize(wire, layout, dtype=torch.bfloat16, slice_rows=2)
        ops.dequantize_sum(wire, layout, num_sources=2, initial=total, out=total)
        ops.dequantize_sum_quantize(wire, layout, layout, num_sources=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
