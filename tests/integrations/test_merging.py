"""Merging an adapter that was trained on a packed base, as the refusal of a merge says: PEFT, on the dense model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from frozen_runs import tiny_llama, tiny_mixtral, tokens
from peft import PeftModel, get_peft_config, get_peft_model
from rollout_runs import tokenizer
from transformers import AutoModelForCausalLM

from hf_zeropp import ZeroPPQuantConfig, compat
from hf_zeropp.frozen.modules import packed_modules

pytestmark = pytest.mark.one_rank

FUSED = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {"trainable_token_indices": [3, 5, 7]},
    "ia3": {"peft_type": "IA3", "target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}
if compat.is_at_least("peft", (0, 20)):  # older PEFT puts no adapters on experts that lie in one tensor
    ADAPTERS["experts"] = {"target_modules": ["q_proj"], "target_parameters": FUSED}


def packed_base(folder, model, **settings):
    """A packed folder of ``model``."""
    model.save_pretrained(folder / "base", save_original_format=False)
    config = ZeroPPQuantConfig(bits=4, **settings)
    AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config).save_pretrained(folder / "packed")
    return folder / "packed"


def save_adapter(folder, base, peft_type: str = "LORA", **settings) -> torch.Tensor:
    """Save an adapter over a packed base, and return the logits of both."""
    settings = {"target_modules": "all-linear"} | ({"r": 4} if peft_type == "LORA" else {}) | settings
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), get_peft_config({"peft_type": peft_type, **settings})
    )
    torch.manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:  # stands for a training
            param.data.add_(torch.randn_like(param), alpha=0.1)
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_merged_model_computes_what_base_and_adapter_did(tmp_path, adapter):
    model = tiny_mixtral() if adapter == "experts" else tiny_llama(tie_word_embeddings=adapter == "tokens")
    base = packed_base(tmp_path, model)
    expected = save_adapter(tmp_path, base, **ADAPTERS[adapter])
    dense = AutoModelForCausalLM.from_pretrained(base).dequantize()
    assert not list(packed_modules(dense)) and not hasattr(dense.config, "quantization_config")
    PeftModel.from_pretrained(dense, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens()).logits
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_has_the_values_and_the_names_of_the_packed_one(tmp_path, tied):
    base = packed_base(tmp_path, tiny_llama(tie_word_embeddings=tied, attention_bias=True), pack_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(base)
    expected, dtype = model(tokens()).logits, torch.bfloat16
    dense = model.dequantize()
    torch.testing.assert_close(dense(tokens()).logits, expected, atol=1e-5, rtol=1e-5)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert dense.state_dict().keys() == original.state_dict().keys()
    assert (dense.lm_head.weight is dense.model.embed_tokens.weight) == tied
    assert [type(module) for module in dense.modules()] == [type(module) for module in original.modules()]
    cast = AutoModelForCausalLM.from_pretrained(base).dequantize(dtype=dtype)
    assert cast.model.layers[0].mlp.up_proj.weight.dtype == dtype
    dense.save_pretrained(tmp_path / "dense")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(reloaded(tokens()).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.thorough
def test_the_example_writes_what_opens_without_this_package(tmp_path):
    base = packed_base(tmp_path, tiny_llama())
    tokenizer().save_pretrained(base)
    save_adapter(tmp_path, base)
    example = Path(__file__).parents[2] / "examples" / "merge_lora.py"
    folders = ["--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")]
    subprocess.run([sys.executable, "-W", "ignore", str(example), *folders], check=True)
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "assert model.dtype == torch.bfloat16 and 'hf_zeropp' not in sys.modules; model(torch.ones(1, 3, dtype=int))"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "merged")], check=True)
