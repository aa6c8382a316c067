"""Measure the bytes that cross nodes and the memory of a rank, with LoRA on a frozen base.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml scripts/benchmarks/measure_frozen.py
    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml scripts/benchmarks/measure_frozen.py --large

The command starts four processes as two emulated nodes of two ranks. Nothing is timed. The first form trains over bases in 16, 8
and 4 bits. Bytes are counted at each collective, and compared with the prediction that was made before the first step.

With ``--large`` the base has 1.05 billion parameters in 4 bits, beside ``hf-zeropp estimate``; it takes 4 GB of memory in all.
Weights are packed as they are made, so that no rank ever holds the model in 16 bits. Bytes held are those of the storages behind
tensors, on the rank that holds most.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterable, Iterator
from statistics import mode

import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights
from accelerate.state import AcceleratorState
from library.pages import Grid, show
from library.study import parse
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import ZeroPPConfig, ZeroPPPlugin
from hf_zeropp.estimate.memory_and_bytes import Estimate, ours
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.frozen.modules import dense_numel
from hf_zeropp.frozen.packing import pack_weight, packable_weights
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.integrations.pretrained_shape import pretrained_shape
from hf_zeropp.ops.frozen_format import FrozenFormat
from hf_zeropp.traffic import GATHER_FROZEN

STEPS = 3
NEW_TOKENS = 8
BASE_COLUMNS = (
    "base",
    "ZeRO-3, computed, kB a step",
    "kB a step",
    "predicted",
    "of the base",
    f"kB, {NEW_TOKENS} tokens after an update",
    f"bytes, {NEW_TOKENS} more",
    "resident bytes per weight",
)
LARGE_COLUMNS = ("", "measured, MB", "estimated, MB", "measured / estimated")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name. ``--large`` changes defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="memory over 1.05 billion parameters in 4 bits")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    if "--large" in argv:
        parser.set_defaults(hidden_size=2048, layers=18, vocab=32000, rank=16)
    return parse(parser, {"hidden_size": 128, "layers": 2}, argv)


def llama_config(args: argparse.Namespace) -> LlamaConfig:
    """Return the config of the base."""
    return LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=1024,
    )


def with_adapters(base: nn.Module, rank: int) -> nn.Module:
    """Freeze a base under LoRA adapters on all linear layers."""
    return get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [param for param in model.parameters() if param.requires_grad]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind tensors, or behind this rank's shards of them. A shared storage counts once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def frozen_params(handle: ZeroPPHandle) -> list[nn.Parameter]:
    """Return this rank's shards of the base."""
    return [param for unit in handle.frozen_units for param in unit.params]


# ------------------------------------------------------------------------------------------------------------ all bases


def base_row(args: argparse.Namespace, bits: int | None) -> list[str]:
    """Train for ``STEPS`` steps on a base of ``bits`` bits (None: 16), generate twice, and return a row of the table.

    Adapters change between training and the first generation, and not between the two.
    """
    plugin = ZeroPPPlugin(zeropp=dataclasses.replace(ZeroPPConfig.resolve(None), frozen_bits=bits))
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = with_adapters(LlamaForCausalLM(llama_config(args)).to(torch.bfloat16), args.rank)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable(model), lr=1e-3))
    handle = plugin.handle_of(model)
    predicted = handle.predict(micro_steps=1).values()
    batch = torch.randint(args.vocab, (1, 64))
    for step in range(STEPS + 1):
        if step == 1:
            handle.traffic.reset()  # the first step warms up
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    per_step, zero3 = handle.traffic.cross_node_bytes_per_step, handle.traffic.zero3_bytes_per_step()
    base_bytes = handle.traffic.counts[GATHER_FROZEN].cross_node
    after_update, later = (generated_bytes(model, handle, batch[:, :8]) for _ in range(2))
    held = frozen_params(handle)
    return [
        f"{bits or 16} bits",
        f"{zero3 / 1e3:.1f}",
        f"{per_step / 1e3:.1f}",
        f"{handle.topology.ranks_per_node * sum(count.cross_node for count in predicted) / 1e3:.1f}",
        f"{base_bytes}",
        f"{after_update / 1e3:.1f}",
        f"{later}",
        f"{storage_bytes(held) / dense_numel(model, held) * handle.topology.ranks_per_node:.4f} / N",
    ]


