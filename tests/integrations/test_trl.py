"""Unmodified TRL trainers under the callback: they train, as stock FSDP2 does, with every gather through our comms."""

from __future__ import annotations

import frozen_runs
import pytest
import torch
from datasets import Dataset
from harness import run_ranks
from peft import LoraConfig
from rollout_runs import ONLINE, WORDS, arguments_of_trl, distinct_tokens, tokenizer
from test_switch import llava
from torch.distributed.fsdp import FSDPModule
from toy import logged_messages
from trainer_runs import TWO_NODES, UNQUANTIZED, callback_of, losses, num_fsdp2_gathers, tiny_model
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, set_seed

from hf_zeropp import ZeroPPCallback, compat, traffic

STEPS = 4


def phrases(num: int, length: int, seed: int) -> list[str]:
    ids = torch.randint(0, len(WORDS), (num, length), generator=torch.Generator().manual_seed(seed))
    return [" " + " ".join(WORDS[i] for i in row) for row in ids.tolist()]


def new_model(cls=LlamaForCausalLM, **overrides) -> torch.nn.Module:
    config = tiny_model(**overrides).config
    set_seed(0)
    return cls(config)


def new_trainer(kind: str, folder: str, zeropp, data: dict[str, list], *models, options=None, **how):
    """Return TRL's trainer of a kind. A quarter of its data is for evaluation; ``options`` are further ones of its config."""
    import trl

    parts = Dataset.from_dict(data).train_test_split(16, shuffle=False)
    how |= {"train_dataset": parts["train"], "eval_dataset": parts["test"], "processing_class": tokenizer()}
    steps = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    args = getattr(trl, f"{kind}Config")(**arguments_of_trl(folder, zeropp, **steps), **(options or {}))
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


def grpo(folder: str, zeropp):
    return new_trainer(
        "GRPO", folder, zeropp, {"prompt": phrases(64, 4, 1)}, new_model(), distinct_tokens, options=ONLINE
    )


def train(folder: str, build, zeropp) -> tuple[list[float], float, list[int]]:
    """Return the losses, that of an evaluation, and how often the weights of reference models crossed nodes."""
    trainer = build(folder, zeropp)
    callback = callback_of(trainer).attach(trainer)
    trainer.train()
    assert len(losses(trainer)) == STEPS
    references = [trainer.ref_model] if getattr(trainer, "ref_model", None) is not None else []
    counts = [each.traffic.counts for each in (callback.handle, *callback._auxiliary) if each is not None]
    for collectives in counts:
        assert traffic.GATHER_CROSS in collectives and traffic.FSDP2_GATHER not in collectives
    if zeropp is not False:
        assert counts and sum(num_fsdp2_gathers(model) for model in (trainer.model, *references)) == 0
    crossings = [collectives[traffic.GATHER_CROSS].calls for collectives in counts[1:]]
    return losses(trainer), trainer.evaluate()["eval_loss"], crossings


def train_beside_stock(rank: int, build, folder: str) -> None:
    (stock, stock_eval, _), (ours, our_eval, crossings) = (train(folder, build, each) for each in (False, TWO_NODES))
    assert [*ours, our_eval] == pytest.approx([*stock, stock_eval], rel=0.01)
    assert crossings in ([], [1])  # frozen: crosses once, not once per step


@pytest.mark.thorough("sft*", "reward*", "dpo_reference*")
@pytest.mark.parametrize("build", [sft, dpo_lora, dpo_reference, reward], ids=lambda build: build.__name__)
def test_offline_trainers(tmp_path, build):
    run_ranks(train_beside_stock, 4, build, str(tmp_path))


def train_online(rank: int, folder: str) -> None:
    stock, stock_eval, _ = train(folder, grpo, False)
    exact, exact_eval, _ = train(folder, grpo, TWO_NODES | UNQUANTIZED)
    assert exact == pytest.approx(stock, abs=1e-4) and any(stock)
    assert exact_eval == pytest.approx(stock_eval, abs=1e-3)
    train(folder, grpo, TWO_NODES)  # samples its own completions: its losses are not comparable


@pytest.mark.thorough
def test_an_online_trainer(tmp_path):
    run_ranks(train_online, 4, str(tmp_path))


def train_beside_a_synced_reference(rank: int, folder: str) -> None:
    """A synced reference equals the policy, so the next step's loss is that of the first: log 2."""
    found, _, crossings = train(folder, dpo_synced_reference, TWO_NODES)
    assert found[2] == pytest.approx(found[0], abs=1e-6) and found[3] != pytest.approx(found[0], abs=1e-6)
    assert crossings == [2]  # before and after the one sync between two forwards


@pytest.mark.thorough
def test_reference_model_sync_is_seen(tmp_path):
    run_ranks(train_beside_a_synced_reference, 4, str(tmp_path))


def train_without_attach(rank: int, folder: str) -> list[str]:
    with logged_messages("hf_zeropp") as messages:
        dpo_reference(folder, TWO_NODES).train()
    return messages


@pytest.mark.thorough
def test_reference_model_left_to_fsdp2_is_reported(tmp_path):
    messages = run_ranks(train_without_attach, 4, str(tmp_path))[0]
    assert any("call ZeroPPCallback.attach(trainer) before train()" in message for message in messages)


# ---- Losses that multiply by the head's weight themselves, and never call the head.


def vision_gradients(rank: int) -> dict[str, float]:
    """How far the gradients of a vision-language model are from those of the unsharded model, under Accelerate's own plan."""
    from trl.trainer.utils import add_fused_lm_head

    models = [llava(), llava()]
    for model in models:
        add_fused_lm_head(model)
    ids = frozen_runs.tokens(length=12).clamp(min=6)
    ids[:, :5] = models[0].config.image_token_index  # four patches, and the image as a whole
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    *_, model, _ = frozen_runs.prepare(models[0], **UNQUANTIZED)
    assert isinstance(model.lm_head, FSDPModule), "the head has a unit of its own"
    for each, part in ((model, slice(rank, rank + 1)), (models[1], slice(None))):
        inputs = {"input_ids": ids[part], "labels": ids[part], "pixel_values": pixels[part]}
        each(**inputs, fused_lm_head=True).loss.backward()
    expected = {name: param.grad for name, param in models[1].named_parameters() if param.grad is not None}
    found = {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None}
    return {name: (found[name] - grad).abs().max().item() for name, grad in expected.items()}


@pytest.mark.thorough
@pytest.mark.skipif(not compat.is_at_least("trl", (1, 16)), reason="older TRL has no fused head by default")
def test_a_fused_loss_trains_the_head_of_a_vision_language_model():
    """Accelerate finds no final norm in it, and shards the head alone."""
    for gaps in run_ranks(vision_gradients, 4):
        assert gaps.keys() >= {"lm_head.weight", "model.language_model.embed_tokens.weight"}
        assert max(gaps.values()) < 1e-6
