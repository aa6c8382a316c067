"""Tiny models of every architecture that Transformers can build from a config, and inputs for them.

A family is named by its ``model_type``. Its config is the class's default, with every size that has a usual name made small,
in the config and in those inside it (text, vision, audio). ``OVERRIDES`` holds what a family needs besides.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 97
LENGTH = 12
IMAGE = 32
"""Pixels of an image's side."""

# Sizes, each with the names that configs give it. A name that a config does not have is left out.
_SIZES: dict[int, str] = {
    VOCAB: "vocab_size",
    32: "hidden_size d_model n_embd dim embed_dim embedding_size image_size",
    48: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim",
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    64: "max_position_embeddings n_positions max_source_positions max_target_positions",
    16: "num_mel_bins kv_lora_rank q_lora_rank qk_head_dim mamba_d_head",
    8: """
        head_dim d_kv patch_size sliding_window qk_rope_head_dim qk_nope_head_dim v_head_dim state_size
        mamba_d_state linear_key_head_dim linear_value_head_dim
    """,
    4: """
        num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads mamba_n_heads
        num_experts num_local_experts n_routed_experts mamba_chunk_size linear_num_value_heads
    """,
    2: """
        num_hidden_layers num_layers n_layer n_layers num_decoder_layers encoder_layers decoder_layers depth
        num_key_value_heads num_experts_per_tok num_experts_per_token linear_num_key_heads
    """,
    1: "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups",
}
_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_token_id": 5,
    "image_token_index": 5,
    "video_token_id": 6,
    "audio_token_id": 7,
    "audio_token_index": 7,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()} | _TOKENS
SMALL |= {"tie_word_embeddings": False, "router_aux_loss_coef": 0.0, "scale_embedding": False}

