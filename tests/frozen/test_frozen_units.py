"""Which frozen parameters form a unit, and what reads them, on 4 ranks (2 nodes)."""

from __future__ import annotations

import itertools

import frozen_runs
import pytest
import torch
import torch.nn as nn
import trl.trainer.utils
from accelerate import Accelerator
from frozen_runs import (
    UNQUANTIZED,
    packed_copy,
    reset_accelerate,
    tiny_llama,
    tiny_mixtral,
    tokens,
    trainable,
    with_adapter,
)
from harness import Scenarios, scenarios_of
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig, GptOssForCausalLM

from hf_zeropp import ZeroPPPlugin, compat
from hf_zeropp.frozen.units import find_frozen_units
from hf_zeropp.frozen.weight import PackedWeight
from hf_zeropp.traffic import GATHER_FROZEN

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


def tiny_gpt_oss() -> GptOssForCausalLM:
    """A model whose attention owns bare parameters (``sinks``) beside linear layers."""
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=8, sliding_window=8))


def prepare(model: nn.Module, **zeropp):
    """As ``frozen_runs.prepare``, in processes that have prepared other models before."""
    reset_accelerate()
    return frozen_runs.prepare(model, **zeropp)


def gap_to_unsharded(
    model: nn.Module, bits: int | None, rank: int, pack_embeddings: bool = False, **inputs
) -> tuple[float, dict]:
    """Train two steps beside the unsharded model. Returns the largest difference of a loss, and the bytes of the second step."""
    reference = packed_copy(model, bits, pack_embeddings=pack_embeddings)
    settings = {"frozen_bits": bits, "pack_embeddings": pack_embeddings, **UNQUANTIZED}
    accelerator, plugin, model, optimizer = prepare(model, **settings)
    reference_optimizer = torch.optim.SGD(trainable(reference), lr=0.05)
    batch, gap = tokens(), 0.0
    for _ in range(2):
        plugin.handle_of(model).traffic.reset()
        loss = model(input_ids=batch[rank : rank + 1], labels=batch[rank : rank + 1], **inputs).loss
        accelerator.backward(loss)
        expected = reference(input_ids=batch, labels=batch, **inputs).loss
        expected.backward()
        gap = max(gap, abs(accelerator.reduce(loss.detach(), "mean") - expected).item())
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    return gap, plugin.handle_of(model).traffic.counts


def meshes(model: nn.Module) -> dict[str, int]:
    return {name: param.device_mesh.size() for name, param in model.named_parameters()}


def scenario_adapters_beside_bare_parameters_are_sharded_over_the_world_and_learn(rank: int) -> None:
    for bits in (None, 4):
        *_, model, _ = prepare(with_adapter(tiny_gpt_oss()), frozen_bits=bits)
        sizes = meshes(model)
        assert {size for name, size in sizes.items() if "lora" in name} == {4}
        assert {size for name, size in sizes.items() if "lora" not in name} == {2}
        assert any(name.endswith("sinks") for name in sizes)
    assert gap_to_unsharded(with_adapter(tiny_gpt_oss()), None, rank)[0] < 1e-5


def scenario_bare_parameters_alone_may_be_frozen(rank: int) -> None:
    """Bits change nothing then: there is nothing to pack."""
    model, other = tiny_gpt_oss(), tiny_gpt_oss()
    for name, param in (*model.named_parameters(), *other.named_parameters()):
        param.requires_grad_(not name.endswith("sinks"))
    assert gap_to_unsharded(model, None, rank)[0] < 1e-5
    *_, model, _ = prepare(other, frozen_bits=4)
    assert {size for name, size in meshes(model).items() if name.endswith("sinks")} == {2}


def scenario_trainable_biases_leave_packed_weights_in_the_node(rank: int) -> None:
    model = with_adapter(tiny_llama(attention_bias=True, mlp_bias=True), bias="lora_only")
    assert any(name.endswith("base_layer.bias") and param.requires_grad for name, param in model.named_parameters())
    count = sum(param.numel() for param in trainable(model))
    gap, counts = gap_to_unsharded(model, 4, rank)
    assert gap < 1e-5
    assert counts[GATHER_FROZEN].cross_node == 0
    # Adapters and biases, in fp32, are gathered once and reduced once: half of them from the other node. The rest is padding.
    assert sum(each.cross_node for each in counts.values()) < 1.4 * 2 * 4 * count / 2


