"""``publish_weights`` on 4 ranks (2 nodes): the weights of a forward pass, PEFT's own merging, and the bytes across nodes."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from frozen_runs import (
    REPLICAS,
    UNQUANTIZED,
    VOCAB,
    packed_copy,
    prepare,
    reset_accelerate,
    tiny_llama,
    tiny_mixtral,
    tokens,
    trainable,
    with_adapter,
)
from harness import each_case, each_refusal, run_ranks
from peft import LoraConfig, get_peft_config, get_peft_model, get_peft_model_state_dict
from rollout_runs import seen_in_forward, train_step
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_zeropp import apply_zeropp, publish_weights
from hf_zeropp.frozen.modules import Packed
from hf_zeropp.frozen.published import Addend, adapter_weights, merged_weights
from hf_zeropp.rollouts.versions import UpdateReceiver, UpdateSender
from hf_zeropp.rollouts.versions.log import checksum

FULL = {
    "default": (tiny_llama, {}, {}),
    "tied": (tiny_llama, {"tie_word_embeddings": True}, {}),
    "unquantized": (tiny_llama, {}, UNQUANTIZED),
    "no secondary shards": (tiny_llama, {}, {"hpz_size": None}),
    "delta": (tiny_llama, {}, {"qwz_mode": "delta", "qwz_bits": 4}),
    "experts": (tiny_mixtral, {}, {}),
    "replicas": (tiny_llama, {}, REPLICAS),
}
LORA = {
    "4 bits": ({}, {"frozen_bits": 4}),
    "4 bits in replicas": ({}, {"frozen_bits": 4, **REPLICAS}),
    "16 bits": ({}, {}),
    "a head that is trained": ({"modules_to_save": ["lm_head"]}, {"frozen_bits": 8}),
    "a scale of its own": ({"use_rslora": True, "lora_alpha": 3}, {"frozen_bits": 4}),
}


def published(model: nn.Module, **how) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in publish_weights(model, **how)}


def saved_by_transformers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors in the file that ``save_pretrained`` writes of a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def publish_full(rank: int, names: list[str]) -> None:
    each_case(names, lambda name: publish_one(rank, name))


def publish_one(rank: int, name: str) -> None:
    make, shape, settings = FULL[name]
    accelerator, plugin, model, optimizer = prepare(make(**shape), mixed_precision="bf16", **settings)
    train_step(accelerator, model, optimizer, rank)
    traffic = plugin.handle_of(model).traffic
    traffic.reset()
    weights = published(model)
    first = traffic.cross_node_bytes
    assert same(published(model), weights)
    second = traffic.cross_node_bytes - first
    assert traffic.ranks_per_node * traffic.rollouts.cross_node == first + second
    assert traffic.ranks_per_node * traffic.rollouts.intra_node == traffic.intra_node_bytes
    assert (traffic.intra_node_bytes > 0) == (traffic.ranks_per_node > 1)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}

    read = seen_in_forward(model)
    train_step(accelerator, model, optimizer, rank)
    traffic.reset()
    seen_in_forward(model)
    if name == "no secondary shards":
        assert second == first > 0
    else:
        assert (first, second) == (traffic.cross_node_bytes, 0) and first > 0

    named = {key for key, _ in model.named_parameters()}
    assert named <= read.keys(), "weights that no module reads"
    if rank == 0:  # Transformers writes on this one alone
        expected = make(**shape)
        expected.load_state_dict({key: read[key] for key in named}, strict=False)
        assert same(weights, saved_by_transformers(expected.to(torch.bfloat16)))
    sums = {key: checksum(weight) for key, weight in weights.items()}
    of_ranks: list[dict | None] = [None] * 4
    dist.all_gather_object(of_ranks, sums)
    assert of_ranks == [sums] * 4
    reset_accelerate()


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.thorough("the others")
@pytest.mark.parametrize("are_main", [True, False], ids=["the main cases", "the others"])
def test_full_weights_are_those_of_the_next_forward_and_cross_once(are_main):
    run_ranks(publish_full, 4, [name for name in FULL if (name in ("tied", "delta", "experts")) == are_main])


def tiny_router() -> DeepseekV3ForCausalLM:
    """A model whose experts are chosen by a buffer."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    groups = {"n_group": 1, "topk_group": 1}
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    dims = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 64}
    return DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=2, **sizes, **heads, **experts, **groups, **dims))


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def publish_buffers(rank: int, folder: str) -> None:
    for adapt in (lambda model: model, with_adapter):
        accelerator, _, model, optimizer = prepare(adapt(tiny_router()))
        train_step(accelerator, model, optimizer, rank)
        (bias,) = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
        assert not published(model)[BIAS].any()
        bias += 0.25
        names = published(model)
        assert (names[BIAS] == 0.25).all()
        assert names.keys() == load_file(f"{folder}/model.safetensors").keys()
        if adapt is with_adapter:
            assert BIAS not in published(model, adapters="alone")
        reset_accelerate()


