"""Training on a GPU: the losses of the CPU, no host synchronization of ours in a step, no growth of memory."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from toy import VOCAB, loss_of, make_lm, shard, tokens_of

from hf_zeropp import apply_zeropp, ops
from hf_zeropp.ops.format import Segment, WireLayout

pytestmark = pytest.mark.gpu

NODES = {"ranks_per_node": 2}
STEPS = 8
WORLD = 4


def sharded_model(device: str) -> torch.nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return shard(make_lm(hidden=64, inner=160).to(device), mesh=mesh)


def losses(rank: int, device: str) -> list[float]:
    """Losses of a model that trains on random tokens with ZeRO++, on two emulated nodes."""
    model = sharded_model(device)
    apply_zeropp(model, NODES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        loss = loss_of(model, tokens_of(rank, step, (4, 32)).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_four_ranks_on_one_gpu_train_as_on_the_cpu():
    """Equal up to the rounding of the matrix products, which is the devices' own."""
    on_cpu, on_gpu = run_ranks(losses, WORLD, "cpu"), run_ranks(losses, WORLD, "cuda")
    assert torch.allclose(torch.tensor(on_gpu), torch.tensor(on_cpu), rtol=2e-3, atol=2e-3)
    assert on_gpu[0][-1] != on_gpu[0][0]


def test_operators_do_not_synchronize():
    """With CUDA asked to raise where the host waits. (Of a whole step it cannot be asked: gloo waits, being on the host.)"""
    layout = WireLayout([Segment(4096, 8), Segment(64, None), Segment(1024, 4)], 128)
    values, total = torch.randn(4, layout.numel, device="cuda"), torch.zeros(2, layout.numel, device="cuda")
    wire = ops.quantize(values, layout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.quantize(values, layout, slice_rows=2, out=wire)
        ops.dequantize(wire, layout, dtype=torch.bfloat16, slice_rows=2)
        ops.dequantize_sum(wire, layout, num_sources=2, initial=total, out=total)
        ops.dequantize_sum_quantize(wire, layout, layout, num_sources=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def synchronizations() -> Iterator[list[str]]:
    """The places where the host waits for the GPU, as PyTorch notices them: the innermost Python frame of each wait."""
    files: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *args, **kwargs: files.append(traceback.extract_stack()[-2].filename)
        torch.cuda.set_sync_debug_mode("warn")
        yield files
        torch.cuda.set_sync_debug_mode("default")


def synchronizations_in_a_step(rank: int) -> tuple[list[str], list[str]]:
    """Files that synchronize in a step, and in a line that does, to see that it is noticed."""
    model = sharded_model("cuda")
    apply_zeropp(model, NODES)
    tokens = torch.randint(VOCAB, (4, 32), device="cuda")
    for _ in range(2):
        loss_of(model, tokens).backward()
        model.zero_grad()
    with synchronizations() as in_step:
        loss_of(model, tokens).backward()
    with synchronizations() as in_line:
        tokens.sum().item()
    return in_step, in_line


def test_a_step_has_no_synchronization_of_ours():
    """Gloo's own, in torch.distributed, are its business."""
    for in_step, in_line in run_ranks(synchronizations_in_a_step, WORLD):
        assert in_line == [__file__]
        assert [file for file in in_step if "hf_zeropp" in file] == []


def memory_over_steps(rank: int) -> tuple[int, int]:
    """Bytes allocated after 20 and after 220 steps."""
    model = sharded_model("cuda")
    apply_zeropp(model, NODES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = []
    for steps in (20, 200):
        for step in range(steps):
            loss_of(model, tokens_of(rank, step, (4, 32)).cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    return tuple(sizes)


def test_memory_does_not_grow_over_200_steps():
    for early, late in run_ranks(memory_over_steps, WORLD, limit_s=600.0):
        assert late <= early + 4096


def losses_over_nccl(rank: int, world_size: int) -> list[float]:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    return losses(rank, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="NCCL gives each rank a GPU, and two nodes of two need four")
def test_nccl_trains_as_gloo_on_the_cpu():
    on_cpu = run_ranks(losses, WORLD, "cpu")
    on_gpus = run_ranks(losses_over_nccl, WORLD, WORLD, init=False)
    assert torch.allclose(torch.tensor(on_gpus), torch.tensor(on_cpu), rtol=2e-3, atol=2e-3)
