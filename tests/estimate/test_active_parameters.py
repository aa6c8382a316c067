"""The parameters that a token meets in a mixture of experts, from the model's config, beside what its authors publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    DbrxConfig,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from hf_zeropp import cli
from hf_zeropp.integrations.pretrained_shape import active_share, build_model

QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
)  # fmt: skip
PUBLISHED = {
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5e9, 3.3e9),
    "Mixtral 8x7B": (MixtralConfig(intermediate_size=14336, num_key_value_heads=8), 46.7e9, 12.9e9),
    "DeepSeek-V3": (DeepseekV3Config(), 671e9, 37e9),
    "gpt-oss-120b": (GptOssConfig(), 117e9, 5.1e9),
    "DBRX": (
        DbrxConfig(
            d_model=6144, n_layers=40, n_heads=48, vocab_size=100352,
            attn_config={"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000.0},
            ffn_config={"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}, tie_word_embeddings=False,
        ),
        132e9,
        36e9,
    ),
    "ERNIE-4.5-21B-A3B": (Ernie4_5_MoeConfig(), 21.8e9, 3e9),
}  # fmt: skip
"""Configs, with all parameters and those of a token as their authors round them. Some do not count embeddings."""


def counts(config: PretrainedConfig) -> tuple[float, float]:
    with torch.device("meta"):
        model = build_model(config)
    total = sum(param.numel() for param in model.parameters())
    return total, total * active_share(model, config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_active_parameters_are_those_that_authors_publish(name: str) -> None:
    config, published_total, published_active = PUBLISHED[name]
    total, active = counts(config)
    assert total == pytest.approx(published_total, rel=0.03)
    assert active == pytest.approx(published_active, rel=0.16 if "gpt" in name or "ERNIE" in name else 0.04)


def test_a_dense_model_has_no_experts() -> None:
    total, active = counts(LlamaConfig(num_hidden_layers=2))
    assert active == total


def test_the_command_reads_them_from_the_config(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Qwen3-30B-A3B computes a tenth of what a dense model of its size would."""
    QWEN3_30B.save_pretrained(tmp_path)
    flags = ["--world", "64", "--gpu", "h100", "--network", "3.2tbit", "--batch-tokens", "16384", "--json"]
    seconds = []
    for active in ([], ["--active", "30B"]):
        cli.main(["estimate", str(tmp_path), *flags, *active])
        times = json.loads(capsys.readouterr().out)["times"]
        seconds.append(next(row["step_s"] for row in times if row["method"] == "FSDP2"))
    assert seconds[0] < 0.5 * seconds[1]
