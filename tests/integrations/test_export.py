"""``hf-zeropp export``: merged 16-bit weights that open without this package, and nothing lost on mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from frozen_runs import tiny_llama, tokens
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_zeropp import ZeroPPQuantConfig, cli
from hf_zeropp.integrations.lora.export import export

ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora with ranks": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "a module in full": {"modules_to_save": ["norm"]},
}


def save_base(folder, *, packed: bool, tied: bool) -> str:
    tiny_llama(tie_word_embeddings=tied).save_pretrained(folder / "base")
    if not packed:
        return str(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=ZeroPPQuantConfig(bits=4))
    model.save_pretrained(folder / "packed")
    return str(folder / "packed")


def save_adapter(folder, base: str, **settings) -> torch.Tensor:
    """Returns the logits of base and adapter."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    config = LoraConfig(**({"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | settings))
    model = get_peft_model(model, config)
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(("packed", "tied"), [(False, False), (True, True)])
def test_an_exported_model_computes_what_base_and_adapter_did(tmp_path, adapter, packed, tied):
    expected = save_adapter(tmp_path, save_base(tmp_path, packed=packed, tied=tied), **ADAPTERS[adapter])
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
