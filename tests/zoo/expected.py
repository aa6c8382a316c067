"""The families of the zoo, those that are not expected to work in some mode, and those that are not in it."""

from __future__ import annotations

from families import Family

_BY_KIND = {
    "causal": """
        apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5
        ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe
        gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_moe
        jamba jetmoe lfm2 llama mamba mamba2 minimax minimax_m2 mistral mixtral mpt nemotron nemotron_h olmo olmo2 olmo3 olmoe
        openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rwkv
        seed_oss smollm3 stablelm starcoder2 xglm zamba zamba2
    """,
    "encoder": """
        albert bert camembert deberta deberta-v2 distilbert electra ernie esm megatron-bert mobilebert modernbert mpnet
        rembert roberta roformer xlm-roberta
    """,
    "encoder-decoder": """
        bart blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 pegasus plbart qwen2_audio switch_transformers t5 umt5
    """,
    "vision": "beit deit dinov2 dinov2_with_registers ijepa siglip vit vit_msn",
    "audio": "audio-spectrogram-transformer hubert unispeech wav2vec2 wavlm",
    "speech": "moonshine speech_to_text whisper",
    "multimodal": "gemma3 internvl lfm2_vl llava paligemma qwen2_5_vl qwen2_vl qwen3_5 qwen3_vl vipllava",
}
ALL = [Family(name, kind) for kind, names in _BY_KIND.items() for name in names.split()]

NOT_BUILT = {
    "gemma3n (with images)": "its vision tower needs timm; gemma3n_text is above",
    "swin, swinv2, convnext, resnet": "stages of growing width, which the generic sizes do not describe",
    "idefics, llava_next, llava_onevision, mistral3, kosmos-2, blip": "inputs that only their processors make",
    "models with code on the hub": "nothing is downloaded here",
}
"""Architectures without a tiny model here, with the reason."""

_MOBILEBERT = "Its head reads the weights of two layers whose forwards do not run, one of them the input embedding's."

# By family or by kind, and by the words that all failing modes have in common. Stock modes need no entry.
_FAILURES = {
    (
        "phimoe",
        "LoRA",
    ): "PEFT adapts its router, a linear layer that returns a tuple, and takes the tuple for a tensor.",
    ("rwkv", "default"): (
        "Its embeddings begin at 1e-4, under a layer norm. A step of SGD makes the rows of a batch 10 000 times as large, and "
        "the rows beside them, in the same INT8 block, round to zero. A tiny model alone has several rows in a block."
    ),
    ("mobilebert", "unquantized"): _MOBILEBERT,
    ("mobilebert", "default"): _MOBILEBERT,
}


def expected_failure(family: Family, mode: str) -> str | None:
    """Return why the family is expected to fail in this mode; None where it is to work."""
    names = (family.name, family.kind)
    return next((reason for (name, part), reason in _FAILURES.items() if name in names and part in mode), None)
