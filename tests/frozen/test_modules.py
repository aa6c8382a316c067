"""Packed modules on one process: what they compute, what they keep for backward, and what they refuse."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn
import torch.nn.utils.parametrize
from frozen_runs import packed_copy, tiny_llama, tiny_mixtral, tokens, trainable, with_adapter
from transformers import AutoModelForCausalLM

from hf_zeropp import ZeroPPQuantConfig, compat, quantize_frozen
from hf_zeropp.compat.seam import numbers_of
from hf_zeropp.frozen import modules
from hf_zeropp.frozen.modules import PackedEmbedding, PackedLinear, packed_modules
from hf_zeropp.frozen.packing import dense_modules, pack_weight, packable_weights
from hf_zeropp.frozen.weight import PackedWeight
from hf_zeropp.integrations.accelerate_frozen import drop_frozen, pack_base
from hf_zeropp.ops.frozen_format import FrozenFormat

pytestmark = pytest.mark.one_rank


def frozen_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(140, 60).requires_grad_(False)


@pytest.mark.parametrize("num_inputs", (1, 3, 40))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_forward_and_backward_equal_a_linear_layer_with_the_decoded_weight(num_inputs, dtype):
    packed = quantize_frozen(frozen_linear(), 4)
    twin = frozen_linear()
    twin.load_state_dict({"weight": packed.weight.decode(), "bias": packed.bias})
    twin.to(dtype)
    assert type(packed) is PackedLinear
    x, y = (
        torch.randn(2, num_inputs, 140, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        for _ in "xy"
    )
    ours, theirs = packed(x), twin(y)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=10 * tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("num_inputs", (1, 40))
def test_a_penalty_on_gradients_is_that_of_dense_layers(num_inputs):
    """The second backward pass needs the weights of all layers, and not the one that was decoded last."""
    torch.manual_seed(0)
    packed = nn.Sequential(*(nn.Linear(96, 96).requires_grad_(False) for _ in range(3)))
    dense = copy.deepcopy(packed)
    for layer, twin in zip(quantize_frozen(packed, 8), dense, strict=True):
        twin.weight.data.copy_(layer.weight.decode())
    found = []
    for model in (packed, dense):
        x = torch.randn(num_inputs, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).tanh().square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_the_scratch_is_freed_with_the_last_packed_module(monkeypatch):
    # Packed modules of other tests have another one.
    monkeypatch.setattr(modules, "_living", weakref.WeakValueDictionary())
    layers = [quantize_frozen(frozen_linear(), bits) for bits in (4, 8)]
    layers.append(copy.deepcopy(layers[0]))
    for layer in layers:
        layer(torch.ones(40, 140))
    scratch = layers[0].scratch
    assert scratch._buffers[torch.float32].numel() >= 60 * 140 and all(layer.scratch is scratch for layer in layers)
    ended = weakref.ref(scratch)
    del scratch, layer, layers[1:]
    gc.collect()
    assert ended() is layers[0].scratch
    layers.clear()
    gc.collect()
    assert ended() is None


def test_threads_decode_into_memory_of_their_own():
    """One thread would overwrite the weight that another one is multiplying by."""
    layer = quantize_frozen(frozen_linear(), 4)
    ours = layer.scratch.take(8, torch.float32)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(layer.scratch.take, 8, torch.float32).result()
    assert ours.data_ptr() != theirs.data_ptr()
    assert ours.data_ptr() == layer.scratch.take(8, torch.float32).data_ptr()


def test_a_trainable_bias_learns_beside_a_packed_weight():
    layer = frozen_linear()
    layer.bias.requires_grad_()
    quantize_frozen(layer, 8)
    layer(torch.ones(3, 140)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((60,), 3.0))


@pytest.mark.parametrize("shape", [(0, 140), (0, 3, 140), (2, 0, 140), (140,)])
def test_inputs_without_rows_or_a_batch_are_taken(shape):
    layer = quantize_frozen(frozen_linear(), 4)
    assert layer(torch.ones(shape)).shape == (*shape[:-1], 60)


def test_nothing_dense_is_kept_for_backward():
    saved = []
    x = torch.randn(50, 140, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        quantize_frozen(frozen_linear(), 4)(x)
    assert {tensor.dtype for tensor in saved} == {torch.uint8}


def test_the_weight_reads_as_a_tensor():
    packed = quantize_frozen(frozen_linear(), 4)
    weight = packed.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, PackedWeight)
    assert weight.shape == (60, 140) and weight.dtype == torch.float32 and not weight.requires_grad
    assert isinstance(weight.t(), PackedWeight), "views stay packed"
    torch.testing.assert_close(weight.t()[3:5].sum(), weight.decode().t()[3:5].sum())
    torch.testing.assert_close(weight.norm(dim=1), weight.decode().norm(dim=1))
    assert type(copy.deepcopy(weight)) is torch.Tensor


def test_packed_layers_copy_cast_and_save():
    packed = quantize_frozen(frozen_linear(), 4)
    x = torch.randn(2, 140)
    torch.testing.assert_close(copy.deepcopy(packed)(x), packed(x))
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), packed(x))
    cast = copy.deepcopy(packed).to(torch.bfloat16)
    assert torch.equal(cast.weight_codes, packed.weight_codes) and torch.equal(cast.weight_scales, packed.weight_scales)
    assert cast.weight.dtype == torch.bfloat16


def test_embeddings_decode_only_what_is_looked_up():
    torch.manual_seed(0)
    embedding = quantize_frozen(nn.Embedding(50, 64).requires_grad_(False), 8, pack_embeddings=True)
    assert type(embedding) is PackedEmbedding
    index = torch.tensor([[3, 3, 49], [0, 1, 2]])
    assert torch.equal(embedding(index), embedding.weight.decode()[index])


def test_tied_weights_are_packed_once():
    model = tiny_llama(tie_word_embeddings=True).requires_grad_(False)
    quantize_frozen(model, 4, pack_embeddings=True)
    assert model.lm_head.weight_codes is model.model.embed_tokens.weight_codes
    model.tie_weights()
    assert model.lm_head.weight_codes is model.model.embed_tokens.weight_codes


def test_a_tied_weight_decodes_as_the_other_does():
    layer, other = quantize_frozen(frozen_linear(), 8), quantize_frozen(frozen_linear(), 4)
    layer.weight = other.weight
    assert layer.weight_codes is other.weight_codes
    torch.testing.assert_close(layer.weight.decode(), other.weight.decode(), atol=0, rtol=0)


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_an_adapter_that_would_change_a_packed_base_is_refused(initial):
    with pytest.raises(RuntimeError, match="PiSSA, OLoRA, LoftQ.* pack it behind that"):
        with_adapter(quantize_frozen(tiny_llama().requires_grad_(False), 4), init_lora_weights=initial)
    quantize_frozen(with_adapter(tiny_llama(), init_lora_weights=initial), 4)


def test_single_tokens_are_trained_as_in_the_dense_model_where_the_head_is_tied():
    packed = quantize_frozen(tiny_llama(tie_word_embeddings=True).requires_grad_(False), 4, pack_embeddings=True)
    dense = tiny_llama(tie_word_embeddings=True).requires_grad_(False)
    for name, module in packed_modules(packed):
        dense.get_submodule(name).weight.data.copy_(module.weight.decode())
    models = [with_adapter(model, trainable_token_indices=[*range(40)]) for model in (packed, dense)]
    found = []
    for model in models:
        (tokens_trained,) = (param for name, param in model.named_parameters() if "trainable_tokens_delta" in name)
        tokens_trained.data.mul_(2)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        found.append((model(tokens()).logits, tokens_trained.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.skipif(numbers_of(compat.version_of("peft"), 2) < (0, 20), reason="PEFT itself asks for the embedding")
@pytest.mark.parametrize("bits", [None, 4])
def test_peft_adapts_a_model_that_ties_nothing_and_has_no_input_embedding(bits):
    """D-FINE is such a model. PEFT's function is replaced as soon as any model of the process was packed."""
    quantize_frozen(frozen_linear(), 4)
    model = packed_copy(tiny_llama(tie_word_embeddings=False).requires_grad_(False), bits)

    def no_embedding() -> nn.Module:
        raise NotImplementedError

    model.get_input_embeddings = no_embedding
    assert isinstance(with_adapter(model, target_modules=["q_proj"]).get_base_model(), type(model))


