"""Quality of frozen weights in 8 and 4 bits beside bitsandbytes and torchao: weight error, perplexity, LoRA on top.

    python scripts/compare_quantizers.py            # trains a small model, about ten minutes on one core

All methods see the same trained model and quantize the same matrices (every linear layer of the blocks). Each is a function
from a weight to what it decodes to, so that formats are compared and not kernels; bits per weight include scales. Missing
packages are left out. LoRA is trained on each base on text of another kind (comments) than the base was trained on (code).
"""

import argparse
import copy
import functools
import glob
import os
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from pages import Grid
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import frozen_format, quantize_frozen
from hf_zeropp.format import Segment, WireLayout
from hf_zeropp.frozen_format import FrozenFormat
from hf_zeropp.ops import dequantize, quantize

LENGTH = 128
Method = Callable[[Tensor], tuple[Tensor, float]]  # weight -> what it decodes to, bits per weight


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lora-steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="runs/compare_quantizers.pt", help="kept here between runs")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------------------- methods


def frozen(weight: Tensor, bits: int, block: int = 128) -> tuple[Tensor, float]:
    format = FrozenFormat(bits, block)
    decoded = frozen_format.unpack(*frozen_format.pack(weight, format), weight.shape[-1], format, torch.float32)
    return decoded, 8 * format.nbytes(weight.shape) / weight.numel()


def wire(weight: Tensor, bits: int, block: int = 128) -> tuple[Tensor, float]:
    """Scales of the largest magnitude, never clipped: what a search is to be better than."""
    layout = WireLayout([Segment(weight.numel(), bits)], block)
    return dequantize(quantize(weight, layout), layout, dtype=torch.float32).view_as(
        weight
    ), 8 * layout.nbytes / weight.numel()


def nf4(weight: Tensor, block: int, nested: bool = False) -> tuple[Tensor, float]:
    from bitsandbytes import functional

    quantized, state = functional.quantize_4bit(weight, blocksize=block, quant_type="nf4", compress_statistics=nested)
    bits = 4 + (8 / block + 32 / (256 * block) if nested else 32 / block)
    return functional.dequantize_4bit(quantized, state).view_as(weight), bits


def llm_int8(weight: Tensor) -> tuple[Tensor, float]:
    """Its weights; it also rounds activations, which is not shown here."""
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    return functional.int8_vectorwise_dequant(codes, scales).float(), 8 + 32 / weight.shape[1]


def torchao_int(weight: Tensor, bits: int, block: int) -> tuple[Tensor, float]:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(layer, IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerGroup(block)))
    return layer.weight.dequantize().float(), bits + 32 / block


METHODS: dict[str, Method] = {
    "16 bits": lambda weight: (weight, 16.0),
    "**ours INT8**, block 128": functools.partial(frozen, bits=8),
    "torchao INT8, block 128": functools.partial(torchao_int, bits=8, block=128),
    "bitsandbytes LLM.int8, per row": llm_int8,
    "**ours INT4**, block 128": functools.partial(frozen, bits=4),
    "**ours INT4**, block 64": functools.partial(frozen, bits=4, block=64),
    "**ours INT4**, block 32": functools.partial(frozen, bits=4, block=32),
    "INT4 without search, block 128": functools.partial(wire, bits=4),
    "bitsandbytes NF4, block 128": functools.partial(nf4, block=128),
    "bitsandbytes NF4, block 64": functools.partial(nf4, block=64),
    "bitsandbytes NF4, block 64, nested scales": functools.partial(nf4, block=64, nested=True),
    "torchao INT4, block 128": functools.partial(torchao_int, bits=4, block=128),
    "torchao INT4, block 32": functools.partial(torchao_int, bits=4, block=32),
}
LORA_ON = ("16 bits", "**ours INT8**, block 128", "**ours INT4**, block 128", "bitsandbytes NF4, block 64")


# ------------------------------------------------------------------------------------------------------ model and data


