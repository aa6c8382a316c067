"""Quality of frozen weights in 8 and 4 bits beside bitsandbytes and torchao: weight error, perplexity, LoRA on top.

    pip install bitsandbytes torchao                           # methods of absent packages are left out
    python scripts/benchmarks/compare_quantizers.py            # trains a small model, about five minutes on one core

All methods quantize the same matrices (every linear layer of the blocks) of the same trained model, which is rounded to
bf16 as checkpoints are. A method is a function from a weight to its decoded values in fp32, so that formats are compared
and not kernels. LoRA is trained on each base, on another kind of text (comments) than the base was trained on (code).
Rows go to a JSON file as they are measured, and the same command continues an interrupted run.
"""

import argparse
import copy
import functools
import glob
import math
import os
import random
import statistics
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from library.pages import Grid, headline, show
from library.study import RESULTS, ROOT, Study, parse
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import quantize_frozen
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.ops.frozen_format import FrozenFormat
from hf_zeropp.ops.wire import dequantize, quantize

LENGTH = 128  # bytes of text in a sequence
NUM_HELD_OUT = 256  # sequences


class Decoded(NamedTuple):
    """A weight after quantization.

    Attributes:
        weight: its decoded values, in fp32.
        bits: stored bits per weight, scales included.
    """

    weight: Tensor
    bits: float


Method = Callable[[Tensor], Decoded]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lora-steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "quantizers.json", help="JSON, continued if it exists")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    quick = {"hidden_size": 64, "layers": 1, "steps": 20, "lora_steps": 5}
    return parse(parser, quick, argv)


# ------------------------------------------------------------------------------------------------------------- methods


def frozen(weight: Tensor, bits: int, block: int = 128) -> Decoded:
    """Pack as this package stores frozen weights: scales in bf16, each searched for the least error of its block."""
    format = FrozenFormat(bits, block)
    decoded = frozen_format.unpack(*frozen_format.pack(weight, format), weight.shape[-1], format, torch.float32)
    return Decoded(decoded, 8 * format.nbytes(weight.shape) / weight.numel())


def unsearched(weight: Tensor, bits: int, block: int = 128) -> Decoded:
    """Quantize as on the wire, each scale from the largest magnitude of its block: the baseline of the search."""
    layout = WireLayout([Segment(weight.numel(), bits)], block)
    decoded = dequantize(quantize(weight, layout), layout, dtype=torch.float32)
    return Decoded(decoded.view_as(weight), 8 * layout.nbytes / weight.numel())


def nf4(weight: Tensor, block: int, nested: bool = False) -> Decoded:
    """Quantize to bitsandbytes' NF4. Scales are fp32; ``nested`` ones have 8 bits, and 256 of them share one in fp32."""
    from bitsandbytes import functional

    quantized, state = functional.quantize_4bit(weight, blocksize=block, quant_type="nf4", compress_statistics=nested)
    bits = 4 + (8 / block + 32 / (256 * block) if nested else 32 / block)
    return Decoded(functional.dequantize_4bit(quantized, state).view_as(weight), bits)


def llm_int8(weight: Tensor) -> Decoded:
    """Quantize to bitsandbytes' LLM.int8, which also rounds activations: that is not part of the comparison."""
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    return Decoded(functional.int8_vectorwise_dequant(codes, scales).float(), 8 + 32 / weight.shape[1])