def test_buffers_of_the_files_are_published(tmp_path):
    tiny_router().save_pretrained(tmp_path)
    run_ranks(publish_buffers, 4, str(tmp_path))


def dense_merged(model: nn.Module, bits: int | None) -> dict[str, torch.Tensor]:
    """PEFT's merging of a dense model whose base has the values that its packed form decodes to."""
    dense, packed = copy.deepcopy(model), packed_copy(model, bits)
    for name, module in packed.named_modules():
        if isinstance(module, Packed):
            for leaf in module.packed_forms:
                dense.get_submodule(name).get_parameter(leaf).data.copy_(getattr(module, leaf).decode())
    return dense.merge_and_unload().state_dict()


def publish_lora(rank: int) -> None:
    each_case(LORA, publish_one_adapter)


def publish_one_adapter(name: str) -> None:
    adapter, settings = LORA[name]
    model = with_adapter(tiny_llama(), **adapter)
    merged = dense_merged(model, settings.get("frozen_bits"))
    alone = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    _, plugin, model, _ = prepare(model, **UNQUANTIZED, **settings)
    # The first use of all: ZeRO++ is applied by it. PEFT adds in another order of roundings, in fp32.
    torch.testing.assert_close(published(model), dict(merged), atol=1e-6, rtol=0)
    assert same(published(model, adapters="alone"), alone)
    traffic = plugin.handle_of(model).traffic
    traffic.reset()
    before = seen_in_forward(model)
    published(model)
    assert same(seen_in_forward(model), before) and traffic.cross_node_bytes == 0
    reset_accelerate()


@pytest.mark.thorough
def test_adapters_are_merged_as_peft_merges_them():
    run_ranks(publish_lora, 4)


FUSED = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


@pytest.mark.parametrize(
    ("make", "adapter"), [(tiny_llama, {"use_dora": True}), (tiny_mixtral, {"target_parameters": FUSED})]
)
def test_adapters_alone_have_the_names_of_peft_s_files(make, adapter):
    model = with_adapter(make(), **adapter)
    alone, expected = adapter_weights(model), get_peft_model_state_dict(model)
    assert sorted(weight.name for weight in alone) == sorted(expected)
    assert all(torch.equal(weight.read(), expected[weight.name]) for weight in alone)


# Settings, and how the adapters can be published: merged, alone, or in both ways.
OTHERS = {
    "LOHA": ({"r": 4}, "both"),
    "VERA": ({"r": 4}, "merged"),
    "OFT": ({"r": 8, "oft_block_size": 0}, "alone"),
    "HRA": ({"r": 4}, "alone"),
    "BOFT": ({"boft_block_size": 4}, "alone"),
    "ADALORA": ({"total_step": 10}, "alone"),
    "RANDLORA": ({"r": 4}, "merged"),
    "DELORA": ({"r": 4}, "merged"),
    "SHIRA": ({"r": 4}, "merged"),
    "VBLORA": ({"vector_length": 16, "num_vectors": 16}, "merged"),
}


