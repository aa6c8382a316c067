"""Shared by the tests of rollouts: a tiny model on disk, GRPO's arguments, and what engines and forward passes compute with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.nn as nn
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from toy import LLAMA
from trainer_runs import ON_CPUS
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from hf_zeropp.frozen.modules import Packed

WORDS = [f"w{i}" for i in range(120)]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
LORA_SCALE = 2.0
LORA = {"r": 4, "lora_alpha": 4 * LORA_SCALE, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names)


def save_model(folder: Path, config: type[PretrainedConfig] = LlamaConfig, **overrides) -> str:
    """Write a Llama (or another model) and its tokenizer, which trainers and engines load. Heads have 32 channels."""
    torch.manual_seed(0)
    settings = LLAMA | {"vocab_size": len(SPECIAL + WORDS), "hidden_size": 128, "intermediate_size": 224}
    settings |= {"num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(config(**(settings | overrides))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def prompts(num: int, seed: int = 1) -> list[str]:
    ids = torch.randint(0, len(WORDS), (num, 4), generator=torch.Generator().manual_seed(seed))
    return [" ".join(WORDS[i] for i in row) for row in ids.tolist()]


def prompt_data() -> Dataset:
    return Dataset.from_dict({"prompt": prompts(64)})


def distinct_tokens(completion_ids: list[list[int]], **kwargs) -> list[float]:
    return [len(set(ids)) + ids[0] / len(WORDS) for ids in completion_ids]


ONLINE = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}
"""Arguments of GRPOConfig and RLOOConfig that other trainers do not have."""


def arguments_of_trl(folder: str, zeropp, **overrides) -> dict:
    """Arguments of every config of TRL."""
    settings = {"output_dir": folder, "fsdp_config": {"zeropp": zeropp}, "bf16": False, "gradient_checkpointing": False}
    return ON_CPUS | settings | overrides


def arguments(folder: str, zeropp, **overrides) -> dict:
    """Arguments of GRPOConfig and RLOOConfig for three steps with an engine, which change weights a lot."""
    steps = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "use_vllm": True}
    return arguments_of_trl(folder, zeropp, **steps, **ONLINE, **overrides)


def train_step(accelerator, model, optimizer, seed: int) -> None:
    tokens = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()


def seen_in_forward(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that a forward pass computes with, packed ones decoded, under the names of the base model, adapters merged.

    They are copied when the module that holds them begins its forward, and merged here by LoRA's formula.
    """
    seen: dict[str, torch.Tensor] = {}
    hooks = [module.register_forward_pre_hook(_look(seen, name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(input_ids=torch.tensor([[4, 5, 6]]))
    for hook in hooks:
        hook.remove()
    merged = {}
    for name, weight in seen.items():
        if ".lora_" not in name:
            layer = name.removesuffix(".base_layer.weight")
            if (up := seen.get(f"{layer}.lora_B.default.weight")) is not None:
                delta = (up @ seen[f"{layer}.lora_A.default.weight"]) * LORA_SCALE
                weight = (weight.float() + delta.float()).to(weight.dtype)
            merged[name.replace(".base_layer", "").removeprefix("base_model.model.")] = weight
    return merged


def _look(seen: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def look(module: nn.Module, args) -> None:
        for leaf, weight in _own_weights(module):
            seen[f"{name}.{leaf}"] = weight.detach().clone()

    return look


def _own_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    packed = module.packed_forms if isinstance(module, Packed) else {}
    yield from ((leaf, getattr(module, leaf).decode()) for leaf in packed)
    if not packed:
        yield from module.named_parameters(recurse=False)


def no_full_tensors() -> contextlib.AbstractContextManager:
    """Inside, ``full_tensor()``, TRL's gather over the whole world, is an error."""
    return mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("full_tensor() was called"))
