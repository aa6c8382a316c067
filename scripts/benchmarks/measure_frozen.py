"""LoRA on a base frozen in 16, 8 and 4 bits: bytes across nodes per step and per generated token, bytes resident per rank.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml scripts/measure_frozen.py

Two emulated nodes of two ranks. Nothing is timed: bytes are counted at each collective, and beside them stands what was
predicted before the first step. Resident bytes are those of the storages behind a rank's frozen parameters.
"""

import argparse
import dataclasses

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from pages import Grid
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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    return parser.parse_args()


def lora_model(args: argparse.Namespace) -> nn.Module:
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
    """One row: train for `STEPS` steps, then generate twice. The second time the adapters have not changed."""
    plugin = ZeroPPPlugin(zeropp=dataclasses.replace(ZeroPPConfig.resolve(None), frozen_bits=bits))
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = lora_model(args)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable(model), lr=1e-3))
    handle = plugin.handle_of(model)
    predicted = handle.predict(micro_steps=1).values()
    batch = torch.randint(2048, (1, 64))
    for step in range(STEPS + 1):
        if step == 1:
            handle.traffic.reset()
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    per_step, zero3 = handle.traffic.cross_node_bytes_per_step, handle.traffic.zero3_bytes_per_step()
    base_bytes = handle.traffic.counts[GATHER_FROZEN].cross_node
    after_update, later = (generated_bytes(model, handle, batch[:, :8]) for _ in range(2))
    stored, numel = resident(handle)
    return [
        f"{bits or 16} bits",
        f"{zero3 / 1e3:.1f}",
        f"{per_step / 1e3:.1f}",
        f"{handle.topology.ranks_per_node * sum(count.cross_node for count in predicted) / 1e3:.1f}",
        f"{base_bytes}",
        f"{after_update / 1e3:.1f}",
        f"{later}",
        f"{stored / numel * handle.topology.ranks_per_node:.4f} / N",
    ]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def generated_bytes(model: nn.Module, handle: ZeroPPHandle, prompt: torch.Tensor) -> int:
    """Bytes into this node while `NEW_TOKENS` tokens are generated."""
    before = handle.traffic.cross_node_bytes
    model.generate(input_ids=prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return handle.traffic.cross_node_bytes - before


def resident(handle: ZeroPPHandle) -> tuple[int, int]:
    """Bytes of storage behind this rank's frozen parameters, and the number of weights they stand for in the model."""
    storages = (param.to_local().untyped_storage() for unit in handle.frozen_units for param in unit.params)
    leaves = {module for unit in handle.frozen_units for module in unit.modules}
    nbytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(nbytes.values()), sum(dense_numel(module) for module in leaves)


def main() -> None:
    args = parse_args()
    columns = [
        "base",
        "ZeRO-3, computed, kB a step",
        "kB a step",
        "predicted",
        "of the base",
        f"kB, {NEW_TOKENS} tokens after an update",
    ]
    columns += [f"bytes, {NEW_TOKENS} more", "resident bytes per weight"]
    grid = Grid(f"hidden {args.hidden_size}, {args.layers} layers, LoRA rank {args.rank}; into each node", columns)
    for bits in (None, 8, 4):
        grid.rows.append(measure(args, bits))
        AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator()
    if accelerator.is_main_process:
        Console(width=160).print(grid.rich())
        print(grid.markdown())
    accelerator.end_training()


if __name__ == "__main__":
    main()