WRITES = {
    "assignment": lambda layer: setattr(layer, "weight", torch.zeros(60, 140)),
    "assignment to data": lambda layer: setattr(layer.weight, "data", torch.zeros(60, 140)),
    "addition to data": lambda layer: layer.weight.data.add_(1),
    "a view": lambda layer: setattr(layer, "weight", frozen_packed().weight.t()),
    "another shape": lambda layer: setattr(layer.weight, "data", torch.zeros(61, 140)),
    "a method": lambda layer: layer.weight.zero_(),
    "a view in place": lambda layer: layer.weight[0].zero_(),
    "out": lambda layer: torch.add(torch.ones(60, 140), 1.0, out=layer.weight),
    "a list": lambda layer: torch._foreach_zero_([layer.weight]),
    "a list with others": lambda layer: torch._foreach_add_([torch.ones(3), layer.weight], 1.0),
}


def frozen_packed() -> nn.Module:
    return quantize_frozen(frozen_linear(), 4)


@pytest.mark.parametrize("write", WRITES)
def test_a_packed_weight_is_not_written(write):
    layer = frozen_packed()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="A packed weight cannot be written.*merge_and_unload.*frozen_bits"):
        WRITES[write](layer)
    assert all(torch.equal(stored, before[name]) for name, stored in layer.state_dict().items())


