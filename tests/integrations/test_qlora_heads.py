"""QLoRA that trains a head or adds tokens, on 4 ranks (2 nodes), against the same model unsharded.

The base is packed while it loads, or while it is sharded. Then it trains, is saved, loaded, generates, and is published.
"""

from __future__ import annotations

from pathlib import Path

import frozen_runs
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from frozen_runs import UNQUANTIZED, VOCAB, packed_copy, reset_accelerate, tiny_llama, tokens, trainable
from harness import each_case, run_ranks
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForSequenceClassification

from hf_zeropp import ZeroPPQuantConfig, publish_weights
from hf_zeropp.frozen.modules import packed_modules

NEW = [VOCAB, VOCAB + 1, VOCAB + 2]  # tokens that are added
CASES = {
    "classifier": {"task_type": "SEQ_CLS"},
    "head and embedding": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tied head and embedding": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "new tokens and head": {"trainable_token_indices": {"embed_tokens": NEW}, "modules_to_save": ["lm_head"]},
    "tied new tokens": {"trainable_token_indices": {"embed_tokens": NEW}},
}


def save_base(name: str, folder: Path) -> None:
    """Write the 16-bit checkpoint. That of the classifier has ``score.weight``."""
    model = tiny_llama(tie_word_embeddings="tied" in name)
    if name == "classifier":
        model = LlamaForSequenceClassification(model.config)
    model.save_pretrained(folder)


def load(name: str, folder: str, packs: bool) -> nn.Module:
    """Load the base, in 4 bits or as it is, and add tokens if the case asks for it."""
    loader = AutoModelForSequenceClassification if name == "classifier" else AutoModelForCausalLM
    model = loader.from_pretrained(folder, quantization_config=ZeroPPQuantConfig(bits=4) if packs else None)
    if "new tokens" in name:
        torch.manual_seed(3)
        model.resize_token_embeddings(VOCAB + len(NEW))
    return model


def with_adapter(name: str, model: nn.Module) -> PeftModel:
    torch.manual_seed(1)
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"]} | CASES[name]
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))


def inputs(name: str) -> dict[str, torch.Tensor]:
    ids = tokens()
    if "new tokens" in name:
        ids[:, 2:5] = torch.tensor(NEW)
    return {"input_ids": ids, "labels": torch.tensor([0, 1, 1, 0]) if name == "classifier" else ids}


@torch.no_grad()
def logits(model: nn.Module, name: str) -> torch.Tensor:
    return model(input_ids=inputs(name)["input_ids"]).logits


def generated(model: nn.Module) -> torch.Tensor:
    return model.generate(tokens(num_sequences=2), max_new_tokens=4, min_new_tokens=4, do_sample=False)


def run_cases(rank: int, cases: list[tuple[str, bool]], folder: str) -> None:
    def check(case: tuple[str, bool]) -> None:
        run(rank, *case, f"{folder}/{cases.index(case)}")

    each_case(cases, check)


def run(rank: int, name: str, packs_on_load: bool, folder: str) -> None:
    """Once trained, once loaded and once published, logits are those of the unsharded model."""
    reset_accelerate()
    if rank == 0:
        save_base(name, Path(folder))
    dist.barrier()
    model = with_adapter(name, load(name, folder, packs_on_load))
    reference = packed_copy(model, None if packs_on_load else 4)
    packed = [module for module, _ in packed_modules(reference)]
    assert len(packed) == 14 and all("layers." in module for module in packed), (
        "the linear layers of blocks, and no others"
    )
    settings = UNQUANTIZED | ({} if packs_on_load else {"frozen_bits": 4})
    accelerator, plugin, model, optimizer = frozen_runs.prepare(model, **settings)
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    for each, step in ((model, optimizer), (reference, torch.optim.SGD(trainable(reference), lr=0.05))):
        for _ in range(2):
            each(**inputs(name)).loss.backward()
            step.step()
            step.zero_grad()
    learned = {key for key, value in reference.state_dict().items() if not torch.equal(value, before[key])}
    parts = ("lora_", "token", "modules_to_save")
    assert len(learned) >= 8 + 1 and all(any(part in key for part in parts) for key in learned)
    expected = logits(reference, name)
    torch.testing.assert_close(logits(model, name), expected, atol=1e-5, rtol=0)

    merged = {}
    for key, weight in publish_weights(model):
        merged[key] = weight.clone()
    if name != "classifier":
        assert torch.equal(generated(model), generated(reference))
    state = accelerator.get_state_dict(model)
    if rank == 0:
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/adapter", state_dict=state)
    accelerator.wait_for_everyone()
    reset_accelerate()
    loaded = PeftModel.from_pretrained(load(name, folder, packs_on_load), f"{folder}/adapter")
    loaded = packed_copy(loaded, None if packs_on_load else 4)
    torch.testing.assert_close(logits(loaded, name), expected, atol=1e-5, rtol=0)

    engine = load(name, folder, packs=False)
    engine.load_state_dict(merged, strict=False)
    missing = set(engine.state_dict()) - set(merged)
    assert missing <= ({"lm_head.weight"} if "tied" in name else set()), missing
    torch.testing.assert_close(logits(engine, name), expected, atol=1e-5, rtol=0)


# Each case packs the base while it is loaded or while it is sharded, and with ``--all`` in the other way as well.
WAYS = [(name, index % 2 == 0) for index, name in enumerate(CASES)]


@pytest.mark.thorough("the other way")
@pytest.mark.parametrize("is_other", [False, True], ids=["one way", "the other way"])
def test_heads_and_tokens_train_on_a_base_in_4_bits(tmp_path, is_other):
    cases = [(name, packs_on_load != is_other) for name, packs_on_load in WAYS]
    run_ranks(run_cases, 4, cases, str(tmp_path))
