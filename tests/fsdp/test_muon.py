"""Muon on sharded matrices gives the bits of the unsharded update, and what it sends is counted; others are named."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from toy import EXACT, backward, logged_messages, make_lm, shard
from trainer_runs import build_trainer, callback_of, logged, losses, same_weights, weights
from transformers import Trainer, ViTConfig, ViTModel
from two_nodes import on_four_ranks

from hf_zeropp import Muon, apply_zeropp
from hf_zeropp.estimate.memory_and_bytes import ours
from hf_zeropp.estimate.model_shape import ModelShape, ParamShape, UnitShape
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.integrations.step_log import CROSS_NODE
from hf_zeropp.traffic import GATHER_RESYNC, OPTIMIZER

CONFIG = EXACT | {"hpz_size": "node", "ranks_per_node": 2}
# Fewer rows than ranks, rows that ranks share unevenly, more matrices than ranks and not a multiple of them.
SIZES = ((13, 40), (40, 7), (7, 3), (3, 29), (29, 29))


class Experts(nn.Module):
    """A stack of matrices, as Transformers fuses the experts of a layer; as many as there are ranks, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(5, 29, 11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eio->beo", x, self.stack)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(i, o, bias=i > 20) for i, o in SIZES), Experts())


def scenario_muon_has_the_bits_of_the_unsharded_update(rank: int) -> None:
    sharded, whole = layers(), layers()
    for layer in sharded:
        fully_shard(layer)
    ours = Muon.of_model(fully_shard(sharded), lr=1e-2)
    matrices = [param for param in whole.parameters() if param.ndim == 2]
    experts = [nn.Parameter(expert) for expert in whole[-1].stack.detach().clone()]
    settings = {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon([*matrices, *experts], **settings)
    adamw = torch.optim.AdamW([param for param in whole.parameters() if param.ndim == 1], lr=1e-2, weight_decay=0.1)
    for step in range(4):
        torch.manual_seed(step)
        sharded(torch.randn(6, 13)).square().sum().backward()
        for mine, its in zip(sharded.parameters(), whole.parameters(), strict=True):
            its.grad = mine.grad.full_tensor()
        for expert, grad in zip(experts, whole[-1].stack.grad, strict=True):
            expert.grad = grad.clone()
        for optimizer in (ours, theirs, adamw):
            optimizer.step()
        ours.zero_grad()
        whole[-1].stack.data.copy_(torch.stack(experts))
        for mine, its in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), its), (step, tuple(its.shape))


def train(rank: int, optimizer_of, steps: int = 4):
    model = shard(make_lm(hidden=64, inner=128))
    handle = apply_zeropp(model, CONFIG)
    optimizer = optimizer_of([param for param in model.blocks.parameters() if param.ndim == 2])
    with logged_messages("hf_zeropp.muon") as logs:
        for step in range(steps):
            backward(model, rank, step)
            optimizer.step()
            model.zero_grad()
    return handle, optimizer, logs