def test_a_packed_weight_is_read_into_others():
    weight = frozen_packed().weight
    copies = [torch.zeros(60, 140)]
    torch._foreach_copy_(copies, [weight])
    assert torch.equal(copies[0], weight.decode())
    assert torch.equal(torch.zeros(60, 140).copy_(weight), weight.decode())


def test_a_merge_into_a_packed_base_is_refused_and_changes_nothing():
    model = quantize_frozen(with_adapter(tiny_llama()), 4)
    before = copy.deepcopy(model.state_dict())
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(RuntimeError, match="merge it into the dense model"):
            merge()
    assert all(torch.equal(stored, before[name]) for name, stored in model.state_dict().items())
    assert not any(getattr(module, "merged", False) for module in model.modules())


@pytest.mark.parametrize("implementation", ("eager", "grouped_mm"))
def test_fused_experts(implementation):
    model = tiny_mixtral(experts_implementation=implementation).requires_grad_(False)
    packed = packed_copy(model, 8)
    assert packed.model.layers[0].mlp.experts.gate_up_proj_codes.shape == (4, 192, 64)
    embeddings = model.get_input_embeddings()(tokens())
    ours, theirs = (embeddings.clone().requires_grad_() for _ in "ab")
    model(inputs_embeds=theirs).logits.square().sum().backward()
    packed(inputs_embeds=ours).logits.square().sum().backward()
    assert (ours.grad - theirs.grad).norm() < 0.05 * theirs.grad.norm()


def test_packing_a_trainable_weight_is_refused():
    with pytest.raises(ValueError, match="all parameters of this model are trainable"):
        quantize_frozen(tiny_llama())
    with pytest.raises(ValueError, match="Linear.weight is trainable"):
        pack_weight(nn.Linear(4, 4), "weight", FrozenFormat(4))


def test_training_a_packed_weight_is_refused():
    layer = quantize_frozen(frozen_linear(), 4)
    with pytest.raises(ValueError, match="cannot be trained"):
        layer.requires_grad_()
    with pytest.raises(ValueError, match="cannot be trained"):
        layer.weight.requires_grad_()
    with pytest.raises(ValueError, match="cannot be trained"):
        layer.weight.requires_grad = True
    layer.weight.requires_grad_(False).requires_grad = False


class Params4bit(nn.Parameter):
    """Named as bitsandbytes' class is."""


def test_a_base_quantized_by_another_library_is_refused():
    layer = frozen_linear()
    layer.weight = Params4bit(layer.weight.data, requires_grad=False)
    with pytest.raises(
        ValueError, match=r"weight was quantized by bitsandbytes \(Params4bit\).*ZeroPPQuantConfig\(bits=4\)"
    ):
        quantize_frozen(layer, 4)


