"""Small models with awkward sizes, and the bounds within which distributed tests expect their weights and gradients.

The sizes (a vocabulary of 29, 12 hidden features, 27 in the feed-forward) are divisible by few worlds and by no block, and
there are biases and norms. So shards are uneven, some ranks have empty ones, and blocks are cut short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from op_cases import largest_error
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hf_zeropp import ZeroPPHandle, get_handle
from hf_zeropp.ops.format import LARGEST_LEVEL

VOCAB, HIDDEN, INNER = 29, 12, 27
EXACT = {"qwz_bits": None, "hpz_size": None, "qgz_bits": None, "qgz_intra_bits": None}
"""Settings under which nothing is quantized and no secondary shard is kept."""
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Arguments of ``LlamaConfig`` that all tiny Llamas of the tests share. Each test adds its sizes."""
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "fp16 reduce": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""A function of a model and tokens."""


class Block(nn.Module):
    """A residual block, x + down(gelu(up(norm(x)))): two matrices, two biases, a norm."""

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """A small language model: embedding, blocks, norm, head.

    Args:
        depth: number of blocks.
        tied: share the embedding's weight with the head.
        hidden: features between blocks.
        inner: features inside a block.
        paths: for each forward pass, the blocks in their order of use; passes beyond them use ``path``.

    Attributes:
        path: the blocks in their order of use. A block may be skipped, or used twice.
        head_is_used: False returns hidden states, and leaves the head without a gradient.
        call: calls a block. Activation checkpointing around the call of a unit, as Transformers has it, takes its place.
    """

    def __init__(
        self, depth: int = 2, tied: bool = False, hidden: int = HIDDEN, inner: int = INNER, paths: Sequence = ()
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden, inner) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        self.path = list(range(depth))
        self.paths = iter(paths)
        self.head_is_used = True
        self.call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in next(self.paths, self.path):
            x = self.call(self.blocks[index], x)
        return self.head(self.norm(x)) if self.head_is_used else self.norm(x)


def make_lm(seed: int = 0, **kwargs) -> TinyLM:
    """Make a ``TinyLM`` with the same weights on every rank."""
    torch.manual_seed(seed)
    return TinyLM(**kwargs)


def shard(model: nn.Module, policy: MixedPrecisionPolicy | None = None, **kwargs) -> nn.Module:
    """Shard a model as users do: every block is a unit, and the root's unit has all other parameters."""
    kwargs["mp_policy"] = policy or MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def tokens_of(rank: int, step: int = 0, shape: tuple[int, int] = (2, 5)) -> torch.Tensor:
    """Return random tokens, different on every rank and at every step, and the same in every run."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return a loss that depends on all parameters."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def loss_without_head(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return a loss in which the head takes no part, so that the root's gradients arrive without the head's."""
    model.head_is_used = False
    loss = model(tokens).float()[..., 0].square().mean()
    model.head_is_used = True
    return loss


