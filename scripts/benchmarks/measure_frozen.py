"""LoRA on a base frozen in 16, 8 and 4 bits: bytes across nodes per step and per generated token, bytes held per rank.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml scripts/benchmarks/measure_frozen.py

The command starts four processes as two emulated nodes of two ranks. Nothing is timed. Bytes are counted at each
collective, and compared with the prediction that was made before the first step. The bytes that a rank holds are those of
the storages behind its frozen parameters.
"""

import argparse
import dataclasses
import sys
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from library.pages import Grid
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import ZeroPPConfig, ZeroPPPlugin
from hf_zeropp.apply import ZeroPPHandle
from hf_zeropp.frozen.modules import dense_numel
from hf_zeropp.traffic import GATHER_FROZEN

STEPS = 3
NEW_TOKENS = 8
COLUMNS = (
    "base",
    "ZeRO-3, computed, kB a step",
    "kB a step",
    "predicted",
    "of the base",
    f"kB, {NEW_TOKENS} tokens after an update",
    f"bytes, {NEW_TOKENS} more",
    "resident bytes per weight",
)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    return parser.parse_args(argv)


def lora_model(args: argparse.Namespace) -> nn.Module:
    """Make a Llama with random bf16 weights, frozen under LoRA adapters on all linear layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=256,
    )
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def measure(args: argparse.Namespace, bits: int | None) -> list[str]:
    """Train for ``STEPS`` steps on a base of ``bits`` bits (None: 16), generate twice, and return a row of the table.

    Adapters change between training and the first generation, and not between the two.
    """
    plugin = ZeroPPPlugin(zeropp=dataclasses.replace(ZeroPPConfig.resolve(None), frozen_bits=bits))
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = lora_model(args)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable(model), lr=1e-3))
    handle = plugin.handle_of(model)
    predicted = handle.predict(micro_steps=1).values()
    batch = torch.randint(2048, (1, 64))
    for step in range(STEPS + 1):
        if step == 1:
            handle.traffic.reset()  # the first step warms up
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    per_step, zero3 = handle.traffic.cross_node_bytes_per_step, handle.traffic.zero3_bytes_per_step()
    base_bytes = handle.traffic.counts[GATHER_FROZEN].cross_node
    after_update, later = (generated_bytes(model, handle, batch[:, :8]) for _ in range(2))
    held = resident(model, handle)
    return [
        f"{bits or 16} bits",
        f"{zero3 / 1e3:.1f}",
        f"{per_step / 1e3:.1f}",
        f"{handle.topology.ranks_per_node * sum(count.cross_node for count in predicted) / 1e3:.1f}",
        f"{base_bytes}",
        f"{after_update / 1e3:.1f}",
        f"{later}",
        f"{held.nbytes / held.numel * handle.topology.ranks_per_node:.4f} / N",
    ]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [param for param in model.parameters() if param.requires_grad]


def generated_bytes(model: nn.Module, handle: ZeroPPHandle, prompt: torch.Tensor) -> int:
    """Generate ``NEW_TOKENS`` tokens, and return the bytes that came into this node meanwhile."""
    before = handle.traffic.cross_node_bytes
    model.generate(input_ids=prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return handle.traffic.cross_node_bytes - before


class Resident(NamedTuple):
    """The frozen weights that a rank holds.

    Attributes:
        nbytes: bytes of the storages behind its frozen parameters.
        numel: frozen weights of the whole model.
    """

    nbytes: int
    numel: int


def resident(model: nn.Module, handle: ZeroPPHandle) -> Resident:
    """Return the bytes behind this rank's frozen parameters. A storage that parameters share counts once."""
    params = [param for unit in handle.frozen_units for param in unit.params]
    storages = (param.to_local().untyped_storage() for param in params)
    nbytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return Resident(sum(nbytes.values()), dense_numel(model, params))


def main() -> None:
    """Measure all three bases, and print the table for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    grid = Grid(f"hidden {args.hidden_size}, {args.layers} layers, LoRA rank {args.rank}; into each node", COLUMNS)
    for bits in (None, 8, 4):
        grid.rows.append(measure(args, bits))
        AcceleratorState._reset_state(reset_partial_state=False)  # so that the next one takes another plugin
    accelerator = Accelerator()
    if accelerator.is_main_process:
        Console(width=160).print(grid.rich())
        print(grid.markdown())
    accelerator.end_training()


if __name__ == "__main__":
    main()
