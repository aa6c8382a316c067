"""Transformers loads straight into packed weights, saves them, and reads them back."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from frozen_runs import VOCAB, packed_copy, tiny_llama, tiny_mixtral, tokens
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_zeropp import ZeroPPQuantConfig
from hf_zeropp.frozen.modules import PackedLinear
from hf_zeropp.integrations.pretrained_shape import pretrained_shape


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("packs", (False, True), ids=("dense embeddings", "packed embeddings"))
def test_loading_equals_packing_and_round_trips(tmp_path, tied, packs):
    tiny_llama(tie_word_embeddings=tied).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16).requires_grad_(False)
    config = ZeroPPQuantConfig(bits=4, pack_embeddings=packs)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, quantization_config=config)
    assert torch.equal(logits(loaded), logits(packed_copy(dense, 4, pack_embeddings=packs)))
    assert type(loaded.lm_head) is (PackedLinear if packs else torch.nn.Linear)
    assert type(loaded.model.layers[0].mlp.up_proj) is PackedLinear
    loaded.save_pretrained(tmp_path / "packed")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(reloaded), logits(loaded))
    head, embedding = (
        module.weight_codes if packs else module.weight for module in (reloaded.lm_head, reloaded.model.embed_tokens)
    )
    assert (head is embedding) == tied
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("dense", "packed")]
    more = 0 if packs else (2 - tied) * 2 * VOCAB * 64  # the embeddings in 16 bits
    assert sizes[1] < 0.32 * sizes[0] + more  # of which most are scales of rows shorter than a block, and headers
    saved = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    settings = {"bits": 4, "block": 128, "pack_embeddings": packs, "quant_method": "zeropp", "skip": [], "version": 2}
    assert saved == settings


def test_a_weight_tied_to_a_skipped_one_stays_dense(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    config = ZeroPPQuantConfig(bits=8, skip=["lm_head"], pack_embeddings=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert type(loaded.lm_head.weight) is torch.nn.Parameter
    loaded.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), logits(loaded))


def test_fused_experts_round_trip(tmp_path):
    model = tiny_mixtral()
    model.save_pretrained(tmp_path / "dense")  # one tensor per expert
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=ZeroPPQuantConfig(bits=8))
    assert loaded.model.layers[0].mlp.experts.gate_up_proj_codes.dtype == torch.uint8
    assert (logits(loaded) - logits(model)).abs().max() < 0.05 * logits(model).abs().max()
    loaded.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), logits(loaded))


MEMORY_PROBE = """
    import os, sys, threading, time, torch
    from transformers import AutoModelForCausalLM
    from hf_zeropp import ZeroPPQuantConfig

    def resident(kind):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))

    torch.set_num_threads(1)
    before, peak, done = resident("RssAnon"), 0, False

    def watch():
        global peak
        while not done:
            peak = max(peak, resident("RssAnon"))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.bfloat16, quantization_config=ZeroPPQuantConfig(bits=4)
    )
    done = True
    watcher.join()
    print("PEAK", max(peak, resident("RssAnon")) - before, sum(p.numel() for p in model.parameters()))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_16_bit_model_is_never_in_memory(tmp_path):
    """Memory the process owns; pages of the checkpoint that the system keeps mapped can be dropped at any time."""
    model = tiny_llama(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=4096).to(
        torch.bfloat16
    )
    dense_bytes = 2 * model.num_parameters()
    model.save_pretrained(tmp_path)
    del model
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY_PROBE), str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak = int(output.split("PEAK ")[1].split()[0])
    assert peak < 0.6 * dense_bytes, f"{peak / dense_bytes:.2f} of the 16-bit model's size"


@pytest.mark.parametrize(
    ("version", "words"), [(None, "an earlier version of hf_zeropp"), (3, "version 3 of hf_zeropp's format")]
)
def test_a_packed_checkpoint_of_another_version_is_refused(tmp_path, version, words):
    """By all that reads one. Earlier versions had other codes in 4 bits, and wrote no version into config.json."""
    tiny_llama().save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=ZeroPPQuantConfig(bits=4))
    packed = tmp_path / "packed"
    model.save_pretrained(packed)
    config = json.loads((packed / "config.json").read_text())
    settings = config["quantization_config"]
    assert settings["version"] == 2
    settings |= {"version": version}
    if version is None:
        del settings["version"]
    (packed / "config.json").write_text(json.dumps(config))
    for read in (
        lambda: AutoModelForCausalLM.from_pretrained(packed),
        lambda: pretrained_shape(str(packed)),
    ):
        with pytest.raises(ValueError, match=f"packed' was packed by {words}.* Pack the 16-bit checkpoint anew"):
            read()


def test_a_dictionary_of_settings_has_the_default_of_the_config(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    settings = {"quant_method": "zeropp", "bits": 4}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    assert type(model.lm_head) is torch.nn.Linear and type(model.model.layers[0].mlp.up_proj) is PackedLinear


def test_a_packed_language_model_gets_a_new_head(tmp_path):
    """A head that the checkpoint does not have is initialized, as over a base in 16 bits, and is a layer that trains."""
    tiny_llama().save_pretrained(tmp_path / "dense")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=ZeroPPQuantConfig(bits=4))
    packed.save_pretrained(tmp_path / "packed")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed", num_labels=3)
    assert type(model.score) is torch.nn.Linear and model.score.weight.std() > 0
    assert torch.equal(model.model(tokens()).last_hidden_state, packed.model(tokens()).last_hidden_state)