def with_another_adapter(peft_type: str, make=tiny_llama, **settings) -> nn.Module:
    torch.manual_seed(1)
    # For BOFT, PEFT builds an extension with CXX=gcc, and where the build fails it leaves CXX so: what this process builds later,
    # such as a wheel of this package, would be linked without C++'s library.
    with mock.patch.dict(os.environ):
        model = get_peft_model(make(), get_peft_config({"peft_type": peft_type, **settings})).eval()
    for param in trainable(model):
        param.data.add_(torch.randn_like(param), alpha=0.1)
    return model


@pytest.mark.parametrize("peft_type", OTHERS)
def test_other_adapters_are_published_as_peft_has_them_or_refused(peft_type):
    settings, how = OTHERS[peft_type]
    model = with_another_adapter(peft_type, target_modules=["q_proj"], **settings)
    if how == "merged":
        with pytest.raises(ValueError, match=f'got {peft_type.lower()}.*Publish with adapters="merged"'):
            adapter_weights(model)
    else:
        weights = {weight.name: weight.read() for weight in adapter_weights(model)}
        torch.testing.assert_close(weights, get_peft_model_state_dict(model), atol=0, rtol=0)
    if how == "alone":
        with pytest.raises(ValueError, match=f"got {peft_type.lower()} in layer model.layers.0.self_attn.q_proj"):
            merged_weights(model)
    else:
        weights = {weight.name: weight.read() for weight in merged_weights(model)}
        torch.testing.assert_close(weights, dict(model.merge_and_unload().state_dict()), atol=1e-5, rtol=1e-5)


def tiny_gpt2() -> GPT2LMHeadModel:
    """A model whose layers (Conv1D) hold their weights transposed."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **size)).eval()


@pytest.mark.parametrize(
    ("peft_type", "settings"),
    [("LORA", {"r": 4}), ("FOURIERFT", {"n_frequency": 200}), ("WAVEFT", {"n_frequency": 192})],
)
@torch.no_grad()
def test_adapters_on_weights_that_lie_transposed_are_merged_as_the_model_computes_with_them(peft_type, settings):
    """Not as ``merge_and_unload``: that of PEFT 0.18 adds the delta of FourierFT and WaveFT as it would lie in a Linear."""
    settings |= {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    model, merged = with_another_adapter(peft_type, tiny_gpt2, **settings), tiny_gpt2()
    start, expected = merged(tokens()).logits, model(tokens()).logits
    merged.load_state_dict({weight.name: weight.read() for weight in merged_weights(model)}, strict=False)
    assert (expected - start).abs().max() > 0.01
    torch.testing.assert_close(merged(tokens()).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_2", "olora"])
def test_an_adapter_that_changed_its_base_is_published_merged_and_not_alone(initial):
    """An engine holds the base from disk, which still has what the adapter took out of its own."""
    model = with_adapter(tiny_llama(), init_lora_weights=initial)
    with pytest.raises(
        ValueError, match=f"init_lora_weights='{initial}' has changed.*Publish with adapters=\"merged\""
    ):
        adapter_weights(model)
    weights = {weight.name: weight.read() for weight in merged_weights(model)}
    torch.testing.assert_close(weights, dict(tiny_llama().state_dict()), atol=1e-5, rtol=1e-5)


def test_adapters_that_no_published_weight_would_hold_are_refused():
    """PyTorch's attention has its three projections in one weight of another name."""
    model = with_another_adapter("PROMPT_TUNING", num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="got PROMPT_TUNING, which adds inputs"):
        merged_weights(model)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2)})
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["attention"], init_lora_weights=False))
    with pytest.raises(ValueError, match="got one on attention, which has other weights"):
        merged_weights(model)