def adapters_on_packed_experts_learn_as_unsharded(rank: int) -> None:
    model = with_adapter(tiny_mixtral())
    assert any("experts" in name and "lora_A" in name for name, _ in model.named_parameters())
    assert gap_to_unsharded(model, 4, rank)[0] < 1e-5


def a_fused_loss_reads_the_frozen_head(rank: int) -> None:
    from trl.trainer.utils import add_fused_lm_head

    for tied, packed in itertools.product((False, True), repeat=2):
        model = tiny_llama(tie_word_embeddings=tied)
        add_fused_lm_head(model)
        assert gap_to_unsharded(with_adapter(model), 4, rank, packed, fused_lm_head=True)[0] < 1e-5


def scenario_a_sharded_packed_weight_decodes_whole(rank: int) -> None:
    reference = packed_copy(tiny_llama().requires_grad_(False), 4, pack_embeddings=True)
    *_, model, _ = prepare(with_adapter(tiny_llama()), frozen_bits=4, pack_embeddings=True)
    weight, expected = model.get_output_embeddings().weight, reference.lm_head.weight.decode()
    assert isinstance(weight, PackedWeight) and isinstance(weight.codes, DTensor)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(hidden @ weight.t(), hidden @ expected.t())
    torch.testing.assert_close(weight.norm(dim=1), expected.norm(dim=1))


def scenario_modules_that_the_user_lets_accelerate_ignore_stay_whole(rank: int) -> None:
    for ignored in (r".*embed_tokens", None):
        reset_accelerate()
        model = with_adapter(tiny_llama())
        modules = ignored or [model.get_input_embeddings()]
        plugin = ZeroPPPlugin(zeropp={"ranks_per_node": 2}, ignored_modules=modules)
        accelerator = Accelerator(fsdp_plugin=plugin)
        model, _ = accelerator.prepare(model, torch.optim.SGD(trainable(model), lr=0.05))
        whole = {name for name, param in model.named_parameters() if not isinstance(param, DTensor)}
        assert whole == {"base_model.model.model.embed_tokens.weight"}
        model(input_ids=tokens()[:1]).logits.sum().backward()


def scenario_optimizers_built_over_all_parameters(rank: int) -> None:
    """They lose the frozen ones, or are refused where those were packed."""
    for bits in (None, 4):
        reset_accelerate()
        model = with_adapter(tiny_llama())
        accelerator = Accelerator(fsdp_plugin=ZeroPPPlugin(zeropp={"ranks_per_node": 2, "frozen_bits": bits}))
        optimizer = torch.optim.AdamW(model.parameters())
        if bits is None:
            _, optimizer = accelerator.prepare(model, optimizer)
            assert sum(len(group["params"]) for group in optimizer.param_groups) == 28
        else:
            with pytest.raises(ValueError, match="The optimizer holds.*if param.requires_grad"):
                accelerator.prepare(model, optimizer)


def critic_after_lora(make_critic, **settings) -> nn.Module:
    """Prepare a model with frozen weights, and then one without, both of one Accelerator. Returns the latter."""
    reset_accelerate()
    accelerator = Accelerator(fsdp_plugin=ZeroPPPlugin(zeropp={"ranks_per_node": 2}, **settings))
    model = with_adapter(tiny_llama())
    accelerator.prepare(model, torch.optim.SGD(trainable(model), lr=0.05))
    critic = make_critic()
    return accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.05))[0]


def scenario_a_later_model_without_frozen_weights_has_the_users_ignored_modules(rank: int) -> None:
    critic = critic_after_lora(tiny_llama, ignored_modules=r".*embed_tokens")
    whole = {name for name, param in critic.named_parameters() if not isinstance(param, DTensor)}
    assert whole == {"model.embed_tokens.weight"}


