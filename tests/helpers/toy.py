"""Small models with awkward sizes, and the yardsticks the distributed tests measure them with.

Nothing here is divisible by anything: a vocabulary of 29, 12 hidden features, a feed-forward of 27, biases and norms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCAB, HIDDEN, INNER = 29, 12, 27
EXACT = {"qwz_bits": None, "hpz_size": None, "qgz_bits": None, "qgz_intra_bits": None}
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "fp16 reduce": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))): two matrices, two biases, a norm."""

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """A language model in small: embedding, blocks, norm, head."""

    def __init__(
        self, depth: int = 2, tied: bool = False, hidden: int = HIDDEN, inner: int = INNER, paths: Sequence = ()
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden, inner) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        # The blocks in the order of use; one that is skipped or used twice. A path per forward, or the same for all.
        self.path = list(range(depth))
        self.paths = iter(paths)
        self.head_is_used = True
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in next(self.paths, self.path):
            x = self.blocks[index](x)
        return self.head(self.norm(x)) if self.head_is_used else self.norm(x)


def make_lm(seed: int = 0, **kwargs) -> TinyLM:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return TinyLM(**kwargs)


def shard(model: nn.Module, policy: MixedPrecisionPolicy | None = None, **kwargs) -> nn.Module:
    """FSDP2 as users apply it: every block is a unit, the rest is the root's."""
    kwargs["mp_policy"] = policy or MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def tokens_of(rank: int, step: int = 0, shape: tuple[int, int] = (2, 5)) -> torch.Tensor:
    """Other tokens on every rank and at every step, the same in every run."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def loss_without_head(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The head takes no part: the root's gradients arrive without it."""
    model.head_is_used = False
    loss = model(tokens).float()[..., 0].square().mean()
    model.head_is_used = True
    return loss


def backward(model: nn.Module, rank: int, step: int = 0, loss=loss_of) -> float:
    loss = loss(model, tokens_of(rank, step))
    loss.backward()
    return loss.item()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


def gathered_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the units' all-gathers deliver: the weights a forward computes with, as decoded from the wire."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return weights


def local_gradients(weights: dict[str, torch.Tensor], reference: nn.Module, rank: int, step: int = 0, loss=loss_of):
    """This rank's own gradients of an unsharded model with the given weights, computed in the weights' dtype."""
    dtype = next(iter(weights.values())).dtype
    reference.to(dtype).load_state_dict(weights, strict=False)
    reference.zero_grad()
    loss(reference, tokens_of(rank, step)).backward()
    return {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}


def every_gradient(micro_steps: list[dict], names, weights: dict) -> dict[str, torch.Tensor]:
    """Per name [micro-steps, W, ...] in fp64: what every rank has, zeros where it has nothing."""
    own = [step.get(name, torch.zeros_like(weights[name])) for name in names for step in micro_steps]
    flat = torch.cat([gradient.flatten() for gradient in own])
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    pieces = torch.stack(parts).double().split([gradient.numel() for gradient in own], dim=1)
    count = len(micro_steps)
    return {
        name: torch.stack(pieces[index * count : (index + 1) * count]).unflatten(2, weights[name].shape)
        for index, name in enumerate(names)
    }


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How gradients of one parameter travel: bits per hop (None: in ``dtype``), ranks per node, dtype."""

    node_bits: int | None
    cross_bits: int | None
    ranks_per_node: int
    dtype: torch.dtype = torch.float32

    def bound(self, gradients: torch.Tensor) -> float:
        """Largest possible error of the sum of gradients [micro-steps, W, ...] when encoded in two hops.

        Of each encoding, half a step of the largest value that can occur in its tensor. Hop 1 encodes every rank's
        gradient at every micro-step (with one rank per node it encodes none), hop 2 each node's sum. On top, the fp32
        sums and the rounding of the result.
        """
        amax = gradients.abs().flatten(2).amax(2)
        nodes = amax.unflatten(1, (-1, self.ranks_per_node)).sum((0, 2))
        errors = torch.zeros_like(nodes)
        if self.ranks_per_node > 1:
            hop1 = encode_error(amax, self.node_bits, self.dtype)
            errors = hop1.unflatten(1, (-1, self.ranks_per_node)).sum((0, 2))
        errors = errors + encode_error(nodes + errors, self.cross_bits, self.dtype)
        total = nodes.sum() + errors.sum()
        return (errors.sum() + total * (amax.numel() * 2.0**-23 + torch.finfo(self.dtype).eps)).item()


def check_gradients(
    model: nn.Module,
    reference: nn.Module,
    rank: int,
    reduction: Reduction,
    *,
    steps: tuple[int, ...] = (0,),
    factor: float | None = None,
    summed: bool = False,
    slack: float = 1.0,
    loss=loss_of,
) -> dict[str, float]:
    """Assert that ``.grad`` is the mean over ranks (sum / factor) of the gradients of ``steps``, within the bound.

    The gradients are those of an unsharded model with the weights that the gathers deliver, so that what is tested is
    the reduction alone, whatever qwZ did to the weights. 1-D parameters travel unquantized and have the bound of that.

    Args:
        summed: the micro-steps were added up on each rank, and reduced once.
        slack: multiplies the bound.
        loss: the loss of all micro-steps, or one of each.

    Returns:
        Each parameter's error as a fraction of its bound.
    """
    factor = factor or dist.get_world_size()
    weights, reduced = gathered_weights(model), full_gradients(model)
    losses = loss if isinstance(loss, Sequence) else [loss] * len(steps)
    micro_steps = [local_gradients(weights, reference, rank, *pair) for pair in zip(steps, losses, strict=True)]
    shares = {}
    for name, gradients in every_gradient(micro_steps, reduced.keys(), weights).items():
        param = reduced[name]
        gradients = gradients.sum(0, keepdim=True) if summed else gradients
        exact = gradients.sum((0, 1)) / factor
        raw = dataclasses.replace(reduction, node_bits=None, cross_bits=None)
        bound = slack * (reduction if param.ndim > 1 else raw).bound(gradients) / factor
        error = (param.double() - exact).abs().max().nan_to_num(float("inf")).item()
        shares[name] = error / bound if error else 0.0
    expected = set().union(*micro_steps)
    assert reduced.keys() == expected, f"gradients of {reduced.keys() ^ expected} are missing or too many"
    too_wrong = {name: share for name, share in shares.items() if share > 1}
    assert not too_wrong, f"error as a multiple of the bound: {too_wrong}"
    return shares


def encode_error(amax: torch.Tensor, bits: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Largest error of encoding values up to ``amax``.

    Quantized: half a step, a step being amax / qmax rounded up to bf16 (7 stored bits, so at most 1 + 2^-7 of it);
    under 2^-100 a step is stored as zero. Raw: half a unit in the last place of the dtype, or of its least number.
    """
    if bits is None:
        return amax * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    qmax = {8: 127, 4: 7}[bits]
    return 0.5 * (amax / qmax) * (1 + 2.0**-7) * (1 + 1e-5) + qmax * 2.0**-100


def premultiplied_sum(factor: float):
    """The reduce op that FSDP2 makes of a gradient divide factor (torch 2.13 spells it ReduceOp.PREMUL_SUM(factor))."""
    return torch.distributed._make_nccl_premul_sum(factor)