def train_and_send_versions(rank: int, folder: str) -> None:
    """After each of three steps a receiver has the published weights."""
    accelerator, _, model, optimizer = prepare(tiny_llama(), mixed_precision="bf16", qwz_bits=None)
    sender, receiver = UpdateSender(folder), UpdateReceiver(folder)
    for step in (1, 2, 3):
        train_step(accelerator, model, optimizer, seed=10 * rank + step)
        assert sender.publish(publish_weights(model)) == (step if rank == 0 else 0)
        accelerator.wait_for_everyone()
        receiver.update()
        assert receiver.version == step and same(receiver.weights, published(model))
        accelerator.wait_for_everyone()


def test_versions_of_a_sharded_model_are_sent_by_rank_0(tmp_path):
    run_ranks(train_and_send_versions, 4, str(tmp_path))


def refuse(rank: int) -> None:
    def publish_lora(adapter: dict, adapters: str = "merged", **shape) -> Callable[[], object]:
        return lambda: publish(with_adapter(tiny_llama(**shape), **adapter), adapters)

    def publish(model: nn.Module, adapters: str) -> None:
        reset_accelerate()
        _, _, model, _ = prepare(model, **UNQUANTIZED)
        next(publish_weights(model, adapters=adapters))

    each_refusal(
        {
            r"need a model under ZeRO\+\+": lambda: next(publish_weights(tiny_llama())),
            "DoraLinearVariant in layer.*merge it into the dense model": publish_lora({"use_dora": True}),
            # Merged, the one parameter would be two: PEFT itself warns of it.
            "lm_head.weight, which are one parameter": publish_lora(
                {"target_modules": ["lm_head"]}, tie_word_embeddings=True
            ),
            "embed_tokens.weight.*, which are one parameter": publish_lora(
                {"target_modules": ["embed_tokens"]}, tie_word_embeddings=True
            ),
            r"also trains biases of the base \(bias='lora_only'\).*adapters=\"merged\"": publish_lora(
                {"bias": "lora_only"}, "alone", attention_bias=True
            ),
            "expected one active adapter to publish alone, got none": lambda: publish(tiny_llama(), "alone"),
            "expected adapters 'merged' or 'alone', got 'both'": lambda: publish(tiny_llama(), "both"),
        }
    )


def test_what_cannot_be_published_is_refused():
    run_ranks(refuse, 4)


def publish_adapters_beside_their_base(rank: int) -> None:
    model = with_adapter(tiny_llama())
    expected = dense_merged(model, None)
    layers = model.get_base_model().model.layers
    for layer in layers:
        fully_shard(layer)
    apply_zeropp(fully_shard(model), {"ranks_per_node": 2, **UNQUANTIZED})
    num_gathered = set()
    for name, weight in publish_weights(model):
        num_gathered.add(sum(not isinstance(layer.mlp.up_proj.base_layer.weight, DTensor) for layer in layers))
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)
    assert max(num_gathered) == 1


@pytest.mark.thorough
def test_one_unit_is_gathered_at_a_time():
    run_ranks(publish_adapters_beside_their_base, 4)


def test_what_merging_replaces_is_put_back(monkeypatch):
    """As PEFT before 0.20 does it: the memory of a matrix, and the matrix of an embedding itself."""
    model = with_adapter(tiny_llama().bfloat16(), target_modules=["q_proj", "embed_tokens"])
    attention = model.get_base_model().model.layers[0].self_attn.q_proj
    embedding = model.get_base_model().model.embed_tokens

    def replace(adapter: str) -> None:
        for module in (*attention.lora_A.values(), *attention.lora_B.values()):
            module.weight.data = module.weight.data.clone()
        for matrices in (embedding.lora_embedding_A, embedding.lora_embedding_B):
            matrices[adapter] = nn.Parameter(matrices[adapter].clone())

    for layer in (attention, embedding):
        addend = Addend(layer, "default")
        before = [(id(param), param.data_ptr()) for param in addend.params()]
        monkeypatch.setattr(layer, "get_delta_weight", replace)
        addend.delta()
        assert [(id(param), param.data_ptr()) for param in addend.params()] == before and len(before) == 2