def test_optimizers_lose_frozen_parameters_or_are_refused_with_those_of_before(caplog):
    model = with_adapter(tiny_llama())
    optimizer = torch.optim.AdamW(model.parameters())
    drop_frozen(optimizer, [model], frozen_bits=None)
    assert (
        f"{sum(not param.requires_grad for param in model.parameters())} frozen parameters (base_model." in caplog.text
    )
    assert {id(param) for param in optimizer.param_groups[0]["params"]} == {id(param) for param in trainable(model)}
    stale = torch.optim.AdamW(model.parameters())
    quantize_frozen(model, 4)
    with pytest.raises(ValueError, match="not a parameter of the model any more"):
        drop_frozen(stale, [model], frozen_bits=None)


def test_skipped_modules_stay_dense():
    skip = ["lm_head", "model.layers.0.mlp"]
    model = quantize_frozen(tiny_llama().requires_grad_(False), 4, skip=skip, pack_embeddings=True)
    assert type(model.model.embed_tokens) is PackedEmbedding
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear, "a skipped module is left with all inside"
    assert type(model.model.layers[1].mlp.up_proj) is PackedLinear
    assert type(model.model.layers[0].self_attn.q_proj) is PackedLinear


def test_skipped_modules_stay_dense_under_an_adapter():
    model = quantize_frozen(with_adapter(tiny_llama()), 4, skip=["layers.0.mlp.up_proj"])
    layers = model.base_model.model.model.layers
    assert type(layers[0].mlp.up_proj.base_layer) is nn.Linear
    assert type(layers[1].mlp.up_proj.base_layer) is PackedLinear


def test_what_loading_skipped_is_not_packed_later(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    config = ZeroPPQuantConfig(bits=4, skip=["lm_head"], pack_embeddings=True)
    model = with_adapter(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config))
    pack_base(model, bits=8, pack_embeddings=True)
    assert type(model.base_model.model.lm_head) is nn.Linear
    pack_base(dense := tiny_llama().requires_grad_(False), bits=8, pack_embeddings=True)
    assert type(dense.lm_head) is PackedLinear


@pytest.mark.skipif(not compat.is_at_least("peft", (0, 20)), reason="older PEFT puts no adapters on fused experts")
def test_adapters_on_packed_experts_are_the_same_whether_packing_came_before_or_after():
    packed_last = quantize_frozen(with_adapter(tiny_mixtral()), 4)
    packed_first = with_adapter(quantize_frozen(tiny_mixtral().requires_grad_(False), 4))
    names = [name for name, param in packed_last.named_parameters() if param.requires_grad]
    assert any("experts" in name for name in names)
    assert names == [name for name, param in packed_first.named_parameters() if param.requires_grad]
    torch.testing.assert_close(packed_first(tokens()).logits, packed_last(tokens()).logits)


def test_a_parametrization_of_packed_experts_leaves_them_as_they_were():
    model = quantize_frozen(tiny_mixtral().requires_grad_(False), 4)
    experts = model.model.layers[0].mlp.experts
    kind, names, weight = type(experts), [name for name, _ in experts.named_parameters()], experts.down_proj.decode()
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", Doubled())
    torch.testing.assert_close(experts.down_proj, 2 * weight)
    torch.nn.utils.parametrize.remove_parametrizations(experts, "down_proj", leave_parametrized=False)
    assert type(experts) is kind and [name for name, _ in experts.named_parameters()] == names
    assert torch.equal(experts.down_proj.decode(), weight)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_small_and_short_rows_stay_dense():
    model = nn.Module()
    model.positions = nn.Parameter(torch.zeros(1, 16, 32), requires_grad=False)
    model.conv = nn.Conv1d(32, 32, 4).requires_grad_(False)
    model.experts = nn.Parameter(torch.zeros(2, 16, 32), requires_grad=False)
    assert [name for ((_, name),) in packable_weights(model, dense_modules(model), frozen_only=True)] == ["experts"]