Inputs = Callable[[PretrainedConfig, torch.Generator], dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: its ``model_type``.
        kind: what it is for, a key of ``KINDS``.
    """

    name: str
    kind: str

    def model(self) -> PreTrainedModel:
        """Return the tiny model, the same for every call."""
        torch.manual_seed(0)
        config = small_config(CONFIG_MAPPING[self.name], OVERRIDES.get(self.name, {}))
        cls = CLASSES.get(self.name)
        auto = getattr(transformers, KINDS[self.kind].auto)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(transformers, cls)(config) if cls else auto.from_config(config)
        return model.float().train()

    def inputs(self, model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
        """Return one sequence, image or sound with labels."""
        make = INPUTS.get(self.name, KINDS[self.kind].inputs)
        return make(model.config, torch.Generator().manual_seed(seed))


def small_config(cls: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    """Return the config class's defaults with small sizes, and without any randomness."""
    defaults = cls()
    sub_classes = {key: type(getattr(defaults, key, None)) for key in cls.sub_configs}
    values = {key: value for key, value in SMALL.items() if hasattr(defaults, key)}
    for key, value in vars(defaults).items():
        if isinstance(value, float) and ("drop" in key or key in ("mask_time_prob", "mask_feature_prob")):
            values[key] = 0.0
    for key, sub in sub_classes.items():
        if isinstance(sub, type) and issubclass(sub, PretrainedConfig):
            values[key] = small_config(sub, overrides.get(key, {})).to_dict()
    values |= {key: value for key, value in overrides.items() if key not in sub_classes}
    writable = {key: value for key, value in values.items() if not isinstance(getattr(cls, key, None), property)}
    if defaults.is_encoder_decoder:
        writable |= {"decoder_start_token_id": 1}
    return cls(**writable)


# --------------------------------------------------------------------------------------------------------------- inputs


def _ids(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(10, VOCAB, (1, LENGTH), generator=generator)


def text(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A sequence that is its own labels."""
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def pair(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A sequence, and another as labels."""
    return {"input_ids": _ids(generator), "labels": _ids(generator)}


def image(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An image and its class."""
    size = config.image_size if isinstance(getattr(config, "image_size", None), int) else IMAGE
    pixels = torch.randn(1, getattr(config, "num_channels", 3), size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(2, (1,), generator=generator)}


def image_and_text(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An image of 16 patches, as 16 tokens before a text."""
    ids = torch.cat([torch.full((1, 16), 5), _ids(generator)], dim=1)
    pixels = torch.randn(1, 3, IMAGE, IMAGE, generator=generator)
    labels = ids.masked_fill(ids == 5, -100)
    return {"input_ids": ids, "pixel_values": pixels, "labels": labels}


def sound(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A wave and its class."""
    return {
        "input_values": torch.randn(1, 2000, generator=generator),
        "labels": torch.randint(2, (1,), generator=generator),
    }


def speech(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A spectrogram and its text."""
    return {"input_features": torch.randn(1, 16, 128, generator=generator), "labels": _ids(generator)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """The common properties of the families of a kind: the class that builds the model, PEFT's task, and inputs."""

    auto: str
    task: str | None
    inputs: Inputs


KINDS = {
    "causal": Kind("AutoModelForCausalLM", "CAUSAL_LM", text),
    "encoder": Kind("AutoModelForMaskedLM", None, text),
    "encoder-decoder": Kind("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", pair),
    "vision": Kind("AutoModelForImageClassification", None, image),
    "audio": Kind("AutoModelForAudioClassification", None, sound),
    "speech": Kind("AutoModelForSpeechSeq2Seq", None, speech),
    "multimodal": Kind("AutoModelForImageTextToText", "CAUSAL_LM", image_and_text),
}


def patches(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A text after 4 tokens for an image of 4 x 4 patches (Siglip2's inputs: flat patches, and the grid's shape)."""
    found = image_and_text(config, generator)
    return found | {
        "input_ids": found["input_ids"][:, 12:],
        "labels": found["labels"][:, 12:],
        "pixel_values": torch.randn(1, 16, 3 * 8 * 8, generator=generator),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }


def grid(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A text after 4 tokens for an image of 4 x 4 patches (Qwen-VL's inputs: patches of two frames, merged 2 x 2)."""
    vision = config.vision_config
    found = image_and_text(config, generator)
    ids = torch.cat([torch.full((1, 1), 8), found["input_ids"][:, 12:]], dim=1)
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 5, -100),
        "pixel_values": torch.randn(16, width, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 5).long(),
    }


def sound_and_text(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A spectrogram as 32 tokens, and a text."""
    ids = torch.cat([torch.full((1, 32), 7), _ids(generator)], dim=1)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 7, -100),
        "input_features": torch.randn(1, 16, 128, generator=generator),
        "feature_attention_mask": torch.ones(1, 128, dtype=torch.long),
        "attention_mask": torch.ones_like(ids),
    }


def spectrogram(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A spectrogram and its class."""
    return sound(config, generator) | {"input_values": torch.randn(1, 64, 16, generator=generator)}


def wave_and_text(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A wave and its text."""
    return {"input_values": torch.randn(1, 4000, generator=generator), "labels": _ids(generator)}


def frames_and_text(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A spectrogram, frame by frame, and its text."""
    features = torch.randn(1, 64, config.input_feat_per_channel, generator=generator)
    return {"input_features": features, "labels": _ids(generator)}


def image_with_types(config: PretrainedConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Gemma's inputs: a text that says which tokens are an image's."""
    found = image_and_text(config, generator)
    return found | {"token_type_ids": (found["input_ids"] == 5).long()}


CLASSES = {"deit": "DeiTForImageClassification"}
INPUTS: dict[str, Inputs] = {
    "lfm2_vl": patches,
    "qwen2_audio": sound_and_text,
    "audio-spectrogram-transformer": spectrogram,
    "moonshine": wave_and_text,
    "speech_to_text": frames_and_text,
    "gemma3": image_with_types,
    "qwen2_vl": grid,
    "qwen2_5_vl": grid,
    "qwen3_vl": grid,
    "qwen3_5": grid,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN_VISION = {
    "out_hidden_size": 32,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [0],
}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen3_next": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_5": {
        "text_config": {
            **_MIXED,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0},
        },
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
    },
    "qwen3_vl": {"text_config": _MROPE, "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16}},
    "qwen2_vl": {"text_config": _MROPE, "vision_config": {"hidden_size": 32, "mlp_ratio": 2}},
    "qwen2_5_vl": {"text_config": _MROPE, "vision_config": {**_QWEN_VISION, "window_size": 16}},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "intermediate_size": 48,
        "activation_sparsity_pattern": None,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma3": {"mm_tokens_per_image": 16, "vision_config": {"vision_use_head": False}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 4,
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 2, "attention_head_dim": 16},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "falcon": {"new_decoder_architecture": False},
    "internvl": {
        "downsample_ratio": 1.0,
        "image_seq_length": 16,
        "vision_config": {"image_size": [IMAGE, IMAGE], "patch_size": [8, 8]},
    },
    "lfm2_vl": {
        "downsample_factor": 2,
        "text_config": {"layer_types": ["conv", "full_attention"]},
        "vision_config": {"num_patches": 16},
    },
    "qwen2_audio": {"audio_config": {"max_source_positions": 64}},
    "paligemma": {"projection_dim": 32, "vision_config": {"vision_use_head": False}},
    "audio-spectrogram-transformer": {"max_length": 64, "frequency_stride": 8, "time_stride": 8, "patch_size": 8},
}