def torchao_int(weight: Tensor, bits: int, block: int, algorithm: str = "AFFINE") -> Decoded:
    """Quantize to torchao's symmetric integers, with scales in bf16, as for a bf16 model."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
    from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"),
        granularity=PerGroup(block),
        scale_dtype=torch.bfloat16,
        intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm[algorithm],
    )
    quantize_(layer, config)
    return Decoded(layer.weight.dequantize(), bits + 16 / block)


METHODS: dict[str, Method] = {
    "16 bits": lambda weight: Decoded(weight, 16.0),
    "**ours INT8**, block 128": functools.partial(frozen, bits=8),
    "torchao INT8, block 128": functools.partial(torchao_int, bits=8, block=128),
    "bitsandbytes LLM.int8, per row": llm_int8,
    "**ours INT4**, block 128": functools.partial(frozen, bits=4),
    "without its search, block 128": functools.partial(unsearched, bits=4),
    "torchao INT4, block 128": functools.partial(torchao_int, bits=4, block=128),
    "torchao INT4, HQQ scales, block 128": functools.partial(
        torchao_int, bits=4, block=128, algorithm="HQQ_SCALE_ONLY"
    ),
    "bitsandbytes NF4, block 128, nested scales": functools.partial(nf4, block=128, nested=True),
    "bitsandbytes NF4, block 64, nested scales": functools.partial(nf4, block=64, nested=True),
    "**ours INT4**, block 64": functools.partial(frozen, bits=4, block=64),
    "bitsandbytes NF4, block 128": functools.partial(nf4, block=128),
    "**ours INT4**, block 32": functools.partial(frozen, bits=4, block=32),
    "torchao INT4, block 32": functools.partial(torchao_int, bits=4, block=32),
    "bitsandbytes NF4, block 64": functools.partial(nf4, block=64),
}
# Methods with which LoRA is trained on packed layers, and their bits; with others it is trained on decoded weights.
OURS = {"**ours INT8**, block 128": 8, "**ours INT4**, block 128": 4}
LORA_ON = ("16 bits", *OURS, "bitsandbytes NF4, block 64")


# ------------------------------------------------------------------------------------------------------ model and data


def byte_sequences(is_wanted: Callable[[str], bool]) -> Tensor:
    """Return lines of the standard library as bytes, cut into sequences and shuffled.

    Args:
        is_wanted: chooses lines, stripped of blanks.

    Returns:
        Tokens: [sequences, LENGTH].
    """
    data = bytearray()
    for file in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))):
        for line in Path(file).read_text(encoding="utf-8", errors="ignore").splitlines():
            if is_wanted(line.strip()):
                data += line.encode("ascii", "ignore") + b"\n"
    tokens = torch.tensor(data, dtype=torch.uint8).long()
    tokens = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]


def train(model: nn.Module, data: Tensor, steps: int, learning_rate: float, batch_size: int, desc: str) -> None:
    """Train the parameters that require gradients with AdamW, the same batches for the same arguments.

    Args:
        model: a causal language model.
        data: tokens: [sequences, LENGTH].
        steps: optimizer steps.
        learning_rate: the highest of a one-cycle schedule.
        batch_size: sequences per step.
        desc: beside the progress bar.
    """
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
def losses_of(model: nn.Module, data: Tensor) -> list[float]:
    """Return the loss of each batch of 16 sequences, in nats per byte."""
    return [model(input_ids=batch, labels=batch).loss.item() for batch in data.split(16)]


def loss_of(model: nn.Module, data: Tensor) -> float:
    """Return the mean loss in nats per byte."""
    return statistics.mean(losses_of(model, data))


def trained_model(args: argparse.Namespace, data: Tensor) -> LlamaForCausalLM:
    """Return a Llama that has been trained on ``data``, in fp32 with values that bf16 can hold.

    It is kept in ``runs``, so that a second call with the same arguments loads it.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    path = ROOT / f"runs/quantizers_{args.hidden_size}x{args.layers}_{args.steps}x{args.batch_size}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model
    train(model, data, args.steps, 2e-3, args.batch_size, "training the base")
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


# ------------------------------------------------------------------------------------------------------------- measures


class Candidate(NamedTuple):
    """A copy of the model whose weights went through a method.

    Attributes:
        model: the copy.
        error: the Frobenius norm of all changes over that of all weights.
        bits: stored bits per weight, the mean over layers.
    """

    model: nn.Module
    error: float
    bits: float


def quantized(model: nn.Module, method: Method) -> Candidate:
    """Return a copy of the model in which the linear weights of the blocks are replaced by their decoded values."""
    model = copy.deepcopy(model)
    error = norm = bits = numel = 0.0
    for layer in (module for module in model.model.layers.modules() if isinstance(module, nn.Linear)):
        decoded = method(layer.weight.detach())
        error += (decoded.weight - layer.weight).square().sum().item()
        norm += layer.weight.square().sum().item()
        bits, numel = bits + decoded.bits * layer.weight.numel(), numel + layer.weight.numel()
        layer.weight.data = decoded.weight
    return Candidate(model, (error / norm) ** 0.5, bits / numel)


