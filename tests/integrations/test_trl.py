"""Unmodified TRL trainers under the callback: they train, as stock FSDP2 does, with every gather through our comms."""

from __future__ import annotations

from pathlib import Path

import frozen_runs
import pytest
import torch
from datasets import Dataset
from harness import run_ranks
from peft import LoraConfig, PeftModel
from rollout_runs import ONLINE, WORDS, arguments_of_trl, distinct_tokens, save_model, tokenizer
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from toy import full_weights, logged_messages
from trainer_runs import TWO_NODES, UNQUANTIZED, callback_of, losses, num_fsdp2_gathers, tiny_model
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    set_seed,
)

from hf_zeropp import ZeroPPCallback, ZeroPPQuantConfig, compat, traffic

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
    """Return TRL's trainer of a kind. A quarter of its data is for evaluation; ``options`` are further ones of its config.

    ``zeropp`` is None for a process without others, and without FSDP2.
    """
    import trl

    parts = Dataset.from_dict(data).train_test_split(16, shuffle=False)
    how |= {"train_dataset": parts["train"], "eval_dataset": parts["test"], "processing_class": tokenizer()}
    settings = arguments(folder, zeropp) | ({"fsdp": False, "fsdp_config": None} if zeropp is None else {})
    args = getattr(trl, f"{kind}Config")(**(settings | (options or {})))
    callbacks = [] if zeropp is None else [ZeroPPCallback()]
    return getattr(trl, f"{kind}Trainer")(*models, args=args, callbacks=callbacks, **how)


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


@pytest.mark.thorough("kto*", "sft*", "reward*", "dpo_reference*")
@pytest.mark.parametrize("build", [sft, dpo_lora, dpo_reference, reward, kto], ids=lambda build: build.__name__)
def test_offline_trainers(tmp_path, build):
    stock, ours = run_ranks(train_each, 4, build, str(tmp_path), False, TWO_NODES)[0]
    assert_ours(ours)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=0.01)
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], rel=0.01)
    assert ours["reference_crossings"] in ([], [1])  # frozen: crosses once, not once per step


@pytest.mark.thorough
@pytest.mark.parametrize("build", [grpo, rloo], ids=lambda build: build.__name__)
def test_online_trainers(tmp_path, build):
    settings = (False, TWO_NODES | UNQUANTIZED, TWO_NODES)
    stock, exact, ours = run_ranks(train_each, 4, build, str(tmp_path), *settings)[0]
    assert_ours(exact)
    assert_ours(ours)  # samples its own completions: its losses are not comparable
    assert exact["losses"] == pytest.approx(stock["losses"], abs=1e-4)
    assert exact["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-3)
    assert any(stock["losses"])


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_reference_model_left_to_fsdp2_is_reported(tmp_path):
    messages = run_ranks(train_without_attach, 4, str(tmp_path))[0]
    assert any("call ZeroPPCallback.attach(trainer) before train()" in message for message in messages)


# ---- Tokens that a chat template adds, on a base in 4 bits.

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }} <|im_end|>{% endfor %}"


def save_template(folder: Path) -> str:
    """Write a tokenizer with a chat template and two tokens that the base does not have."""
    chat = tokenizer()
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat.eos_token, chat.chat_template = "<|im_end|>", TEMPLATE
    chat.save_pretrained(folder)
    return str(folder)


def sft_with_template(
    rank: int, base: str, template: str, folder: str, zeropp
) -> tuple[list[float], float, torch.Tensor]:
    """Returns the losses, and how far the saved adapter on the base, loaded again, is from the trained model."""
    turns = zip(phrases(64, 5, 1), phrases(64, 5, 2), strict=True)
    roles = ("user", "assistant")
    data = {
        "messages": [
            [{"role": role, "content": text} for role, text in zip(roles, turn, strict=True)] for turn in turns
        ]
    }
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=ZeroPPQuantConfig(bits=4))
    options = {"chat_template_path": template, "max_length": 32, "bf16": True, "learning_rate": 1e-2}
    options["per_device_train_batch_size"] = 4 if zeropp is None else 1
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = new_trainer("SFT", folder, zeropp, data, model, options=options, peft_config=lora)
    trainer.train()
    trainer.save_model(folder)
    ids = torch.tensor([[5, 6, 124, 125, 7]])
    with torch.no_grad():
        expected = trainer.model(input_ids=ids).logits.float()
        again = AutoModelForCausalLM.from_pretrained(base, quantization_config=ZeroPPQuantConfig(bits=4))
        again.resize_token_embeddings(128)
        found = PeftModel.from_pretrained(again, folder)(input_ids=ids).logits.float()
    return losses(trainer), (found - expected).abs().max().item(), expected


