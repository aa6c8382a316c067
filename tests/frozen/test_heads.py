"""Packing a base leaves some modules in 16 bits: embeddings, heads, and modules that PEFT trains a copy of."""

from __future__ import annotations

import pytest
import torch.nn as nn
import transformers
from frozen_runs import tiny_llama, with_adapter
from transformers.quantizers import HfQuantizer

from hf_zeropp import quantize_frozen
from hf_zeropp.frozen.modules import packed_modules
from hf_zeropp.frozen.packing import dense_modules, is_packable

pytestmark = pytest.mark.one_rank

SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MODELS = {
    "LlamaForCausalLM": (SHAPE, {"lm_head"}),
    "LlamaForSequenceClassification": (SHAPE, {"score"}),
    "BertForSequenceClassification": (SHAPE, {"classifier"}),
    "BertForMaskedLM": (SHAPE, {"cls.predictions.transform.dense", "cls.predictions.decoder"}),
    "GPT2LMHeadModel": ({"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}, {"lm_head"}),
    "T5ForConditionalGeneration": (T5, {"lm_head"}),
    "T5ForSequenceClassification": (T5, {"classification_head.dense", "classification_head.out_proj"}),
    "WhisperForConditionalGeneration": (
        {"vocab_size": 97, "d_model": 32, "pad_token_id": 0}
        | {f"{part}_{what}": 4 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
        {"proj_out"},
    ),
}


def build(kind: str, shape: dict) -> nn.Module:
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**shape)).requires_grad_(False)


@pytest.mark.parametrize("kind", MODELS)
def test_heads_stay_dense_and_with_them_all_that_transformers_leaves(kind):
    shape, heads = MODELS[kind]
    model = build(kind, shape)
    dense = dense_modules(model)
    packable = {
        name: module
        for name, module in model.named_modules()
        if any(is_packable(module, leaf, param) for leaf, param in module.named_parameters(recurse=False))
    }
    stay = {name for name, module in packable.items() if module in dense and not isinstance(module, nn.Embedding)}
    assert stay == heads
    theirs = {name for name in HfQuantizer.get_modules_to_not_convert(model) if name in packable}
    assert theirs <= {name for name, module in packable.items() if module in dense}
    packed = dict(packed_modules(quantize_frozen(model)))
    assert packed.keys() == {name for name, module in packable.items() if module not in dense} and len(packed) >= 8


def test_a_setting_packs_them_too():
    model = quantize_frozen(build("LlamaForSequenceClassification", SHAPE), pack_embeddings=True)
    assert dict(packed_modules(model)).keys() >= {"score", "model.embed_tokens", "model.layers.0.mlp.down_proj"}


def test_what_peft_trains_a_copy_of_stays_dense():
    model = with_adapter(tiny_llama(), target_modules=["q_proj"], modules_to_save=["down_proj"])
    names = dict(packed_modules(quantize_frozen(model)))
    assert not any("down_proj" in name for name in names) and any("up_proj" in name for name in names)


def test_a_copy_of_a_packed_module_is_refused():
    """PyTorch would say "only Tensors of floating point dtype can require gradients"."""
    for module, settings in (("down_proj", {}), ("lm_head", {"pack_embeddings": True})):
        model = quantize_frozen(tiny_llama().requires_grad_(False), **settings)
        with pytest.raises(
            ValueError, match=r"Linear of modules_to_save holds packed weights .*skip=\[.*pack_embeddings"
        ):
            with_adapter(model, target_modules=["q_proj"], modules_to_save=[module])


def test_packed_embeddings_cannot_grow_and_say_so():
    model = quantize_frozen(tiny_llama().requires_grad_(False), pack_embeddings=True)
    with pytest.raises(
        RuntimeError, match="A packed weight cannot be written.* To add tokens, .* while the model is dense"
    ):
        model.resize_token_embeddings(103, mean_resizing=False)
    model = quantize_frozen(tiny_llama().requires_grad_(False))
    assert model.resize_token_embeddings(103, mean_resizing=False).weight.shape == (103, 64)