def measure_quality(study: Study, model: nn.Module, held_out: Tensor) -> None:
    """Add weight error and losses of every method that the study lacks."""
    for name, method in METHODS.items():
        if study.find("quality", format=name):
            continue
        try:
            candidate = quantized(model, method)
        except ImportError as missing:
            print(f"{name}: left out, {missing}")
            continue
        losses = losses_of(candidate.model, held_out)
        study.add("quality", {"format": name, "bits": candidate.bits, "error": candidate.error, "losses": losses})


def measure_lora(study: Study, args: argparse.Namespace, model: nn.Module, comments: Tensor) -> None:
    """Add the held-out loss before and after LoRA, for every base that the study lacks."""
    for name in LORA_ON:
        if study.find("lora", base=name) or not study.find("quality", format=name):
            continue
        base = quantized(model, METHODS[name]).model
        before = loss_of(base, comments[:NUM_HELD_OUT])
        base = packed_with_adapter(copy.deepcopy(model), OURS[name]) if name in OURS else with_adapter(base)
        train(base, comments[NUM_HELD_OUT:], args.lora_steps, 2e-3, args.batch_size, f"LoRA on {name.strip('*')}")
        study.add("lora", {"base": name, "before": before, "after": loss_of(base, comments[:NUM_HELD_OUT])})


def with_adapter(model: nn.Module) -> nn.Module:
    """Put LoRA adapters, the same for every base, on all linear layers."""
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))


def packed_with_adapter(model: nn.Module, bits: int) -> nn.Module:
    """Put LoRA adapters on all linear layers, and pack the linear layers of the blocks in ``bits`` bits."""
    return quantize_frozen(with_adapter(model), bits, skip=["lm_head", "embed_tokens"])


def quality_grid(study: Study, title: str) -> Grid:
    """Make the table of weight errors and perplexities, with the standard error of the difference over batches."""
    grid = Grid(title, ["format", "bits per weight", "relative weight error", "perplexity", "against 16 bits"])
    dense = study.rows("quality")[0]["losses"]
    for row in study.rows("quality"):
        perplexity = math.exp(statistics.mean(row["losses"]))
        # Perplexity is the exponential of the loss, so a small difference of losses is its relative change.
        changes = [100 * (loss - before) for loss, before in zip(row["losses"], dense, strict=True)]
        error = statistics.stdev(changes) / len(changes) ** 0.5
        change = f"{statistics.mean(changes):+.2f} ± {error:.2f} %"
        grid.rows.append([row["format"], f"{row['bits']:.3f}", f"{row['error']:.4f}", f"{perplexity:.3f}", change])
    return grid


def lora_grid(study: Study) -> Grid:
    """Make the table of held-out losses before and after LoRA."""
    grid = Grid("LoRA (rank 8), held-out loss", ["base", "loss before", "loss after", "against 16 bits"])
    for row in study.rows("lora"):
        change = row["after"] / study.rows("lora")[0]["after"] - 1
        grid.rows.append([row["base"], f"{row['before']:.4f}", f"{row['after']:.4f}", f"{change:+.2%}"])
    return grid


def main() -> None:
    """Run the study, and print its tables for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    torch.set_num_threads(args.threads)
    conditions: dict[str, Any] = {
        key: value for key, value in vars(args).items() if key not in ("output", "fresh", "quick")
    }
    study = Study(args.output, conditions, conditions, fresh=args.fresh)
    code = byte_sequences(lambda line: bool(line) and not line.startswith(("#", '"')))
    comments = byte_sequences(lambda line: line.startswith("#"))
    model = trained_model(args, code[NUM_HELD_OUT:])
    measure_quality(study, model, code[:NUM_HELD_OUT])
    measure_lora(study, args, model, comments)
    title = f"{model.num_parameters() / 1e6:.1f} M parameters, {LENGTH} bytes of Python"
    show([quality_grid(study, title), lora_grid(study)], headline(study.conditions), markdown=True)


if __name__ == "__main__":
    main()