def scenario_what_muon_sends_is_counted(rank: int) -> None:
    """Each of 4 ranks owns one of 4 matrices: it receives 3/4 of that one, 2/4 from another node, and as much of the others.

    AdamW sends nothing.
    """
    handle, _, logs = train(rank, Muon)
    counted = handle.traffic.counts[OPTIMIZER]
    matrix = 64 * 128 * 2
    assert (counted.cross_node, counted.intra_node) == (4 * 2 * matrix // 2, 4 * 2 * matrix // 4)
    shape = ModelShape("matrices", (UnitShape("layer", (ParamShape((64, 128)),) * 4),))
    lines = [ours(shape, Setup(4, 2, optimizer=optimizer)) for optimizer in ("muon", "adamw")]
    assert lines[0].cross_node - lines[1].cross_node == 2 * counted.cross_node // 4
    assert lines[0].intra_node - lines[1].intra_node == 2 * counted.intra_node // 4
    of_adamw, _, more_logs = train(rank, torch.optim.AdamW)
    assert OPTIMIZER not in of_adamw.traffic.counts and logs == more_logs == []


def scenario_a_step_is_no_edit_by_something_else(rank: int) -> None:
    """With deltas whole weights cross at first, and never again: AdamW's part of a step comes behind that of the matrices."""
    model = shard(make_lm())
    handle = apply_zeropp(model, {"qwz_mode": "delta", "qwz_bits": 4, "ranks_per_node": 2})
    optimizer = Muon.of_model(model, lr=1e-3)
    for step in range(4):
        backward(model, rank, step)
        optimizer.step()
        model.zero_grad()
    assert handle.traffic.counts[GATHER_RESYNC].calls == len(handle.gathers)


def scenario_torchs_muon_is_named_with_the_remedy(rank: int) -> None:
    _, _, logs = train(rank, torch.optim.Muon)
    if rank == 0:
        (message,) = logs
        assert message.startswith("Muon of torch computes with whole matrices") and "use hf_zeropp.Muon" in message
    else:
        assert logs == []


def scenario_torchs_muon_fails_on_a_head_of_one_row_and_ours_is_named(rank: int) -> None:
    """Stock raises "aten.add_.Tensor: in-place operations that require placement changes are not supported"."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 1, bias=False))
    apply_zeropp(fully_shard(model), CONFIG)

    def step_with(optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"\[1, 8\] over \[4\] ranks.*hf_zeropp\.Muon.*Muon\.of_model.*aten\.add_"):
        step_with(torch.optim.Muon(model.parameters()))
    optimizer = Muon.of_model(model)
    for _ in range(2):
        step_with(optimizer)


def scenario_a_trainer_resumes_with_the_bits_of_an_unbroken_run(rank: int) -> None:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)

    def trained(path: str, resume: bool | None = None, **arguments) -> Trainer:
        trainer = build_trainer(path, save_strategy="steps", save_steps=4, **arguments)
        trainer.optimizer_cls_and_kwargs = (lambda: Muon.of_model, {"lr": 2e-3})
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trained(folder[0], max_steps=4, logging_steps=1)
    resumed, straight = trained(folder[0], True, max_steps=6), trained(folder[0] + "-straight")
    assert losses(straight) == losses(resumed)
    assert same_weights(weights(straight), weights(resumed))
    assert losses(straight)[-1] < losses(straight)[0]
    # The log holds the optimizer's bytes as well.
    counts = callback_of(straight).handle.traffic.counts
    assert counts[OPTIMIZER].cross_node > 0
    of_steps = logged(straight, CROSS_NODE)
    assert of_steps[3] == pytest.approx(of_steps[5])


def test_positions_and_convolutions_are_no_matrices():
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = ViTModel(ViTConfig(image_size=16, patch_size=4, **size), add_pooling_layer=False)
    for transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        model.add_module(transposed.__name__, transposed(4, 6, 3))
    matrices, others = (group["params"] for group in Muon.of_model(model).param_groups)
    assert {tuple(param.shape) for param in matrices} == {(32, 32), (48, 32), (32, 48)}
    assert {param.ndim for param in others} == {1, 3, 4, 5}


@pytest.mark.parametrize(
    "mistake", [{"adjust_lr_fn": "match_rms_adam"}, {"lr": -1.0}, {"weight_decay": -1.0}, {"momentum": -1.0}]
)
def test_what_torchs_muon_refuses_is_refused(mistake):
    said = []
    for optimizer in (torch.optim.Muon, Muon):
        with pytest.raises(ValueError) as error:
            optimizer([nn.Parameter(torch.ones(2, 3))], **mistake)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_what_no_step_would_change_is_refused():
    with pytest.raises(ValueError, match=r"Muon takes matrices, got a parameter of shape \(12,\).* use Muon.of_model"):
        Muon([nn.Parameter(torch.ones(12))])
    with pytest.raises(ValueError, match="'AdamW'"):
        Muon([{"params": [nn.Parameter(torch.ones(2, 3))], "algorithm": "AdamW"}])


def test_a_copy_of_model_and_optimizer_trains_as_the_original():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4))
    pair = model, Muon.of_model(model, lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.arange(5.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train(*pair)
    copies = copy.deepcopy(pair)
    train(*pair)
    train(*copies)
    torch.testing.assert_close(copies[0].state_dict(), pair[0].state_dict(), rtol=0, atol=0)


test_muon = pytest.mark.thorough("*a_trainer_resumes*")(on_four_ranks(__name__))