@pytest.mark.thorough
def test_a_chat_template_adds_tokens_to_a_base_in_4_bits(tmp_path):
    base, template = save_model(tmp_path / "base"), save_template(tmp_path / "chat")
    run = (sft_with_template, base, template)
    alone, *_ = run_ranks(run[0], 1, *run[1:], str(tmp_path / "one"), None)[0]
    losses_here, gap, logits = run_ranks(run[0], 4, *run[1:], str(tmp_path / "four"), TWO_NODES | UNQUANTIZED)[0]
    assert losses_here == pytest.approx(alone, rel=0.01)
    assert gap < 0.05 * logits.abs().max()  # bf16 beside fp32
    saved = load_file(tmp_path / "four" / "adapter_model.safetensors")
    assert saved["base_model.model.lm_head.weight"].shape == (128, 128)
    assert any("trainable_tokens_delta" in name for name in saved)


# ---- Losses that multiply by the head's weight themselves, and never call the head.

HEAD_ALONE = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "Linear"]}
"""A plan by which the head is a unit of its own."""
FUSED = [TWO_NODES | UNQUANTIZED, TWO_NODES | UNQUANTIZED | {"qwz_mode": "exact"}, {"ranks_per_node": 4}]


def sft_changes(rank: int, folder: str, *settings) -> list[dict[str, torch.Tensor]]:
    """How far each weight moves in two steps of two micro-steps, with an evaluation between them, under each of ``settings``."""
    found = []
    for zeropp in settings:
        options = {"max_steps": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        options |= {"per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.5, "max_length": 16}
        options |= {"max_grad_norm": 0.0}
        if zeropp is not None:
            options |= {"per_device_train_batch_size": 1, "fsdp_config": {"zeropp": zeropp, **HEAD_ALONE}}
        model = new_model()
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        trainer = new_trainer("SFT", folder, zeropp, {"text": phrases(64, 12, 1)}, model, options=options)
        trainer.train()
        found.append({name: weight - before[name] for name, weight in full_weights(trainer.model).items()})
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not compat.is_at_least("trl", (1, 16)), reason="older TRL has no fused head by default")
def test_a_fused_loss_trains_a_head_that_is_a_unit_of_its_own(tmp_path):
    """``full_tensor()`` of its weight would leave each rank with rows of its own gradient."""
    (expected,) = run_ranks(sft_changes, 1, str(tmp_path), None)[0]
    for changes in run_ranks(sft_changes, 4, str(tmp_path), *FUSED)[0]:
        for name, change in changes.items():
            assert (change - expected[name]).norm() < 1e-3 * expected[name].norm(), name


def vision_gradients(rank: int) -> dict[str, float]:
    """How far the gradients of a vision-language model are from those of the unsharded model, under Accelerate's own plan."""
    from trl.trainer.utils import add_fused_lm_head

    text = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    images = {"image_size": 8, "patch_size": 4, "projection_dim": 32}
    parts = {"vision_config": CLIPVisionConfig(**vision, **images), "text_config": LlamaConfig(**text)}
    config = LlavaConfig(**parts, image_token_index=96)
    models = []
    for _ in range(2):
        set_seed(0)
        models.append(LlavaForConditionalGeneration(config))
        add_fused_lm_head(models[-1])
    ids = frozen_runs.tokens().clamp(max=95)
    ids[:, :4] = 96
    pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    *_, model, _ = frozen_runs.prepare(models[0], **UNQUANTIZED)
    assert isinstance(model.lm_head, FSDPModule), "the head has a unit of its own"
    for each, part in ((model, slice(rank, rank + 1)), (models[1], slice(None))):
        inputs = {"input_ids": ids[part], "labels": ids[part], "pixel_values": pixels[part]}
        each(**inputs, fused_lm_head=True).loss.backward()
    expected = {name: param.grad for name, param in models[1].named_parameters() if param.grad is not None}
    found = {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None}
    return {name: (found[name] - grad).abs().max().item() for name, grad in expected.items()}


@pytest.mark.skipif(not compat.is_at_least("trl", (1, 16)), reason="older TRL has no fused head by default")
def test_a_fused_loss_trains_the_head_of_a_vision_language_model():
    """Accelerate finds no final norm in it, and shards the head alone."""
    for gaps in run_ranks(vision_gradients, 4):
        assert gaps.keys() >= {"lm_head.weight", "model.language_model.embed_tokens.weight"}
        assert max(gaps.values()) < 1e-6