def generated_bytes(model: nn.Module, handle: ZeroPPHandle, prompt: torch.Tensor) -> int:
    """Generate ``NEW_TOKENS`` tokens, and return the bytes that came into this node meanwhile."""
    before = handle.traffic.cross_node_bytes
    model.generate(input_ids=prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return handle.traffic.cross_node_bytes - before


def bases_grid(args: argparse.Namespace) -> Grid:
    """Measure all three bases, and return the table."""
    title = f"hidden {args.hidden_size}, {args.layers} layers, LoRA rank {args.rank}; into each node"
    grid = Grid(title, BASE_COLUMNS)
    for bits in (None, 8, 4):
        grid.rows.append(base_row(args, bits))
        AcceleratorState._reset_state(reset_partial_state=False)  # so that the next one takes another plugin
    return grid


# ------------------------------------------------------------------------------------------------------- one large base


def packed_model(config: LlamaConfig, rank: int, bits: int) -> nn.Module:
    """Make a Llama with random weights, each packed before the next is made, and adapters of ``rank`` on it."""
    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    for (module, name), *_ in packable_weights(model, frozen_only=True):
        weight = torch.empty(getattr(module, name).shape, dtype=torch.bfloat16).uniform_(-0.03, 0.03)
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
        pack_weight(module, name, FrozenFormat(bits))
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta:  # norms
                setattr(module, name, nn.Parameter(torch.ones(param.shape, dtype=param.dtype), requires_grad=False))
    return with_adapters(model, rank)


class MostGathered:
    """The most bytes of whole weights that this rank held when a linear layer had computed."""

    def __init__(self, model: nn.Module) -> None:
        self.num_bytes = 0
        self._model = model
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._look)

    def _look(self, *call: object) -> None:
        whole = (param for param in self._model.parameters() if not isinstance(param, DTensor))
        self.num_bytes = max(self.num_bytes, storage_bytes(whole))


def held(model: nn.Module, optimizer: torch.optim.Optimizer, handle: ZeroPPHandle) -> dict[str, int]:
    """Return the bytes that this rank holds between steps, by the kinds of the estimate."""
    trained = trainable(model)
    states = (value for state in optimizer.state.values() for value in state.values())
    return {
        "frozen": storage_bytes(frozen_params(handle)),
        "parameters": storage_bytes(trained),
        "gradients": storage_bytes(param.grad for param in trained if param.grad is not None),
        "optimizer": storage_bytes(state for state in states if isinstance(state, DTensor)),  # and not counts of steps
        "secondary": handle.secondary_bytes(),
    }


def measure_large(args: argparse.Namespace, config: LlamaConfig, zeropp: ZeroPPConfig) -> dict[str, int]:
    """Train for ``STEPS`` steps, and return this rank's bytes."""
    plugin = ZeroPPPlugin(zeropp=zeropp)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = packed_model(config, args.rank, zeropp.frozen_bits or 4)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    gathered, handle = MostGathered(model), plugin.handle_of(model)
    batch = torch.randint(args.vocab, (1, 64))
    found: dict[str, int] = {}
    for _ in range(STEPS):
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        found = {**held(model, optimizer.optimizer, handle)}
        optimizer.zero_grad()
    # On gloo a block is freed before the next one is gathered. The estimate has what accelerators hold: two.
    # A block's size is the one that most units have.
    next_block = sum(mode(unit.gathered_bytes() for unit in units) for units in (handle.frozen_units, handle.units))
    largest = args.vocab * args.hidden_size * torch.bfloat16.itemsize  # decoded: the head
    return found | {
        "gathered": gathered.num_bytes + next_block + largest,
        "cross_node": handle.traffic.cross_node_bytes_per_step,
        "intra_node": handle.traffic.intra_node_bytes_per_step,
    }


def estimated(args: argparse.Namespace, config: LlamaConfig, zeropp: ZeroPPConfig) -> Estimate:
    """Return what ``hf-zeropp estimate`` says of the same job."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        shape = pretrained_shape(folder, lora_rank=args.rank)
    world, per_node = dist.get_world_size(), int(zeropp.ranks_per_node)
    return ours(shape, Setup(world_size=world, ranks_per_node=per_node, config=zeropp, on_cpu=True))


def large_rows(found: dict[str, int], line: Estimate) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    names = {
        "frozen": "base, 1/N of it",
        "parameters": "adapters (fp32 masters)",
        "gradients": "gradients",
        "optimizer": "AdamW states",
        "secondary": "secondary shards",
        "gathered": "gathered at once",
        "cross_node": "across nodes, per node and step",
        "intra_node": "within the node, per node and step",
    }
    for key, name in names.items():
        expected = line.memory[key] if key in line.memory else getattr(line, key)
        yield [name, f"{found[key] / 1e6:.2f}", f"{expected / 1e6:.2f}", f"{found[key] / expected:.3f}"]


def large_grid(args: argparse.Namespace) -> Grid:
    """Measure the large base, and return the table."""
    config, zeropp = llama_config(args), ZeroPPConfig.resolve(None)
    found = measure_large(args, config, zeropp)
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    most = {key: max(each[key] for each in everyone) for key in found}
    title = f"hidden {args.hidden_size}, {args.layers} layers, LoRA rank {args.rank}"
    return Grid(title, LARGE_COLUMNS, [*large_rows(most, estimated(args, config, zeropp))])


def main() -> None:
    """Measure, and print the table for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    grid = large_grid(args) if args.large else bases_grid(args)
    accelerator = Accelerator()
    if accelerator.is_main_process:
        show([grid], markdown=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
