"""ZeroPPCallback under transformers' Trainer: losses, bytes, schedule, logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
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


def trained(folder: str, zeropp, **arguments) -> Trainer:
    trainer = build_trainer(folder, zeropp, **arguments)
    trainer.train()
    return trainer


def predicted_bytes(trainer: Trainer) -> float:
    """Return the bytes that this node is predicted to receive from other nodes in a step."""
    handle = callback_of(trainer).handle
    predicted = traffic.total(handle.predict(trainer.args.gradient_accumulation_steps).values())
    return handle.topology.ranks_per_node * predicted.cross_node


def logged_bytes(trainer: Trainer, key: str = CROSS_NODE) -> list[float]:
    return [1e9 * gigabytes for gigabytes in logged(trainer, key)]


VARIANTS = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16, checkpointing, no clipping": {"bf16": True, "gradient_checkpointing": True, "max_grad_norm": 0.0},
}


def train_beside_stock(rank: int, folder: str, arguments: dict) -> None:
    stock, ours = (trained(folder, zeropp, **arguments) for zeropp in (False, TWO_NODES))
    assert losses(ours) == pytest.approx(losses(stock), rel=0.01)
    assert num_fsdp2_gathers(ours.model) == 0
    counts = callback_of(ours).handle.traffic
    across, within = logged_bytes(ours), logged_bytes(ours, INTRA_NODE)
    assert sum(across) / len(across) == pytest.approx(counts.cross_node_bytes / counts.steps)
    assert sum(within) / len(within) == pytest.approx(counts.intra_node_bytes / counts.steps)
    assert counts.cross_node_bytes / counts.steps == pytest.approx(predicted_bytes(ours), rel=0.04)
    assert all(saving > 3 for saving in logged(ours, SAVING))


@pytest.mark.thorough("bf16*")
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS.keys())
def test_losses_follow_stock_and_bytes_follow_the_prediction(tmp_path, arguments):
    run_ranks(train_beside_stock, 4, str(tmp_path), arguments)


def train_with_weights_that_stay(rank: int, folder: str) -> None:
    """Weights that stay change no bit, and are gathered once a step, by this package's setting and by FSDP2's own."""
    found, calls = [], []
    for where, reshards in (("rank", True), ("rank", False), ("whole", True)):
        settings, config = TWO_NODES | {"qgz_accumulate": where}, {"reshard_after_forward": reshards}
        trainer = trained(folder, settings, fsdp_config=config, max_steps=3, gradient_accumulation_steps=2)
        found.append((losses(trainer), weights(trainer)))
        handle = callback_of(trainer).handle
        calls.append(handle.traffic.counts[traffic.GATHER_NODE].calls)
    for stayed in found[1:]:
        assert found[0][0] == stayed[0] and same_weights(found[0][1], stayed[1])
    assert calls[1] == calls[2] == 3 * len(handle.gathers) < calls[0]


@pytest.mark.thorough
def test_weights_that_stay_are_gathered_once_a_step(tmp_path):
    run_ranks(train_with_weights_that_stay, 4, str(tmp_path))


def train_to_exact_gradients(rank: int, folder: str) -> None:
    in_two_phases = trained(folder, TWO_NODES | {"qgz_until": 0.5}, max_steps=8)
    quantized = trained(folder, TWO_NODES, max_steps=1)
    across = logged_bytes(in_two_phases)
    assert across[:4] == pytest.approx([predicted_bytes(quantized)] * 4, rel=0.04)
    assert across[4:] == pytest.approx([predicted_bytes(in_two_phases)] * 4, rel=0.04)  # of the phase that is on
    assert across[4] > 1.5 * across[3]


@pytest.mark.thorough
def test_schedule_changes_the_bytes_at_half_the_steps(tmp_path):
    run_ranks(train_to_exact_gradients, 4, str(tmp_path))


def train_in_one_node(rank: int, folder: str) -> None:
    assert logged(trained(folder, {"ranks_per_node": 2}, max_steps=2), CROSS_NODE) == []


def test_one_node_trains_on_fsdp2_and_logs_nothing(tmp_path):
    run_ranks(train_in_one_node, 2, str(tmp_path))


def settings_of_other_forms(rank: int, folder: str) -> None:
    """Settings may be an object, as a tracker writes them in JSON, or stand in a file."""
    trainer = build_trainer(folder, ZeroPPConfig(**TWO_NODES), max_steps=1)
    written = json.loads(trainer.args.to_json_string())["fsdp_config"]["zeropp"]
    assert ZeroPPConfig.from_dict(written) == ZeroPPConfig(**TWO_NODES)
    path = Path(folder) / f"zeropp_{rank}.json"
    path.write_text(json.dumps({"qwz_bits": 4, "ranks_per_node": 2}))
    trainer = build_trainer(folder, fsdp=True, fsdp_config=None, max_steps=1)
    trainer.args.fsdp_config["zeropp"] = str(path)
    callback = callback_of(trainer)
    callback.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert (callback._plugin.zeropp.qwz_bits, callback._plugin.zeropp.ranks_per_node) == (4, 2)


@pytest.mark.thorough
def test_settings_may_be_an_object_or_stand_in_a_file(tmp_path):
    run_ranks(settings_of_other_forms, 2, str(tmp_path))


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


def settings_without_callback(rank: int, folder: str) -> None:
    """The second Trainer with the same arguments takes the settings too, and sends the bytes that are predicted."""
    put_in_force()  # as hf-zeropp launch does
    found = []
    for callbacks in ([], [ZeroPPCallback()]):
        args = training_arguments(folder, max_steps=2)
        Trainer(tiny_model(), args, train_dataset=token_data(), callbacks=callbacks).train()
        trainer = Trainer(tiny_model(), args, train_dataset=token_data())
        trainer.train()
        found.append(losses(trainer))
        predicted = traffic.total(get_handle(trainer.model).predict().values())
        assert logged_bytes(trainer) == pytest.approx([2 * predicted.cross_node] * 2, rel=0.04)
    assert found == [losses(trained(folder, TWO_NODES, max_steps=2))] * 2


@pytest.mark.thorough
def test_settings_take_effect_without_a_callback(tmp_path):
    run_ranks(settings_without_callback, 4, str(tmp_path))
