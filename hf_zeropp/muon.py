"""Muon for matrices that FSDP2 shards: what ``torch.optim.Muon`` computes, with every matrix orthogonalized on one rank.

``torch.optim.Muon`` works on sharded matrices too, but then each of its matrix products gathers over all ranks: a step sends
nine times the model across nodes. Here momentum stays sharded. A matrix's update travels in bf16 to the rank that owns the
matrix, and comes back orthogonalized, by two all-to-all exchanges. Newton-Schulz rounds to bf16 before anything else and ends in
it, so nothing is lost on the way: the result has the bits of ``torch.optim.Muon`` on the unsharded matrix.

With Y nodes and matrices of M bytes in bf16, a node sends 2 M (Y-1)/Y² in a step: M/2 with two nodes, M/5 with eight.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from hf_zeropp.dtensors import local_part, with_local_part

logger = logging.getLogger(__name__)

Orthogonalize = Callable[[torch.Tensor], torch.Tensor]
_OF_WHOLE_MATRICES = ("muon", "shampoo", "soap", "dion")
"""Parts of the names of optimizers that need all of a matrix to update a part of it."""


class Muon(torch.optim.Optimizer):
    """Muon for sharded matrices, and AdamW for everything else, in one optimizer, as Trainers want it.

    A group with ``"algorithm": "adamw"`` takes the arguments of ``torch.optim.AdamW``, other groups those below. A parameter with
    more than two dimensions, such as the fused experts of a MoE model, is a stack of matrices: where whole matrices are sharded,
    nothing is sent.

    Args:
        params: matrices, or groups of parameters.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in ``torch.optim.Muon``. AdamW's
            groups without a value of their own take ``lr`` and ``weight_decay`` as well.

    Attributes:
        received: bytes that this rank received in the last step, by the rank of the world that sent them.

    Raises:
        ValueError: a group without AdamW has a parameter that is no matrix, one that several dimensions of a mesh shard, or a
            value that ``torch.optim.Muon`` refuses; or an algorithm has another name.

    Example:
        >>> model, optimizer = accelerator.prepare(model, Muon.of_model(model, lr=3e-4))
        >>> Trainer(..., optimizer_cls_and_kwargs=(lambda: Muon.of_model, {"lr": 3e-4}))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        self._muon_defaults = {"algorithm": "muon", **settings, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        # In each step it is given this optimizer's groups and states anew: loading a state, and Accelerate, replace those.
        self._adamw = torch.optim.AdamW([torch.zeros(1)])
        self.received: Counter[int] = Counter()
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @classmethod
    def of_model(cls, model: nn.Module, lr: float = 1e-3, weight_decay: float = 0.1, **settings: Any) -> Muon:
        """Return an optimizer of a model's trainable parameters: Muon for the matrices of its layers, AdamW for all others.

        Embeddings, the output head that ``get_output_embeddings`` gives, convolutions, norms and biases are AdamW's. Positions
        are, if they are an ``nn.Embedding`` or a parameter of shape [1, n, columns]; one of another shape is taken for a matrix.
        A classification head is Muon's. The size of Muon's updates is matched to AdamW's, so that both take the same learning
        rate and weight decay, unless ``adjust_lr_fn`` among ``settings`` says otherwise.
        """
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        no_layers = [module for module in model.modules() if isinstance(module, (nn.Embedding, *convolutions))]
        heads = [get() for module in model.modules() if callable(get := getattr(module, "get_output_embeddings", None))]
        elsewhere = {id(param) for module in [*no_layers, *filter(None, heads)] for param in module.parameters()}
        trainable = [param for param in model.parameters() if param.requires_grad]
        # Position embeddings and class tokens are [1, n, columns].
        matrices = [param for param in trainable if param.ndim == 2 or param.ndim > 2 and param.shape[0] > 1]
        matrices = [param for param in matrices if id(param) not in elsewhere]
        chosen = {id(param) for param in matrices}
        rest: dict[str, Any] = {
            "params": [param for param in trainable if id(param) not in chosen],
            "algorithm": "adamw",
        }
        groups = [group for group in ({"params": matrices}, rest) if group["params"]]
        return cls(groups, lr, weight_decay, **({"adjust_lr_fn": "match_rms_adamw"} | settings))

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch's optimizers name what a copy and a pickle take with them, and leave out attributes of a subclass.
        return super().__getstate__() | {
            "_muon_defaults": self._muon_defaults,
            "_adamw": self._adamw,
            "received": self.received,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the defaults of its algorithm."""
        algorithm = param_group.get("algorithm", "muon")
        if algorithm not in ("muon", "adamw"):
            raise ValueError(f'expected "muon" or "adamw" as the algorithm of a group, got {algorithm!r}')
        adamw = {name: value for name, value in self._adamw.defaults.items() if name not in ("lr", "weight_decay")}
        super().add_param_group((adamw if algorithm == "adamw" else self._muon_defaults) | param_group)
        if algorithm == "muon":
            group = self.param_groups[-1]
            for param in group["params"]:
                _check(param)
            settings = {name: group[name] for name in self._muon_defaults if name != "algorithm"}
            # It refuses what it refuses for itself: an unknown ``adjust_lr_fn`` would leave updates unadjusted.
            torch.optim.Muon([torch.zeros(1, 1)], group["lr"], group["weight_decay"], **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step. Call it on all ranks: matrices travel between them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.received.clear()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._step_matrices(group)
        self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        self._adamw.state = self.state
        if self._adamw.param_groups:
            # PyTorch's hooks run around this step, and not once more around its part. They would take the matrices, which have
            # just changed, for edited by something that is no optimizer, and with deltas whole weights would cross.
            torch.optim.AdamW.step.__wrapped__(self._adamw)  # type: ignore[attr-defined]
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group that have a gradient. A matrix must have one on all ranks or on none."""

        def orthogonalize(stack: torch.Tensor) -> torch.Tensor:
            arguments = group["ns_coefficients"], group["ns_steps"], group["eps"]
            matrices = stack.reshape(-1, *stack.shape[-2:])
            return torch.stack([_zeropower_via_newtonschulz(matrix, *arguments) for matrix in matrices]).view(
                stack.shape
            )

        by_group: dict[dist.ProcessGroup | None, list[_Sharded]] = defaultdict(list)
        for param in group["params"]:
            if param.grad is not None:
                _check(param)
                sharded = _Sharded(param, *_sharding_of(param), self._momentum_of(param, group))
                by_group[sharded.group].append(sharded)
        lr = float(group["lr"])
        for process_group, sharded_params in by_group.items():
            for (param, *_), update in _orthogonalized(sharded_params, process_group, orthogonalize, self.received):
                adjusted = _adjust_lr(lr, group["adjust_lr_fn"], param.shape[-2:])
                # The weight is written as the tensor that FSDP2 knows: writes to its local part would move another counter.
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(with_local_part(param, update), alpha=-adjusted)

    def _momentum_of(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Add the gradient to the momentum, and return this rank's part of what is to be orthogonalized, in bf16."""
        assert param.grad is not None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        gradient, momentum = local_part(param.grad), local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        # A copy: Newton-Schulz writes to what it is given.
        return (gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).to(
            torch.bfloat16, copy=True
        )


def warn_of_gathers(optimizer: torch.optim.Optimizer) -> None:
    """Tell a user, on rank 0, of an optimizer whose class is known to gather sharded matrices in each step."""
    name, module = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    is_known = any(word in name.casefold() for word in _OF_WHOLE_MATRICES) and not isinstance(optimizer, Muon)
    if is_known and dist.get_rank() == 0:
        logger.warning(
            "%s of %s computes with whole matrices, which are sharded here: it gathers them over all ranks in each step, by "
            "collectives of its own. torch.optim.Muon sends 24 times the bytes of a step with AdamW "
            "(scripts/results/optimizers.md). For Muon use hf_zeropp.Muon, which computes the same and sends 2.2 times.",
            name,
            module,
        )


class _Sharded(NamedTuple):
    """A parameter, the dimension that is sharded and the ranks over which, None for whole matrices, and the rank's update."""

    param: torch.Tensor
    dim: int | None
    group: dist.ProcessGroup | None
    update: torch.Tensor


def _orthogonalized(
    params: Sequence[_Sharded], group: dist.ProcessGroup | None, orthogonalize: Orthogonalize, received: Counter[int]
) -> Iterator[tuple[_Sharded, torch.Tensor]]:
    """Yield each parameter with this rank's part of its orthogonalized update.

    A rank owns one matrix of each round, and at most one of the last. While ranks compute, the matrices of the next round travel
    in, and those of the round before travel back.
    """
    if group is None:
        yield from (
            (sharded, orthogonalize(sharded.update) if sharded.update.numel() else sharded.update) for sharded in params
        )
        return
    # Matrices of a round are of similar size. In every other round the ranks take them from behind, so that no rank has the
    # largest of all rounds. All ranks find the same order: sizes are those of whole matrices, and equals stay as they stood.
    in_order = sorted(params, key=lambda sharded: -sharded.param.numel())
    rounds = [in_order[start : start + group.size()] for start in range(0, len(in_order), group.size())]
    travelling = [_Round(matrices, group, received, from_behind=False) for matrices in rounds[:1]]
    returning: list[_Round] = []
    for number in range(len(rounds)):
        here = travelling.pop()
        if number + 1 < len(rounds):
            travelling.append(_Round(rounds[number + 1], group, received, from_behind=number % 2 == 0))
        here.send_back(orthogonalize)
        for done in returning:
            yield from done.received()
        returning = [here]
    yield from itertools.chain.from_iterable(done.received() for done in returning)


class _Round:
    """At most one matrix for each rank of a group, on their way to their owners and back.

    Args:
        params: the matrices. The first belongs to rank 0, or to the last rank where ``from_behind``.
        group: the ranks.
        received: to which the bytes are added, by the rank of the world that sent them.
        from_behind: as above.
    """

    def __init__(
        self, params: Sequence[_Sharded], group: dist.ProcessGroup, received: Counter[int], *, from_behind: bool
    ) -> None:
        self._group = group
        self._received = received
        owners = [group.size() - 1 - place if from_behind else place for place in range(len(params))]
        self._by_owner = [sharded for _, sharded in sorted(zip(owners, params, strict=True), key=lambda pair: pair[0])]
        self._to_owners = [0] * group.size()
        for owner, sharded in zip(owners, params, strict=True):
            self._to_owners[owner] = sharded.update.numel()
        self._own = next((p for owner, p in zip(owners, params, strict=True) if owner == dist.get_rank(group)), None)
        self._shapes = [] if self._own is None else _shapes_of_parts(self._own, group.size())
        self._from_ranks = [shape.numel() for shape in self._shapes] or [0] * group.size()
        wire = torch.cat([sharded.update.flatten() for sharded in self._by_owner])
        self._parts = wire.new_empty(sum(self._from_ranks))
        self._work = self._exchange(self._parts, wire, self._from_ranks, self._to_owners)

    def send_back(self, orthogonalize: Orthogonalize) -> None:
        """Wait for this rank's matrix, orthogonalize it, and start to send its parts back."""
        self._work.wait()
        if self._own is not None:
            assert self._own.dim is not None
            parts = self._parts.split(self._from_ranks)
            matrix = torch.cat(
                [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)], self._own.dim
            )
            sizes = [shape[self._own.dim] for shape in self._shapes]
            self._parts = torch.cat([part.flatten() for part in orthogonalize(matrix).split(sizes, self._own.dim)])
        self._results = self._parts.new_empty(sum(self._to_owners))
        self._work = self._exchange(self._results, self._parts, self._to_owners, self._from_ranks)

    def received(self) -> Iterator[tuple[_Sharded, torch.Tensor]]:
        """Wait for the results of all matrices, and yield this rank's part of each."""
        self._work.wait()
        parts = self._results.split([sharded.update.numel() for sharded in self._by_owner])
        for sharded, part in zip(self._by_owner, parts, strict=True):
            yield sharded, part.view(sharded.update.shape)

    def _exchange(
        self, output: torch.Tensor, wire: torch.Tensor, output_sizes: list[int], sizes: list[int]
    ) -> dist.Work:
        work = dist.all_to_all_single(output, wire, output_sizes, sizes, group=self._group, async_op=True)
        assert work is not None  # every rank is a member of the group over which its parameters are sharded
        for rank, size in zip(dist.get_process_group_ranks(self._group), output_sizes, strict=True):
            self._received[rank] += size * output.element_size()
        return work


def _shapes_of_parts(sharded: _Sharded, num_ranks: int) -> list[torch.Size]:
    """Return the shapes of all ranks' parts: FSDP2 cuts as ``torch.chunk`` does, and what is missing at the end is empty."""
    shape, dim = sharded.param.shape, sharded.dim
    assert dim is not None
    step = -(-shape[dim] // num_ranks)
    sizes = [max(0, min(step, shape[dim] - rank * step)) for rank in range(num_ranks)]
    return [torch.Size((*shape[:dim], size, *shape[dim + 1 :])) for size in sizes]


def _sharding_of(param: torch.Tensor) -> tuple[int | None, dist.ProcessGroup | None]:
    """Return the dimension of a matrix that is sharded, and over which ranks; None where ranks hold whole matrices."""
    for axis, placement in enumerate(param.placements if isinstance(param, DTensor) else ()):
        if placement.is_shard() and placement.dim >= param.ndim - 2:  # type: ignore[attr-defined]
            return placement.dim, param.device_mesh.get_group(axis)  # type: ignore[attr-defined]
    return None, None


def _check(param: torch.Tensor) -> None:
    if param.ndim < 2:
        raise ValueError(
            f"Muon takes matrices, got a parameter of shape {tuple(param.shape)}. Give norms, biases and embeddings to AdamW: "
            '{"params": [...], "algorithm": "adamw"}, or use Muon.of_model(model).'
        )
    # FSDP2's shards of what tensor parallelism cuts along the same dimension are strided, and ``is_shard`` does not name those.
    placements = param.placements if isinstance(param, DTensor) else ()
    dims = [placement.dim for placement in placements if not placement.is_replicate()]  # type: ignore[attr-defined]
    if len(dims) > 1 and max(dims) >= param.ndim - 2:
        raise ValueError(
            f"Muon takes matrices that are sharded along one dimension of the mesh, got {placements}. "
            'Give matrices under tensor parallelism to AdamW: {"params": [...], "algorithm": "adamw"}.'
        )