def scenario_a_later_model_without_frozen_weights_gets_those_of_rank_0(rank: int) -> None:
    def with_values_on_rank_0() -> nn.Module:
        model = tiny_llama()
        for param in model.parameters() if rank != 0 else ():
            nn.init.zeros_(param)
        return model

    critic = critic_after_lora(with_values_on_rank_0, cpu_ram_efficient_loading=True)
    for (name, param), expected in zip(critic.named_parameters(), tiny_llama().parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, msg=name)


def scenario_an_interrupted_forward_pass_leaves_nothing_behind(rank: int) -> None:
    """Ctrl-C, for which PyTorch calls no hook. Training enters at the PeftModel, generation at the model inside."""
    *_, model, _ = prepare(with_adapter(tiny_llama()), frozen_bits=4)
    inner, batch = model.get_base_model(), tokens()[:1]

    def train() -> torch.Tensor:
        return model(input_ids=batch).logits

    def generate() -> torch.Tensor:
        return model.generate(input_ids=batch, max_new_tokens=3, min_new_tokens=3, do_sample=False)

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    expected = {train: train(), generate: generate()}
    for interrupted, later in ((train, generate), (generate, train)):
        with pytest.raises(KeyboardInterrupt), inner.model.norm.register_forward_pre_hook(interrupt):
            interrupted()
        for _ in range(2):
            torch.testing.assert_close(later(), expected[later])
        if later is train:
            later().sum().backward()
        # Before torch 2.13, FSDP2 frees such a unit with the next forward pass that begins where the interrupted one did.
        if compat.is_at_least("torch", (2, 13)):
            assert isinstance(inner.lm_head.weight, DTensor), "the unit is freed"


class Holder(nn.Module):
    """A module of a user's that holds PEFT's wrapper, as PPO's roles do."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = with_adapter(tiny_llama())
        self.head = nn.Linear(64, 1)
        self._no_split_modules = self.lm._no_split_modules

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lm(input_ids=input_ids, output_hidden_states=True).hidden_states[-1])

    def generate(self, **kwargs) -> torch.Tensor:
        return self.lm.generate(**kwargs)


def scenario_generation_enters_at_a_model_that_a_module_holds(rank: int) -> None:
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    reference = packed_copy(Holder(), 4)
    *_, model, _ = prepare(Holder(), frozen_bits=4, **UNQUANTIZED)
    batch = tokens()[:1]
    assert torch.equal(model.generate(input_ids=batch, **settings), reference.generate(input_ids=batch, **settings))
    torch.testing.assert_close(model(batch), reference(batch), atol=1e-5, rtol=1e-5)


# Older PEFT puts no adapters on fused experts for "all-linear", and older TRL has no fused head.
SINCE = [adapters_on_packed_experts_learn_as_unsharded] if compat.is_at_least("peft", (0, 20)) else []
SINCE += [a_fused_loss_reads_the_frozen_head] if hasattr(trl.trainer.utils, "add_fused_lm_head") else []

SCENARIOS = Scenarios(4, [*scenarios_of(__name__), *SINCE])


@pytest.mark.thorough("adapters_beside_bare_parameters*")
@SCENARIOS.parametrize
def test_frozen_units(scenario):
    SCENARIOS.check(scenario)


@pytest.mark.parametrize("tied", (False, True))
def test_parameters_are_grouped_by_the_block_around_them(tied):
    model = with_adapter(tiny_llama(tie_word_embeddings=tied))
    base = model.get_base_model()
    found = find_frozen_units(model, [*base.model.layers, base.get_input_embeddings()])
    # Two blocks, the embedding, and norm and head with the model; a tied embedding is used in two places, so it goes there too.
    assert [unit.owner for unit in found if unit.owner is not model] == [
        *([] if tied else [base.model.embed_tokens]),
        *base.model.layers,
    ]
    (rest,) = (unit for unit in found if unit.owner is model)
    assert [len(places) for places in rest.params] == ([2, 1] if tied else [1, 1])
    assert not any(getattr(module, name).requires_grad for unit in found for ((module, name), *_) in unit.params)
