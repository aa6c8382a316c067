"""Parameters that get a gradient on some ranks only: experts as modules, of which every rank uses others.

Two nodes of two ranks; every scenario with overlapping and with blocking communication. The oracle is an unsharded model, whose
gradients are the mean over ranks, with zeros where a rank has none, and zeros where no rank has one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from toy import EXACT, full, full_gradients, full_weights
from two_nodes import in_both_ways

from hf_zeropp import apply_zeropp

UNQUANTIZED = EXACT | {"hpz_size": "node"}
NUM_EXPERTS, WIDTH = 6, 12


class Experts(nn.Module):
    """A layer that adds up the outputs of the experts that it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))
        self.used: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) + sum(self.experts[index](x).tanh() for index in self.used)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for layer in self.layers:
            layer.used = used
            x = x + layer(x)
        return self.head(x)


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def used_by(rank: int, step: int) -> list[int]:
    """Return the experts that a rank uses: one of its own, one that changes, and never the last."""
    return sorted({rank, (rank + step) % (NUM_EXPERTS - 1)})


def loss_of(model: nn.Module, rank: int, step: int, used: list[int]) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, used).square().mean()


class Pair:
    """A model under ZeRO++, and the unsharded model with the gradients of all ranks.

    Attributes:
        model, handle: the model under ZeRO++, and its handle.
        oracle: the unsharded model on this rank.
        both: the two models.
    """

    def __init__(self, rank: int, overlap: bool, policy: MixedPrecisionPolicy | None = None, **settings) -> None:
        self.model, self.oracle, self._rank = make(), make(), rank
        for module in (*self.model.layers, self.model):
            fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
        self.handle = apply_zeropp(self.model, {"ranks_per_node": 2, "overlap": overlap} | UNQUANTIZED | settings)
        self.both = (self.model, self.oracle)

    def backward(self, step: int, used: list[int] | None = None, is_last: bool = True) -> None:
        """Run a micro-step, with the experts of ``used_by`` or with others."""
        used = used_by(self._rank, step) if used is None else used
        self.handle.set_last_micro_step(is_last)
        loss_of(self.model, self._rank, step, used).backward()
        before = {name: param.grad for name, param in self.oracle.named_parameters()}
        self.oracle.zero_grad()
        loss_of(self.oracle, self._rank, step, used).backward()
        params = dict(self.oracle.named_parameters())
        own = [torch.zeros_like(param) if param.grad is None else param.grad for param in params.values()]
        flat = torch.cat([gradient.flatten() for gradient in own])
        dist.all_reduce(flat, dist.ReduceOp.AVG)
        means = flat.split([gradient.numel() for gradient in own])
        for (name, param), mean in zip(params.items(), means, strict=True):
            mean, earlier = mean.view_as(param), before[name]
            param.grad = mean if earlier is None else earlier + mean

    def check_gradients(self, rounding: float = 0.0) -> None:
        """Compare gradients. Where they were rounded they may be off by this part of the largest."""
        ours = full_gradients(self.model)
        for name, param in self.oracle.named_parameters():
            rtol, atol = (0.0, rounding * param.grad.abs().max().item() + 1e-7) if rounding else (1e-4, 1e-6)
            torch.testing.assert_close(ours[name], param.grad, rtol=rtol, atol=atol, msg=name)

    def zero_grad(self) -> None:
        for model in self.both:
            model.zero_grad()


def scenario_clipped_steps(rank: int, overlap: bool) -> None:
    """AdamW steps behind a clipping of norms, as the unsharded model takes them."""
    pair = Pair(rank, overlap)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair.both]
    for step in range(4):
        pair.backward(step)
        pair.check_gradients()
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in pair.both]
        torch.testing.assert_close(full(norms[0]), norms[1], rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in full_weights(pair.model).items():
        torch.testing.assert_close(weight, pair.oracle.get_parameter(name).detach(), rtol=1e-3, atol=1e-5, msg=name)


def scenario_accumulated(rank: int, overlap: bool) -> None:
    """A gradient of rank 0 in one micro-step, of rank 1 in the next one, and of both in two."""
    for uses in (((0,), (1,)), ((0, 1), (1,), (1, 2)), ((3,), (), (3,))):
        for zeroes in (True, False):
            pair = Pair(rank, overlap)
            for repetition in range(2):
                for step, ranks in enumerate(uses):
                    used = [4] if rank in ranks else [rank % 3]
                    pair.backward(10 * repetition + step, used, step == len(uses) - 1)
                pair.check_gradients()
                if zeroes:
                    pair.zero_grad()


def scenario_a_look_between_micro_steps(rank: int, overlap: bool) -> None:
    """The last micro-step never comes, or comes behind a look, also in inference mode."""
    for last, inference in ((True, False), (False, False), (True, True)):
        pair = Pair(rank, overlap)
        for step in range(3):
            pair.backward(step, is_last=last and step == 2)
            if step == 1:
                with torch.inference_mode(inference):
                    pair.check_gradients()
        pair.check_gradients()


def scenario_gradients_cleared_between_micro_steps(rank: int, overlap: bool) -> None:
    """Gradients that are cleared between micro-steps take along what other ranks contributed to them before."""
    pair = Pair(rank, overlap)
    for step in range(3):
        if step == 1:
            pair.zero_grad()
        pair.backward(step, is_last=step == 2)
    pair.check_gradients()


def scenario_gradients_that_wait_at_full_size(rank: int, overlap: bool) -> None:
    """In fp32 behind micro-steps in bf16. The last one uses experts that none before has used, and leaves out some."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for settings in ({"qgz_accumulate": "rank"}, {}):
        pair = Pair(rank, overlap, policy, **settings)
        for step, used in enumerate(([0], [rank % 2, 2], [3, rank % 2])):
            if not settings:
                pair.model.set_requires_gradient_sync(step == 2)
            pair.backward(step, used, step == 2)
        pair.check_gradients(rounding=0.1)  # of three sums in bf16


def scenario_quantized(rank: int, overlap: bool) -> None:
    """With the default settings gradients exist on all ranks, and are near the mean."""
    pair = Pair(rank, overlap, qgz_bits=8, qgz_intra_bits=8)
    pair.backward(0)
    pair.check_gradients(rounding=0.02)


test_gradients_of_experts = pytest.mark.thorough("*blocking", "*a_look_between_micro_steps*", "gradients_cleared*")(
    in_both_ways(__name__)
)
