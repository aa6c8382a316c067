"""The modes in which each family is tried: training and generation on 4 ranks (2 nodes), and the same without sharding.

The yardstick of every mode is the unsharded model. Each rank holds a copy, computes its own batch, and averages gradients with
the other ranks, which is data parallelism at its simplest.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import Accelerator
from families import KINDS, Family
from frozen_runs import UNQUANTIZED, trainable
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from hf_zeropp import ZeroPPPlugin, quantize_frozen

WORLD = 4
STEPS = 3
NEW_TOKENS = 3
TARGETS = {
    "mamba": ["in_proj", "x_proj"],
    "falcon_mamba": ["in_proj", "x_proj"],
    "mamba2": ["in_proj"],
    "nemotron_h": ["in_proj", "q_proj", "up_proj", "down_proj"],
    "falcon_h1": ["in_proj", "q_proj", "gate_proj", "down_proj"],
}
"""The layers with adapters, where they are not all linear ones."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to use a model.

    Attributes:
        zeropp: the settings; False for FSDP2 as it is.
        lora: whether adapters on all linear layers are trained, or else the whole model.
        lr: learning rate of SGD.
        tolerance: how far a loss may be from the unsharded model's, relative to it where it is over 1.
        update_tolerance: how far the change of the trained parameters may be from the unsharded model's change, relative to it.
            A model that never learned is 1 away, whatever its losses are.
    """

    zeropp: dict[str, Any] | bool
    lora: bool = False
    lr: float = 0.02
    tolerance: float = 2e-4
    update_tolerance: float = 0.02

    @property
    def bits(self) -> int | None:
        """Bits of frozen weights."""
        return self.zeropp.get("frozen_bits") if isinstance(self.zeropp, dict) else None


MODES = {
    "stock": Mode(False),
    "unquantized": Mode(UNQUANTIZED),
    "default": Mode({}, tolerance=0.02, update_tolerance=0.3),
    "stock LoRA": Mode(False, lora=True, lr=0.1),
    "LoRA 16 bit": Mode(UNQUANTIZED, lora=True, lr=0.1),
    "LoRA 4 bit": Mode({**UNQUANTIZED, "frozen_bits": 4}, lora=True, lr=0.1),
}
GENERATING_MODES = {
    "generate": Mode(UNQUANTIZED, tolerance=1e-3),
    "generate LoRA 4 bit": Mode({**UNQUANTIZED, "frozen_bits": 4}, lora=True, tolerance=1e-3),
    "generate LoRA INT8": Mode({"frozen_bits": 4}, lora=True, tolerance=0.25),
}
"""``tolerance`` is how far a logit may be from the unsharded model's, in standard deviations of its logits."""
MAY_DIFFER = "generate LoRA INT8"
"""Adapters are gathered in INT8 here, and the token with the largest logit may be another one."""
ALL_MODES = (*MODES, *GENERATING_MODES)
GENERATING_KINDS = ("causal", "encoder-decoder", "speech", "multimodal")


@dataclasses.dataclass
class Outcome:
    """The result of one family in one mode.

    Attributes:
        error: the exception's type and message; empty where there was none.
        gap: the largest difference of a loss to the unsharded model's; for generation of a logit, in standard deviations.
        num_other_tokens: tokens of all ranks that differ from those that the unsharded model generates.
        trace: where the exception came from.
    """

    error: str = ""
    gap: float = float("nan")
    num_other_tokens: int = 0
    trace: str = ""

    def is_ok(self, mode: str) -> bool:
        """Whether the mode works."""
        is_same = mode == MAY_DIFFER or not self.num_other_tokens
        return not self.error and is_same and self.gap <= (MODES | GENERATING_MODES)[mode].tolerance


def run_mode(rank: int, family: Family, mode: str) -> Outcome:
    """Use the family's model in one way. Ranks call it."""
    if mode in GENERATING_MODES:
        return _generate(family, GENERATING_MODES[mode])
    return Outcome(gap=_train(rank, family, MODES[mode]))


def _models(family: Family, way: Mode) -> tuple[nn.Module, nn.Module]:
    """Return a model to shard, and the unsharded one to compare with."""
    model = _with_adapter(family) if way.lora else family.model()
    reference = copy.deepcopy(model)
    return model, quantize_frozen(reference, way.bits) if way.bits else reference


