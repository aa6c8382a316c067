"""Shared by the tests of frozen weights: a tiny Llama, adapters on it, and the unsharded model to compare with.

No number of ranks divides a vocabulary of 97, and no block a feed-forward of 286. So ranks hold different numbers of rows,
and the last block of a row is shorter than the others.
"""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from accelerate import Accelerator, ParallelismConfig
from peft import LoraConfig, PeftModel, get_peft_model
from toy import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_zeropp import ZeroPPPlugin, quantize_frozen

VOCAB = 97
REPLICAS = {"parallelism": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), "ranks_per_node": 1}
"""Arguments of ``prepare``: two replicas of two nodes, with one rank each."""

UNQUANTIZED = {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None}


def tiny_llama(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = LLAMA | {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 286, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def tiny_mixtral(**overrides) -> MixtralForCausalLM:
    """A model with experts fused into 3-D tensors."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    }
    return MixtralForCausalLM(MixtralConfig(**(settings | overrides)))


def with_adapter(model: nn.Module, adapters: tuple[str, ...] = ("default",), **settings) -> PeftModel:
    """Put adapters on all linear layers, with weights that change the output from the start."""
    torch.manual_seed(1)
    settings = {"target_modules": "all-linear", "init_lora_weights": False} | settings
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(model, config, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, config)
    return model


def packed_copy(model: nn.Module, bits: int | None, **settings) -> nn.Module:
    """A copy of ``model``, packed in ``bits`` and not sharded."""
    model = copy.deepcopy(model)
    return model if bits is None else quantize_frozen(model, bits, **settings)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def prepare(
    model: nn.Module,
    *,
    ranks_per_node: int = 2,
    mixed_precision: str = "no",
    ram_efficient=False,
    parallelism: ParallelismConfig | None = None,
    **zeropp,
):
    """Shard ``model`` over nodes of ``ranks_per_node``. Returns the accelerator, its plugin, the model, an optimizer."""
    plugin = ZeroPPPlugin(zeropp={"ranks_per_node": ranks_per_node, **zeropp}, cpu_ram_efficient_loading=ram_efficient)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=mixed_precision, parallelism_config=parallelism)
    optimizer = torch.optim.SGD(trainable(model), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, plugin, model, optimizer


def reset_accelerate() -> None:
    """Let the same processes build another Accelerator."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=False)


def tokens(num_sequences: int = 4, length: int = 9, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, VOCAB, (num_sequences, length), generator=torch.Generator().manual_seed(seed))