def backward(model: nn.Module, rank: int, step: int = 0, loss: Loss = loss_of) -> float:
    """Run one micro-step, forward and backward, and return its loss."""
    loss = loss(model, tokens_of(rank, step))
    loss.backward()
    return loss.item()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Iterable[int],
    handle: ZeroPPHandle | None = None,
    micro_steps: int = 1,
    clip: float | None = None,
) -> list[float]:
    """Train a step for each number of ``steps``, and return the losses. Tokens of each micro-step follow from its number.

    The handle, where there is one, is told which micro-steps are the last. ``clip`` is the norm that gradients may have.
    """
    losses = []
    for step in steps:
        for micro_step in range(micro_steps):
            if handle is not None:
                handle.set_last_micro_step(micro_step == micro_steps - 1)
            losses.append(backward(model, rank, step * micro_steps + micro_step))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor; return other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_of_all(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather DTensors by name, as ``full`` does, with one exchange for all that are sharded alike.

    A collective of four ranks takes 2 ms on two cores, and a test that looks at 40 gradients after each step would spend more
    time with ``full_tensor()`` than with what it tests.
    """
    gathered: dict[str, torch.Tensor] = dict(tensors)
    alike: dict[tuple[dist.ProcessGroup, torch.dtype], dict[str, int]] = {}
    for name, tensor in tensors.items():
        cuts = [cut for cut in enumerate(getattr(tensor, "placements", ())) if not cut[1].is_replicate()]
        if len(cuts) == 1 and type(cuts[0][1]) is Shard:
            [(dim_of_mesh, shards)] = cuts
            group = tensor.device_mesh.get_group(dim_of_mesh)
            alike.setdefault((group, tensor.dtype), {})[name] = shards.dim
        else:
            gathered[name] = full(tensor)
    for (group, _), dims in alike.items():
        own = [tensors[name].to_local().detach() for name in dims]
        message = [shard.shape for shard in own], torch.cat([shard.flatten() for shard in own])
        of_ranks: list = [None] * group.size()
        dist.all_gather_object(of_ranks, message, group)
        flat_of_ranks = [flat.split([shape.numel() for shape in shapes]) for shapes, flat in of_ranks]
        for index, (name, dim) in enumerate(dims.items()):
            shapes = [shapes[index] for shapes, _ in of_ranks]
            pieces = [flat[index] for flat in flat_of_ranks]
            shards = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
            gathered[name] = torch.cat(shards, dim)
    return gathered


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the gradients by the parameter's name. Parameters without one are left out."""
    # Gradients whose last micro-step has not come are completed first. A parameter to which other ranks alone contributed has its
    # gradient on this rank from then on.
    if (handle := get_handle(model)) is not None:
        handle.deliver()
    return full_of_all({name: param.grad for name, param in model.named_parameters() if param.grad is not None})


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the masters, and return copies of them by name."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    return {name: weight.clone() for name, weight in full_of_all(params).items()}


def gathered_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the weights with which a forward pass computes, as the units' all-gathers decode them."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return weights


def local_gradients(
    weights: dict[str, torch.Tensor], reference: nn.Module, rank: int, step: int = 0, loss: Loss = loss_of
) -> dict[str, torch.Tensor]:
    """Return this rank's own gradients, before any reduction.

    Args:
        weights: by name. The gradients are computed in their dtype.
        reference: an unsharded model, which takes the weights.
        rank: sets the tokens.
        step: sets the tokens.
        loss: the loss.
    """
    dtype = next(iter(weights.values())).dtype
    reference.to(dtype).load_state_dict(weights, strict=False)
    reference.zero_grad()
    loss(reference, tokens_of(rank, step)).backward()
    return {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}


def every_gradient(
    micro_steps: list[dict[str, torch.Tensor]], names: Collection[str], weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gather the local gradients of all ranks. All ranks must call it with the same names.

    Args:
        micro_steps: this rank's gradients by name, one dictionary per micro-step.
        names: parameters to gather.
        weights: by name; they give the shapes.

    Returns:
        By name, [micro-steps, W, ...] in fp64, with zeros where a rank has no gradient.
    """
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
    """How the gradients of one parameter travel.

    Attributes:
        node_bits: bits of a code in the hop within the node; None sends ``dtype``.
        cross_bits: bits of a code in the hop across nodes; None sends ``dtype``.
        ranks_per_node: ranks of a node.
        dtype: the dtype in which FSDP2 reduces.
    """

    node_bits: int | None
    cross_bits: int | None
    ranks_per_node: int
    dtype: torch.dtype = torch.float32

    def bound(self, gradients: torch.Tensor) -> float:
        """Return the largest possible error of the sum of all gradients after both hops.

        Hop 1 encodes every rank's gradient at every micro-step (with one rank per node it encodes none), and hop 2 encodes
        each node's sum. Each encoding adds at most ``encode_error`` of the largest value that can occur in its tensor;
        after hop 1 that value includes the errors made so far. Rounding of fp32 sums and of the result comes on top.

        Args:
            gradients: exact ones of one parameter: [micro-steps, W, ...].
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
    loss: Loss | Sequence[Loss] = loss_of,
) -> dict[str, float]:
    """Assert that every ``.grad`` is the mean over ranks of the local gradients, within the bound of the reduction.

    Local gradients are those of an unsharded model with the weights that the gathers deliver. The check is then one of
    the reduction alone: the effect of quantized weights is in both. 1-D parameters travel unquantized, and are held to
    the bound of an unquantized reduction.

    Args:
        model: the sharded model, after the backward passes of ``steps``.
        reference: an unsharded model of the same kind.
        reduction: how gradients travelled.
        steps: the micro-steps, by the number that sets their tokens.
        factor: the divisor of the sum over ranks; None is the world size.
        summed: the micro-steps were added up on each rank, and reduced once.
        slack: multiplies the bound.
        loss: the loss of all micro-steps, or one of each.

    Returns:
        Each parameter's error as a fraction of its bound.

    Raises:
        AssertionError: a gradient is missing, too many, or further off than its bound.
    """
    weights, reduced = gathered_weights(model), full_gradients(model)
    losses = loss if isinstance(loss, Sequence) else [loss] * len(steps)
    micro_steps = [local_gradients(weights, reference, rank, *pair) for pair in zip(steps, losses, strict=True)]
    gathered = every_gradient(micro_steps, reduced.keys(), weights)
    exact = {name: grads.sum(0, keepdim=True) if summed else grads for name, grads in gathered.items()}
    divisor = factor or dist.get_world_size()
    shares = {name: _share_of_bound(reduced[name], grads, reduction, divisor) / slack for name, grads in exact.items()}
    expected = set().union(*micro_steps)
    assert reduced.keys() == expected, f"gradients of {reduced.keys() ^ expected} are missing or too many"
    too_wrong = {name: share for name, share in shares.items() if share > 1}
    assert not too_wrong, f"error as a multiple of the bound: {too_wrong}"
    return shares


def _share_of_bound(reduced: torch.Tensor, gradients: torch.Tensor, reduction: Reduction, factor: float) -> float:
    """Return the error of a reduced gradient over its bound; ``gradients`` are the exact ones: [micro-steps, W, ...]."""
    if reduced.ndim == 1:
        reduction = dataclasses.replace(reduction, node_bits=None, cross_bits=None)
    error = (reduced.double() - gradients.sum((0, 1)) / factor).abs().max().nan_to_num(float("inf")).item()
    # An error of zero needs no bound, which is zero too where all gradients are.
    return error / (reduction.bound(gradients) / factor) if error else 0.0


def encode_error(amax: torch.Tensor, bits: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error of encoding values up to ``amax``.

    A scale under 2^-100 is stored as zero, and the values decode to zero. Values that travel in ``dtype``
    (``bits`` is None) round to half a unit in the last place of it, or of its least number.
    """
    if bits is None:
        return amax * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return amax * largest_error(bits) + LARGEST_LEVEL[bits] * 2.0**-100


def premultiplied_sum(factor: float) -> dist.ReduceOp:
    """Return the reduce op that FSDP2 makes of a gradient divide factor: ``ReduceOp.PREMUL_SUM(factor)`` in torch 2.13."""
    return torch.distributed._make_nccl_premul_sum(factor)


@contextlib.contextmanager
def logged_messages(name: str = "hf_zeropp.fsdp", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """The messages that a part of the package logs inside, from ``level`` on."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