def _train(rank: int, family: Family, way: Mode) -> float:
    """Return the largest difference of a loss."""
    model, reference = _models(family, way)
    batches = [family.inputs(model, seed=10 * step + rank) for step in range(STEPS)]
    before = [param.detach().clone() for param in trainable(reference)]
    expected = list(_train_unsharded(reference, batches, way.lr))
    losses, trained = _train_sharded(model, batches, way)
    assert all(loss == loss for loss in expected), f"the unsharded model's losses are {expected}"
    gaps = torch.tensor(
        [abs(ours - theirs) / max(1, abs(theirs)) for ours, theirs in zip(losses, expected, strict=True)]
    )
    dist.all_reduce(gaps, dist.ReduceOp.MAX)
    distance = _distance_of_updates(before, trainable(reference), trained)
    assert distance <= way.update_tolerance, f"the steps change parameters by {distance:.1e} otherwise than unsharded"
    return gaps.max().item()


def _distance_of_updates(
    before: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]
) -> float:
    """Return the length of the difference between two changes of the parameters, relative to the expected change's."""
    difference = sum((ours - theirs).square().sum() for ours, theirs in zip(trained, expected, strict=True))
    change = sum((theirs - start).square().sum() for theirs, start in zip(expected, before, strict=True))
    return (difference / change).sqrt().item()


def _with_adapter(family: Family) -> nn.Module:
    model = family.model()
    torch.manual_seed(1)
    # PEFT refuses to adapt a projection that Mamba's kernel multiplies by itself.
    targets = "all-linear" if family.name not in TARGETS else TARGETS[family.name]
    settings = {"r": 4, "target_modules": targets, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**settings, task_type=KINDS[family.kind].task))


def _train_unsharded(model: nn.Module, batches: list[dict[str, torch.Tensor]], lr: float) -> Iterator[float]:
    params = trainable(model)
    optimizer = torch.optim.SGD(params, lr)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        for param in params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _prepare(model: nn.Module, zeropp: Any, lr: float) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    settings = {"ranks_per_node": 2, **zeropp} if isinstance(zeropp, dict) else zeropp
    accelerator = Accelerator(fsdp_plugin=ZeroPPPlugin(zeropp=settings))
    optimizer = torch.optim.SGD(trainable(model), lr)
    return accelerator, *accelerator.prepare(model, optimizer)


def _train_sharded(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], way: Mode
) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses, and the trained parameters as they are at the end."""
    accelerator, model, optimizer = _prepare(model, way.zeropp, way.lr)
    check_meshes(model)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [cast(DTensor, param.detach()).full_tensor() for param in trainable(model)]


def check_meshes(model: nn.Module) -> None:
    """Check that trainable parameters, and no others under ZeRO++, are sharded over the whole world."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is not sharded"
        assert param.device_mesh.size() == WORLD or not param.requires_grad, (
            f"{name} is trainable, and stays in its node"
        )


def _generate(family: Family, way: Mode) -> Outcome:
    model, reference = _models(family, way)
    inputs = {name: value for name, value in family.inputs(model, seed=5).items() if name != "labels"}
    generate: Callable[[nn.Module], Any] = lambda model: model.eval().generate(  # noqa: E731
        **inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = generate(reference)
    _, model, _ = _prepare(model, way.zeropp, 0.1)
    found = generate(model)
    # A sequence goes another way after the first token that differs, so its later logits have nothing to be compared with.
    is_other = found.sequences[:, -NEW_TOKENS:] != expected.sequences[:, -NEW_TOKENS:]
    is_comparable = torch.cat([torch.zeros_like(is_other[:, :1]), is_other.cumsum(1)[:, :-1]], 1) == 0
    gaps = [
        ((ours - theirs).abs().amax(1) / theirs.std(1))[is_comparable[:, step]].max()
        for step, (ours, theirs) in enumerate(zip(found.logits, expected.logits, strict=True))
        if is_comparable[:, step].any()
    ]
    num_other = is_other.sum()
    dist.all_reduce(num_other)
    return Outcome(gap=max(gaps).item(), num_other_tokens=num_other.item())