def byte_sequences(is_wanted: Callable[[str], bool], seed: int) -> Tensor:
    """Wanted lines of the standard library as bytes: [sequences, LENGTH], shuffled."""
    data = bytearray()
    for file in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))):
        for line in Path(file).read_text(encoding="utf-8", errors="ignore").splitlines():
            if is_wanted(line.strip()):
                data += line.encode("ascii", "ignore") + b"\n"
    tokens = torch.tensor(data, dtype=torch.uint8).long()
    tokens = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))]


def train(model: nn.Module, data: Tensor, steps: int, learning_rate: float, batch_size: int, desc: str) -> None:
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    chance = random.Random(0)
    for _ in tqdm(range(steps), desc=desc):
        batch = data[chance.sample(range(len(data)), batch_size)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def loss_of(model: nn.Module, data: Tensor) -> float:
    return sum(model(input_ids=batch, labels=batch).loss.item() for batch in data.split(32)) / len(data.split(32))


def trained_model(args: argparse.Namespace, data: Tensor) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=LENGTH,
    )
    model, path = LlamaForCausalLM(config), Path(args.model)
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    train(model, data, args.steps, 2e-3, args.batch_size, "training the base")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def quantized(model: nn.Module, method: Method) -> tuple[nn.Module, float, float]:
    """A copy with the blocks' linear weights replaced, the relative weight error, and bits per weight."""
    model = copy.deepcopy(model)
    error = norm = bits = numel = 0.0
    for layer in (module for module in model.model.layers.modules() if isinstance(module, nn.Linear)):
        decoded, layer_bits = method(layer.weight.detach())
        error += (decoded - layer.weight).square().sum().item()
        norm += layer.weight.square().sum().item()
        bits, numel = bits + layer_bits * layer.weight.numel(), numel + layer.weight.numel()
        layer.weight.data = decoded
    return model, (error / norm) ** 0.5, bits / numel


def lora_loss(model: nn.Module, args: argparse.Namespace, data: Tensor, held_out: Tensor, bits: int | None) -> float:
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    if bits is not None:
        quantize_frozen(model, bits, skip=["lm_head", "embed_tokens"])
    train(model, data, args.lora_steps, 2e-3, args.batch_size, f"LoRA on {bits or 'dense'}")
    return loss_of(model, held_out)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    code = byte_sequences(lambda line: bool(line) and not line.startswith(("#", '"')), seed=0)
    comments = byte_sequences(lambda line: line.startswith("#"), seed=0)
    model = trained_model(args, code[256:])
    title = f"{model.num_parameters() / 1e6:.1f} M parameters, {LENGTH} bytes of Python"
    quality = Grid(title, ["format", "bits per weight", "relative weight error", "perplexity", "against 16 bits"])
    lora = Grid("LoRA (rank 8), held-out loss", ["base", "loss before", "loss after", "against 16 bits"])
    reference = lora_reference = None
    for name, method in METHODS.items():
        try:
            candidate, error, bits = quantized(model, method)
        except ImportError as missing:
            print(f"{name}: left out, {missing}")
            continue
        perplexity = torch.tensor(loss_of(candidate, code[:256])).exp().item()
        reference = reference or perplexity
        change = f"{perplexity / reference - 1:+.2%}"
        quality.rows.append([name, f"{bits:.3f}", f"{error:.4f}", f"{perplexity:.4f}", change])
        if name in LORA_ON:
            before = loss_of(candidate, comments[:128])
            is_ours = "ours" in name  # trained on the packed layers themselves
            base = copy.deepcopy(model) if is_ours else candidate
            after = lora_loss(
                base, args, comments[128:], comments[:128], (8 if "INT8" in name else 4) if is_ours else None
            )
            lora_reference = lora_reference or after
            lora.rows.append([name, f"{before:.4f}", f"{after:.4f}", f"{after / lora_reference - 1:+.2%}"])
    for grid in (quality, lora):
        Console(width=120).print(grid.rich())
        print(grid.markdown())


if __name__ == "__main__":
    main()
