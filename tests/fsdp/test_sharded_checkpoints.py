"""Sharded checkpoints (``torch.distributed.checkpoint``) of models on every kind of mesh.

A run that loads weights, moments and the handle's state goes on as the run that saved them, bit for bit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from test_pytorch_2d import REPLICAS, TENSORS, loss_of, make, mesh_of
from test_two_meshes import WIDTH, sharded, used_by
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from toy import POLICIES
from two_nodes import on_four_ranks

from hf_zeropp import ZeroPPHandle, apply_zeropp

pytestmark = pytest.mark.thorough

SETTINGS = {
    "unquantized": {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None},
    "defaults": {},
    "half_model": {"preset": "half_model"},
    "exact": {"preset": "exact"},
}
Loss = Callable[[nn.Module, int], torch.Tensor]
"""The loss of a model in a micro-step."""


def train(model: nn.Module, handle: ZeroPPHandle, optimizer: torch.optim.Optimizer, loss_of: Loss) -> list[float]:
    losses = []
    for step in range(2):
        for micro_step in range(2):
            handle.set_last_micro_step(micro_step == 1)
            loss = loss_of(model, 2 * step + micro_step)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_resumes(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    ranks_per_node: int,
    *,
    stage: str = "",
    mesh: DeviceMesh | None = None,
) -> None:
    """Check that what is loaded into a model of other weights trains on as what was saved.

    Args:
        make: makes the model, sharded.
        loss_of: its loss.
        ranks_per_node: of the world.
        stage: the name of this rank's stage, under which it saves; stages hold weights of equal names.
        mesh: of the stage.
    """
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = shared[0]
    for name, settings in SETTINGS.items():
        path, losses = os.path.join(folder, name), {}
        for loads in (False, True):
            model = make()
            if loads:
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(2)
            handle = apply_zeropp(model, settings | {"ranks_per_node": ranks_per_node}, mesh=mesh)
            # An operator of one list takes no tensors of two meshes.
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
            train(model, handle, optimizer, loss_of)
            weights, moments = get_state_dict(model, optimizer)
            state = {f"{stage}model": weights, f"{stage}optimizer": moments}
            if loads:
                dcp.load(state, checkpoint_id=path)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
                handle.invalidate()
            else:
                dcp.save(state, checkpoint_id=path)
                handle.save_state()
            losses[loads] = train(model, handle, optimizer, loss_of)
        assert losses[True] == losses[False], (name, losses)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def scenario_replicas(rank: int) -> None:
    mesh = mesh_of(REPLICAS)
    assert_resumes(lambda: make(mesh, 12), lambda model, step: loss_of(model, mesh, step), 1)


def scenario_fsdp_and_tp(rank: int) -> None:
    mesh = mesh_of(TENSORS)
    assert_resumes(lambda: make(mesh, 12), lambda model, step: loss_of(model, mesh, step), 2)


def scenario_fsdp_and_ep(rank: int) -> None:
    def loss_of_experts(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        return model(x, used_by(rank, step)).float().square().mean()

    assert_resumes(lambda: sharded(POLICIES["bf16"]), loss_of_experts, 1)


def scenario_stages_and_fsdp(rank: int) -> None:
    mesh = mesh_of({"pp": 2, "dp": 2})
    stage = mesh.get_local_rank("pp")
    assert_resumes(
        lambda: make(mesh, 12, depth=2 + stage),
        lambda model, step: loss_of(model, mesh, step),
        1,
        stage=f"stage {stage} ",
        mesh=mesh["dp"],
    )


test_a_loaded_run_goes_on_bit_for_bit = on_four_ranks(__name__, limit_s=300)
