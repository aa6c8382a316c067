"""``hf-zeropp export``: merged 16-bit weights that open without this package, and nothing lost on mistakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
from frozen_runs import tiny_llama, tiny_mixtral, tokens
from peft import get_peft_config, get_peft_model
from transformers import AutoModelForCausalLM

from hf_zeropp import ZeroPPQuantConfig, cli
from hf_zeropp.integrations.lora.export import export

ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora with ranks": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "norms in full": {"modules_to_save": ["norm"]},
    "biases": {"bias": "all", "target_modules": ["q_proj"]},
    "biases of its own": {"lora_bias": True, "target_modules": ["q_proj"]},
    "a tied head in full": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    "tokens": {"trainable_token_indices": [3, 5, 7]},
    "ia3": {"peft_type": "IA3", "target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}
OF_DENSE_WEIGHTS = {"modules in full": {"modules_to_save": ["mlp"], "target_modules": ["q_proj"]}}
"""PEFT trains no packed weight in full."""
CASES = [
    *((name, settings, packed) for name, settings in ADAPTERS.items() for packed in (False, True)),
    *((name, settings, False) for name, settings in OF_DENSE_WEIGHTS.items()),
]


def save_base(folder, *, packed: bool, tied: bool) -> str:
    base = tiny_llama(tie_word_embeddings=tied, attention_bias=True)
    change(param for name, param in base.named_parameters() if name.endswith(".bias"))  # they begin as zeros
    base.save_pretrained(folder / "base")
    if not packed:
        return str(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=ZeroPPQuantConfig(bits=4))
    model.save_pretrained(folder / "packed")
    return str(folder / "packed")


def change(params: Iterable[torch.nn.Parameter]) -> None:
    """Stands for a training."""
    torch.manual_seed(1)
    for param in params:
        param.data.add_(torch.randn_like(param), alpha=0.1)


def save_adapter(folder, base: str, peft_type: str = "LORA", **settings) -> torch.Tensor:
    """Returns the logits of base and adapter."""
    settings = {"target_modules": "all-linear"} | ({"r": 4} if peft_type == "LORA" else {}) | settings
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), get_peft_config({"peft_type": peft_type, **settings})
    )
    change(param for param in model.parameters() if param.requires_grad)
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize(
    ("settings", "packed"),
    [
        pytest.param(settings, packed, id=f"{name}, {'packed' if packed else 'dense'}")
        for name, settings, packed in CASES
    ],
)
def test_an_exported_model_computes_what_base_and_adapter_did(tmp_path, settings, packed):
    expected = save_adapter(tmp_path, save_base(tmp_path, packed=packed, tied=True), **settings)
    folder = export(
        tmp_path / "merged",
        adapter=tmp_path / "adapter",
        dtype=torch.float32,
        max_shard_size="60KB",
        show_progress=False,
    )
    assert (folder / "model.safetensors.index.json").exists()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_experts_that_lie_in_one_tensor_are_merged(tmp_path):
    tiny_mixtral().save_pretrained(tmp_path / "base", save_original_format=False)
    fused = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    expected = save_adapter(tmp_path, str(tmp_path / "base"), target_modules=["q_proj"], target_parameters=fused)
    folder = export(tmp_path / "merged", adapter=tmp_path / "adapter", dtype=torch.float32, show_progress=False)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_an_adapter_that_changed_its_base_is_refused(tmp_path, initial):
    """Merged into the base on disk, it would add what it has taken out of its own."""
    save_adapter(tmp_path, save_base(tmp_path, packed=False, tied=False), init_lora_weights=initial)
    with pytest.raises(ValueError, match=f"init_lora_weights='{initial}' had changed"):
        export(tmp_path / "merged", adapter=tmp_path / "adapter", show_progress=False)
    assert not (tmp_path / "merged").exists()


def test_the_command_writes_what_opens_without_this_package(tmp_path):
    base = save_base(tmp_path, packed=True, tied=False)
    save_adapter(tmp_path, base)
    cli.main(["export", "--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")])
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM; "
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "assert model.dtype == torch.bfloat16 and 'hf_zeropp' not in sys.modules; model(torch.ones(1, 3, dtype=int))"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "merged")], check=True)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    base = save_base(tmp_path, packed=False, tied=False)
    save_adapter(tmp_path, base)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "thesis.txt").write_text("precious")
    with pytest.raises(SystemExit, match="not an empty folder; nothing was written"):
        cli.main(["export", "--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")])
    assert [file.name for file in (tmp_path / "merged").iterdir()] == ["thesis.txt"]
