"""Unmodified TRL trainers under the callback: they train, as stock FSDP2 does, with every gather through our comms."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from harness import run_ranks
from peft import LoraConfig
from rollout_runs import ONLINE, WORDS, arguments_of_trl, distinct_tokens, tokenizer
from toy import logged_messages
from trainer_runs import TWO_NODES, UNQUANTIZED, callback_of, losses, num_fsdp2_gathers, tiny_model
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, set_seed

from hf_zeropp import ZeroPPCallback, traffic

STEPS = 4


def phrases(num: int, length: int, seed: int) -> list[str]:
    ids = torch.randint(0, len(WORDS), (num, length), generator=torch.Generator().manual_seed(seed))
    return [" " + " ".join(WORDS[i] for i in row) for row in ids.tolist()]


def arguments(folder: str, zeropp) -> dict:
    steps = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    return arguments_of_trl(folder, zeropp, **steps)


def new_model(cls=LlamaForCausalLM, **overrides) -> torch.nn.Module:
    config = tiny_model(**overrides).config
    set_seed(0)
    return cls(config)


def new_trainer(kind: str, folder: str, zeropp, data: dict[str, list], *models, options=None, **how):
    """Return TRL's trainer of a kind. A quarter of its data is for evaluation; ``options`` are further ones of its config."""
    import trl

    parts = Dataset.from_dict(data).train_test_split(16, shuffle=False)
    how |= {"train_dataset": parts["train"], "eval_dataset": parts["test"], "processing_class": tokenizer()}
    args = getattr(trl, f"{kind}Config")(**arguments(folder, zeropp), **(options or {}))
    return getattr(trl, f"{kind}Trainer")(*models, args=args, callbacks=[ZeroPPCallback()], **how)


def sft(folder: str, zeropp):
    return new_trainer("SFT", folder, zeropp, {"text": phrases(64, 12, 1)}, new_model(), options={"max_length": 16})


def preferences() -> dict[str, list[str]]:
    return {"prompt": phrases(64, 4, 1), "chosen": phrases(64, 4, 2), "rejected": phrases(64, 4, 3)}


def dpo_lora(folder: str, zeropp):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return new_trainer("DPO", folder, zeropp, preferences(), new_model(), peft_config=lora)


def dpo_reference(folder: str, zeropp):
    return new_trainer("DPO", folder, zeropp, preferences(), new_model(), new_model())


def dpo_synced_reference(folder: str, zeropp):
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    return new_trainer("DPO", folder, zeropp, preferences(), new_model(), new_model(), options=synced)


def reward(folder: str, zeropp):
    return new_trainer("Reward", folder, zeropp, preferences(), new_model(LlamaForSequenceClassification, num_labels=1))


def kto(folder: str, zeropp):
    data = {"prompt": phrases(64, 4, 1), "completion": phrases(64, 4, 2), "label": [i % 2 == 0 for i in range(64)]}
    return new_trainer("KTO", folder, zeropp, data, new_model(), new_model())


def grpo(folder: str, zeropp):
    return new_trainer(
        "GRPO", folder, zeropp, {"prompt": phrases(64, 4, 1)}, new_model(), distinct_tokens, options=ONLINE
    )


def rloo(folder: str, zeropp):
    return new_trainer(
        "RLOO", folder, zeropp, {"prompt": phrases(64, 4, 1)}, new_model(), distinct_tokens, options=ONLINE
    )


def train(rank: int, build, folder: str, zeropp) -> dict:
    trainer = build(folder, zeropp)
    callback = callback_of(trainer).attach(trainer)
    trainer.train()
    references = [trainer.ref_model] if getattr(trainer, "ref_model", None) is not None else []
    handles = [handle for handle in (callback.handle, *callback._auxiliary) if handle is not None]
    crossings = [handle.traffic.counts[traffic.GATHER_CROSS].calls for handle in handles[1:]]
    return {
        "losses": losses(trainer),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "fsdp2_gathers": sum(num_fsdp2_gathers(model) for model in (trainer.model, *references)),
        "collectives": [set(handle.traffic.counts) for handle in handles],
        "reference_crossings": crossings,
    }


def train_each(rank: int, build, folder: str, *settings) -> list[dict]:
    return [train(rank, build, folder, zeropp) for zeropp in settings]


def assert_ours(run: dict) -> None:
    assert len(run["losses"]) == STEPS
    assert run["fsdp2_gathers"] == 0
    assert all(traffic.GATHER_CROSS in names for names in run["collectives"])
    assert all(traffic.FSDP2_GATHER not in names for names in run["collectives"])


@pytest.mark.parametrize("build", [sft, dpo_lora, dpo_reference, reward, kto], ids=lambda build: build.__name__)
def test_offline_trainers(tmp_path, build):
    stock, ours = run_ranks(train_each, 4, build, str(tmp_path), False, TWO_NODES)[0]
    assert_ours(ours)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=0.01)
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], rel=0.01)
    assert ours["reference_crossings"] in ([], [1])  # frozen: crosses once, not once per step


@pytest.mark.parametrize("build", [grpo, rloo], ids=lambda build: build.__name__)
def test_online_trainers(tmp_path, build):
    settings = (False, TWO_NODES | UNQUANTIZED, TWO_NODES)
    stock, exact, ours = run_ranks(train_each, 4, build, str(tmp_path), *settings)[0]
    assert_ours(exact)
    assert_ours(ours)  # samples its own completions: its losses are not comparable
    assert exact["losses"] == pytest.approx(stock["losses"], abs=1e-4)
    assert exact["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-3)
    assert any(stock["losses"])


def test_reference_model_sync_is_seen(tmp_path):
    """A synced reference equals the policy, so the next step's loss is that of the first: log 2."""
    run = run_ranks(train, 4, dpo_synced_reference, str(tmp_path), TWO_NODES)[0]
    assert run["losses"][2] == pytest.approx(run["losses"][0], abs=1e-6)
    assert run["losses"][3] != pytest.approx(run["losses"][0], abs=1e-6)
    assert run["reference_crossings"] == [2]  # before and after the one sync between two forwards


def train_without_attach(rank: int, folder: str) -> list[str]:
    with logged_messages("hf_zeropp") as messages:
        dpo_reference(folder, TWO_NODES).train()
    return messages


def test_reference_model_left_to_fsdp2_is_reported(tmp_path):
    messages = run_ranks(train_without_attach, 4, str(tmp_path))[0]
    assert any("call ZeroPPCallback.attach(trainer) before train()" in message for message in messages)
