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


def local_loss(state: dict[str, np.ndarray]) -> float:
    """The loss of one unsharded model with these weights, on the batches of ``evaluate``."""
    model = tiny_model()
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=False)
    ids = torch.tensor(token_data(16, seed=2)["input_ids"])
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def evaluate_and_train(rank: int, folder: str) -> None:
    """Evaluate or predict, train, and do it once more. A forward between two steps refills secondary shards, too."""
    alone = build_trainer(folder)
    alone.train()
    every_step = build_trainer(folder, eval_strategy="steps", eval_steps=1)
    every_step.train()
    assert losses(every_step) == losses(alone) and same_weights(weights(every_step), weights(alone))
    initial = {name: param.detach().numpy() for name, param in tiny_model().named_parameters()}
    for use in ("evaluate", "predict"):
        trainer = build_trainer(folder)

        def loss(trainer=trainer, use=use) -> float:
            if use == "evaluate":
                return trainer.evaluate()["eval_loss"]
            return trainer.predict(token_data(16, seed=2)).metrics["test_loss"]

        before = loss()
        trainer.train()
        assert losses(trainer) == losses(alone) and same_weights(weights(trainer), weights(alone))
        after = loss()
        assert before == pytest.approx(local_loss(initial), rel=2e-3)  # INT8 weights
        assert after == pytest.approx(local_loss(weights(trainer)), rel=5e-3)
        assert after < 0.95 * before


@pytest.mark.thorough
def test_evaluation_before_between_and_after_changes_nothing_and_sees_the_weights_of_the_moment(tmp_path):
    run_ranks(evaluate_and_train, 4, str(tmp_path))


def train_twice(rank: int, folder: str) -> None:
    """Stock FSDP2 cannot train again without a reshard: what the evaluation left unsharded has left the optimizer."""
    found = []
    for zeropp in (False, TWO_NODES):
        trainer = build_trainer(folder, zeropp, max_steps=3)
        trainer.train()
        first = trainer.evaluate()["eval_loss"]
        for module in trainer.model.modules() if zeropp is False else ():
            if isinstance(module, FSDPModule):
                module.reshard()
        trainer.train()
        found.append((first, trainer.evaluate()["eval_loss"]))
    stock, ours = found
    assert ours == pytest.approx(stock, rel=0.01) and ours[1] < ours[0]


@pytest.mark.thorough
def test_train_evaluate_train(tmp_path):
    run_ranks(train_twice, 4, str(tmp_path))


def train_each_of_three(rank: int, folder: str) -> None:
    """Build three Trainers before any trains: without ZeRO++, with it, and with other settings."""
    ZeroPPCallback()  # which lets the first count on CPU
    others = {"fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaMLP"]}}
    alone = build_trainer(folder)
    alone.train()
    for attaches in (False, True):
        plain = Trainer(tiny_model(), training_arguments(folder, None), train_dataset=token_data())
        ours = [build_trainer(folder), build_trainer(folder, False, **others)]
        for trainer in ours if attaches else ():
            callback_of(trainer).attach(trainer)
        found = []
        for trainer in (plain, *ours):
            trainer.train()
            sharded = {type(module).__name__ for module in trainer.model.modules() if isinstance(module, FSDPModule)}
            handle = get_handle(trainer.model)
            found.append((sharded & {"FSDPLlamaMLP", "FSDPLlamaDecoderLayer"}, handle is not None and handle.is_active))
        assert found == [
            ({"FSDPLlamaDecoderLayer"}, False),
            ({"FSDPLlamaDecoderLayer"}, True),
            ({"FSDPLlamaMLP"}, False),
        ]
        stock, first, second = map(losses, (plain, *ours))
        assert first == losses(alone)
        assert second == pytest.approx(first, rel=0.01) and second != first
        assert stock == pytest.approx(second, rel=1e-5)


@pytest.mark.thorough
def test_a_trainer_keeps_its_settings_when_another_is_built(tmp_path):
    run_ranks(train_each_of_three, 4, str(tmp_path))


def train_by_accelerate(rank: int, saved: str) -> None:
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
    assert found["off"] == found["stock"]
    assert found["exact"] == pytest.approx(found["stock"], rel=1e-5)
    assert found["ours"] == pytest.approx(found["stock"], rel=0.01) and found["ours"] != found["stock"]


@pytest.mark.thorough
def test_model_sharded_at_load_through_accelerate(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    run_ranks(train_by_accelerate, 4, str(tmp_path), init=False)


def train_compiled(rank: int, folder: str) -> None:
    found = []
    for zeropp in (False, TWO_NODES | UNQUANTIZED, TWO_NODES):
        trainer = build_trainer(folder, zeropp, torch_compile=True, torch_compile_backend="eager", max_steps=3)
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    stock, exact, ours = found
    assert exact == pytest.approx(stock, rel=1e-4)
    assert ours == pytest.approx(stock, rel=0.01)
    assert callback_of(trainer).handle.traffic.steps == 3


@pytest.mark.thorough
def test_torch_compile(tmp_path):
    run_ranks(train_compiled, 4, str(tmp_path))
