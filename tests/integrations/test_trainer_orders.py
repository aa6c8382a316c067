"""Evaluate, predict and train in any order; models sharded at load; compiled models."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from accelerate_runs import handle_of, new_accelerator, train
from harness import run_ranks
from torch.distributed.fsdp import FSDPModule
from trainer_runs import (
    TWO_NODES,
    UNQUANTIZED,
    build_trainer,
    callback_of,
    losses,
    same_weights,
    tiny_model,
    token_data,
    training_arguments,
    weights,
)
from transformers import AutoModelForCausalLM, Trainer
from transformers.distributed import DistributedConfig

from hf_zeropp import ZeroPPCallback
from hf_zeropp.apply import get_handle


def train_only(rank: int, folder: str):
    trainer = build_trainer(folder)
    trainer.train()
    return losses(trainer), weights(trainer)


def use_then_train(rank: int, folder: str, use: str):
    """Evaluate or predict, train, and do it once more. Return what ``train_only`` does, and both losses."""
    trainer = build_trainer(folder)

    def loss() -> float:
        if use == "evaluate":
            return trainer.evaluate()["eval_loss"]
        return trainer.predict(token_data(16, seed=2)).metrics["test_loss"]

    before = loss()
    trainer.train()
    return losses(trainer), weights(trainer), before, loss()


def evaluate_every_step(rank: int, folder: str):
    """A forward between two steps refills secondary shards; the next step must not use them."""
    trainer = build_trainer(folder, eval_strategy="steps", eval_steps=1)
    trainer.train()
    return losses(trainer), weights(trainer)


def local_loss(state: dict[str, np.ndarray]) -> float:
    """The loss of one unsharded model with these weights, on the batches of ``evaluate``."""
    model = tiny_model()
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=False)
    ids = torch.tensor(token_data(16, seed=2)["input_ids"])
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.thorough
def test_evaluation_before_between_and_after_changes_nothing_and_sees_the_weights_of_the_moment(tmp_path):
    expected = run_ranks(train_only, 4, str(tmp_path))
    runs = {use: run_ranks(use_then_train, 4, str(tmp_path), use) for use in ("evaluate", "predict")}
    initial = {name: param.detach().numpy() for name, param in tiny_model().named_parameters()}
    for (_, trained, before, after), *_ in runs.values():
        assert before == pytest.approx(local_loss(initial), rel=2e-3)  # INT8 weights
        assert after == pytest.approx(local_loss(trained), rel=5e-3)
        assert after < 0.95 * before
    for use, ranks in {**runs, "between": run_ranks(evaluate_every_step, 4, str(tmp_path))}.items():
        for (losses_a, weights_a), (losses_b, weights_b, *_) in zip(expected, ranks, strict=True):
            assert losses_a == losses_b, use
            assert same_weights(weights_a, weights_b), use


def reshard(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def train_twice(rank: int, folder: str, zeropp):
    trainer = build_trainer(folder, zeropp, max_steps=3)
    trainer.train()
    first = trainer.evaluate()["eval_loss"]
    if zeropp is False:  # else stock FSDP2 cannot train again: what is unsharded has left the optimizer
        reshard(trainer.model)
    trainer.train()
    return first, trainer.evaluate()["eval_loss"], losses(trainer)


@pytest.mark.thorough
def test_train_evaluate_train(tmp_path):
    stock = run_ranks(train_twice, 4, str(tmp_path), False)[0]
    ours = run_ranks(train_twice, 4, str(tmp_path), TWO_NODES)[0]
    assert ours[0] == pytest.approx(stock[0], rel=0.01)
    assert ours[1] == pytest.approx(stock[1], rel=0.01)
    assert ours[1] < ours[0]


def train_each_of_three(rank: int, folder: str, attach: bool) -> list[tuple[list[float], set[str], bool]]:
    """Build three Trainers before any trains: without ZeRO++, with it, and with other settings.

    Returns:
        Of each the losses, what classes it has sharded, and whether it ran under ZeRO++.
    """
    ZeroPPCallback()  # which lets the first count on CPU
    others = {"fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaMLP"]}}
    plain = Trainer(tiny_model(), training_arguments(folder, None), train_dataset=token_data())
    ours = [build_trainer(folder), build_trainer(folder, False, **others)]
    for trainer in ours if attach else ():
        callback_of(trainer).attach(trainer)
    trained = []
    for trainer in (plain, *ours):
        trainer.train()
        sharded = {type(module).__name__ for module in trainer.model.modules() if isinstance(module, FSDPModule)}
        handle = get_handle(trainer.model)
        trained.append((losses(trainer), sharded, handle is not None and handle.is_active))
    return trained


@pytest.mark.thorough
@pytest.mark.parametrize("attach", [False, True])
def test_a_trainer_keeps_its_settings_when_another_is_built(tmp_path, attach):
    plain, (first, of_first, is_active), (second, of_second, _) = run_ranks(
        train_each_of_three, 4, str(tmp_path), attach
    )[0]
    assert "FSDPLlamaMLP" not in of_first and "FSDPLlamaDecoderLayer" in of_first and is_active
    assert "FSDPLlamaMLP" in of_second and "FSDPLlamaDecoderLayer" not in of_second
    assert first == run_ranks(train_only, 4, str(tmp_path))[0][0]
    assert second == pytest.approx(first, rel=0.01) and second != first
    assert plain[0] == pytest.approx(second, rel=1e-5) and plain[1:] == (of_first, False)


def train_by_accelerate(rank: int, saved: str) -> dict[str, list[float]]:
    """Train a model that was sharded at load through Accelerate, with ZeRO++ and on stock FSDP2, in two ways."""
    found = {}
    kinds = {"ours": (TWO_NODES, "1"), "exact": (TWO_NODES | UNQUANTIZED, "1"), "off": (TWO_NODES, "0")}
    for name, (zeropp, switch) in {"stock": (False, "1"), **kinds}.items():
        with mock.patch.dict("os.environ", {"ZEROPP_ENABLED": switch}):
            accelerator = new_accelerator(zeropp)
        model = AutoModelForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(fsdp_size=4))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        found[name] = train(accelerator, model, optimizer, rank, range(3))
        assert (handle_of(accelerator, model) is None) == (name in ("stock", "off"))
    return found


@pytest.mark.thorough
def test_model_sharded_at_load_through_accelerate(tmp_path):
    saved = str(tmp_path / "model")
    tiny_model().save_pretrained(saved)
    found = run_ranks(train_by_accelerate, 4, saved, init=False)[0]
    assert found["off"] == found["stock"]
    assert found["exact"] == pytest.approx(found["stock"], rel=1e-5)
    assert found["ours"] == pytest.approx(found["stock"], rel=0.01) and found["ours"] != found["stock"]


def train_compiled(rank: int, folder: str, zeropp):
    trainer = build_trainer(folder, zeropp, torch_compile=True, torch_compile_backend="eager", max_steps=3)
    trainer.train()
    handle = callback_of(trainer).handle
    return losses(trainer), trainer.evaluate()["eval_loss"], handle and handle.traffic.steps


def train_each_compiled(rank: int, folder: str, *settings) -> list[tuple]:
    return [train_compiled(rank, folder, zeropp) for zeropp in settings]


@pytest.mark.thorough
def test_torch_compile(tmp_path):
    settings = (False, TWO_NODES | UNQUANTIZED, TWO_NODES)
    stock, exact, ours = run_ranks(train_each_compiled, 4, str(tmp_path), *settings)[0]
    assert exact[0] == pytest.approx(stock[0], rel=1e-4)
    assert ours[0] == pytest.approx(stock[0], rel=0.01)
    assert ours[1] == pytest.approx(stock[1], rel=0.01)
    assert ours[2] == 3
