"""A part of the zoo that takes seconds: one family of each sort, in the modes that differ for it.

``bash scripts/zoo.sh`` runs all families in all modes.
"""

from __future__ import annotations

import pytest
from expected import ALL, expected_failure
from harness import selected
from zoo import run

PART = {
    "LoRA 4 bit": ("gpt_oss mixtral deepseek_v3 qwen3_next gemma3n_text mamba2 vit gemma3 llava lfm2_vl"),
    "LoRA 16 bit": "gpt_oss jamba",
    "unquantized": "qwen2_audio vit t5 bert",
    "default": "siglip",
    "generate": "llama qwen2_audio whisper t5",
    "generate LoRA 4 bit": "mixtral llava",
}
CASES = [(family, mode) for mode, names in PART.items() for family in ALL if family.name in names.split()]


@pytest.fixture(scope="module")
def outcomes(request):
    """The results of all cases that this run of pytest has selected, from one start of the ranks."""
    return run(selected(request, "case"))


@pytest.mark.thorough(
    "siglip*",
    "[!l]*, LoRA 4 bit",
    "lfm2*",
    "*LoRA 16 bit",
    "vit*",
    "bert*",
    "whisper*",
    "qwen2_audio, generate",
    "llava, generate*",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}, {case[1]}")
def test_a_family_trains_and_generates_as_unsharded(outcomes, case):
    family, mode = case
    outcome = outcomes[case]
    if reason := expected_failure(family, mode):
        assert not outcome.is_ok(mode), f"works, although expected to fail: {reason}"
    else:
        assert outcome.is_ok(mode), f"gap {outcome.gap}, {outcome.num_other_tokens} other tokens\n{outcome.trace}"
