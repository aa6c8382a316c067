"""ZeroPPCallback under transformers' Trainer: losses, bytes, schedule, logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from harness import each_refusal, run_ranks
from trainer_runs import (
    TWO_NODES,
    build_trainer,
    callback_of,
    logged,
    losses,
    num_fsdp2_gathers,
    same_weights,
    tiny_model,
    token_data,
    training_arguments,
    weights,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_zeropp import ZeroPPConfig, get_handle, traffic
from hf_zeropp.integrations.launch.unmodified import put_in_force
from hf_zeropp.integrations.step_log import CROSS_NODE, INTRA_NODE, SAVING
from hf_zeropp.integrations.trainer import ZeroPPCallback


def train(rank: int, folder: str, zeropp, arguments: dict):
    """Losses; per step and node in bytes: logged, counted, predicted; and units left to FSDP2."""
    trainer = build_trainer(folder, zeropp, **arguments)
    trainer.train()
    handle = callback_of(trainer).handle
    if handle is None:
        return losses(trainer), None
    node, steps = handle.topology.ranks_per_node, handle.traffic.steps
    predicted = traffic.total(handle.predict(trainer.args.gradient_accumulation_steps).values())
    return losses(trainer), {
        "logged": [1e9 * value for value in logged(trainer, CROSS_NODE)],
        "logged_intra": [1e9 * value for value in logged(trainer, INTRA_NODE)],
        "counted": handle.traffic.cross_node_bytes / steps,
        "counted_intra": handle.traffic.intra_node_bytes / steps,
        "predicted": node * predicted.cross_node,
        "predicted_intra": node * predicted.intra_node,
        "fsdp2_gathers": num_fsdp2_gathers(trainer.model),
        "savings": logged(trainer, SAVING),
    }


VARIANTS = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16, checkpointing, no clipping": {"bf16": True, "gradient_checkpointing": True, "max_grad_norm": 0.0},
}


@pytest.mark.thorough("bf16*")
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS.keys())
def test_losses_follow_stock_and_bytes_follow_the_prediction(tmp_path, arguments):
    stock, _ = run_ranks(train, 4, str(tmp_path), False, arguments)[0]
    ours, bytes_ = run_ranks(train, 4, str(tmp_path), TWO_NODES, arguments)[0]
    assert ours == pytest.approx(stock, rel=0.01)
    assert bytes_["fsdp2_gathers"] == 0
    for suffix in ("", "_intra"):
        mean = sum(bytes_[f"logged{suffix}"]) / len(bytes_[f"logged{suffix}"])
        assert mean == pytest.approx(bytes_[f"counted{suffix}"])
    assert bytes_["counted"] == pytest.approx(bytes_["predicted"], rel=0.04)
    assert all(saving > 3 for saving in bytes_["savings"])


def train_with_weights_that_stay(rank: int, folder: str):
    """Return losses, weights, calls of gathers within the node, and the number of units, without weights that stay and with."""
    return [train_and_count_gathers(folder, stays) for stays in (False, True)]


def train_and_count_gathers(folder: str, stays: bool) -> tuple:
    settings = TWO_NODES | {"qgz_accumulate": "rank"}
    config = {"reshard_after_forward": not stays}
    trainer = build_trainer(folder, settings, fsdp_config=config, max_steps=3, gradient_accumulation_steps=2)
    trainer.train()
    handle = callback_of(trainer).handle
    return losses(trainer), weights(trainer), handle.traffic.counts[traffic.GATHER_NODE].calls, len(handle.gathers)


@pytest.mark.thorough
def test_weights_that_stay_are_gathered_once_a_step(tmp_path):
    for each_time, once in run_ranks(train_with_weights_that_stay, 4, str(tmp_path)):
        (losses_a, weights_a, calls_a, _), (losses_b, weights_b, calls_b, num_units) = each_time, once
        assert losses_a == losses_b and same_weights(weights_a, weights_b)
        assert calls_b == 3 * num_units < calls_a


@pytest.mark.thorough
def test_schedule_changes_the_bytes_at_half_the_steps(tmp_path):
    _, bytes_ = run_ranks(train, 4, str(tmp_path), TWO_NODES | {"qgz_until": 0.5}, {"max_steps": 8})[0]
    _, quantized = run_ranks(train, 4, str(tmp_path), TWO_NODES, {"max_steps": 1})[0]
    assert bytes_["logged"][:4] == pytest.approx([quantized["predicted"]] * 4, rel=0.04)
    assert bytes_["logged"][4:] == pytest.approx([bytes_["predicted"]] * 4, rel=0.04)  # of the phase that is on
    assert bytes_["logged"][4] > 1.5 * bytes_["logged"][3]


def train_in_one_node(rank: int, folder: str):
    trainer = build_trainer(folder, {"ranks_per_node": 2}, max_steps=2)
    trainer.train()
    return logged(trainer, CROSS_NODE)


def test_one_node_trains_on_fsdp2_and_logs_nothing(tmp_path):
    assert run_ranks(train_in_one_node, 2, str(tmp_path))[0] == []


def settings_of_other_forms(rank: int, folder: str, path: str):
    """Return settings that were given as an object, as a tracker writes them in JSON, and settings that a file names."""
    trainer = build_trainer(folder, ZeroPPConfig(**TWO_NODES), max_steps=1)
    written = json.loads(trainer.args.to_json_string())["fsdp_config"]["zeropp"]
    trainer = build_trainer(folder, fsdp=True, fsdp_config=None, max_steps=1)
    trainer.args.fsdp_config["zeropp"] = path
    callback = callback_of(trainer)
    callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    return written, callback._plugin.zeropp.to_dict()


@pytest.mark.thorough
def test_settings_may_be_an_object_or_stand_in_a_file(tmp_path):
    path = tmp_path / "zeropp.json"
    path.write_text(json.dumps({"qwz_bits": 4, "ranks_per_node": 2}))
    written, settings = run_ranks(settings_of_other_forms, 2, str(tmp_path), str(path))[0]
    assert ZeroPPConfig.from_dict(written) == ZeroPPConfig(**TWO_NODES)
    assert (settings["qwz_bits"], settings["ranks_per_node"]) == (4, 2)


def refuse_what_would_have_no_effect(rank: int, folder: str) -> None:
    def trainer_of(args: TrainingArguments, *callbacks: TrainerCallback) -> Trainer:
        AcceleratorState._reset_state(reset_partial_state=False)
        return Trainer(tiny_model(), args, train_dataset=token_data(), callbacks=[*callbacks])

    def build(**arguments: Any) -> Callable[[], Trainer]:
        return lambda: trainer_of(training_arguments(folder, **arguments), ZeroPPCallback())

    def beside_deepspeed() -> None:
        args = training_arguments(folder)
        args.deepspeed = "zero3.json"
        trainer_of(args, ZeroPPCallback())

    def added_late() -> None:
        trainer = build()()
        trainer.add_callback(ZeroPPCallback())
        trainer.train()

    def without_callback() -> None:
        put_in_force()
        trainer_of(training_arguments(folder, None, fsdp_config={"zero_pp": {"preset": "exact"}}))

    each_refusal(
        {
            "needs a model sharded by FSDP2, got fsdp=None": build(fsdp=None, fsdp_config=None),
            "expected fsdp_version=2, got 1": build(fsdp_config={"version": 1, "sync_module_states": False}),
            "ZeroPPCallback and DeepSpeed exclude each other": beside_deepspeed,
            "unknown key 'zeropp_config' in fsdp_config": build(fsdp_config={"zeropp_config": {"preset": "exact"}}),
            "'qwz_bits' stands in fsdp_config": build(fsdp_config={"qwz_bits": 4}),
            "must be there when the Trainer is built": added_late,
            "not passed to that trainer": lambda: ZeroPPCallback().attach(build()()),
            "unknown key 'zero_pp' in fsdp_config": without_callback,
        }
    )


def test_what_would_have_no_effect_is_refused(tmp_path):
    run_ranks(refuse_what_would_have_no_effect, 2, str(tmp_path))


def settings_without_callback(rank: int, folder: str, first_has_one: bool):
    """Losses, and the node's bytes per step as logged and as predicted, of the second Trainer with the same arguments."""
    put_in_force()  # as hf-zeropp launch does
    args = training_arguments(folder, max_steps=2)
    callbacks = [ZeroPPCallback()] if first_has_one else []
    first = Trainer(tiny_model(), args, train_dataset=token_data(), callbacks=callbacks)
    first.train()
    trainer = Trainer(tiny_model(), args, train_dataset=token_data())
    trainer.train()
    predicted = traffic.total(get_handle(trainer.model).predict().values())
    return losses(trainer), [1e9 * each for each in logged(trainer, CROSS_NODE)], 2 * predicted.cross_node


@pytest.mark.thorough
@pytest.mark.parametrize("first_has_one", [False, True])
def test_settings_take_effect_without_a_callback(tmp_path, first_has_one):
    ours, bytes_, predicted = run_ranks(settings_without_callback, 4, str(tmp_path), first_has_one)[0]
    with_callback, _ = run_ranks(train, 4, str(tmp_path), TWO_NODES, {"max_steps": 2})[0]
    assert ours == with_callback and bytes_ == pytest.approx([predicted] * 2, rel=0.04)
