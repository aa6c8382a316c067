"""How many bytes does a rank hold, and how many cross nodes, with LoRA on a base of a billion weights, beside the estimate?

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml scripts/benchmarks/measure_frozen.py

The command starts four processes as two emulated nodes of two ranks, over a base of 1.05 billion parameters in 4 bits. It takes
4 GB of memory in all. Nothing is timed. Weights are packed as they are made, so that no rank ever holds the model in 16 bits.
Bytes held are those of the storages behind tensors, on the rank that holds most. Bytes sent are counted at each collective.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterable
from statistics import mode

import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights
from library.pages import Grid, megabytes, show
from library.study import add_model_flags, parse, shape_of
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import ZeroPPConfig, ZeroPPPlugin
from hf_zeropp.estimate.memory_and_bytes import Estimate, ours
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.frozen.modules import packed_modules
from hf_zeropp.frozen.packing import dense_modules, pack_weight, packable_weights
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.integrations.pretrained_shape import pretrained_shape
from hf_zeropp.ops.frozen_format import FrozenFormat

STEPS = 3
NAMES = {
    "frozen": "base, 1/N of it",
    "parameters": "adapters (fp32 masters)",
    "gradients": "gradients",
    "optimizer": "AdamW states",
    "secondary": "secondary shards",
    "gathered": "gathered at once",
    "cross_node": "across nodes, per node and step",
    "intra_node": "within the node, per node and step",
}
"""Rows of the table, by the names of the estimate."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_flags(parser, hidden_size=2048, layers=18, vocab_size=32000)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    return parse(parser, {"hidden_size": 128, "layers": 2}, argv)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [param for param in model.parameters() if param.requires_grad]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind tensors, or behind this rank's shards of them. A shared storage counts once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def packed_model(config: LlamaConfig, rank: int, zeropp: ZeroPPConfig) -> nn.Module:
    """Make a Llama with random weights, each packed before the next is made, and adapters on all of its linear layers."""
    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    dense = dense_modules(model, pack_embeddings=zeropp.pack_embeddings)
    packable = {module for (module, _), *_ in packable_weights(model, dense, frozen_only=True)}
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            weight = torch.empty(param.shape, dtype=param.dtype).uniform_(-0.03, 0.03)
            weight = weight if param.dim() > 1 else torch.ones_like(weight)  # norms
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
            if module in packable:
                pack_weight(module, name, FrozenFormat(zeropp.frozen_bits or 4))
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


class MostGathered:
    """The most bytes of whole weights that this rank held when a linear layer or an embedding was about to compute."""

    def __init__(self, model: nn.Module) -> None:
        self.num_bytes = 0
        self._model = model
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.register_forward_pre_hook(self._look)

    def _look(self, *call: object) -> None:
        whole = (param for param in self._model.parameters() if not isinstance(param, DTensor))
        self.num_bytes = max(self.num_bytes, storage_bytes(whole))


def held(model: nn.Module, optimizer: torch.optim.Optimizer, handle: ZeroPPHandle) -> dict[str, int]:
    """Return the bytes that this rank holds between steps, by the kinds of the estimate."""
    trained = trainable(model)
    states = (value for state in optimizer.state.values() for value in state.values())
    return {
        "frozen": storage_bytes(param for unit in handle.frozen_units for param in unit.params),
        "parameters": storage_bytes(trained),
        "gradients": storage_bytes(param.grad for param in trained if param.grad is not None),
        "optimizer": storage_bytes(state for state in states if isinstance(state, DTensor)),  # and not counts of steps
        "secondary": handle.secondary_bytes(),
    }


def measure(args: argparse.Namespace, config: LlamaConfig, zeropp: ZeroPPConfig) -> dict[str, int]:
    """Train for ``STEPS`` steps, and return this rank's bytes."""
    plugin = ZeroPPPlugin(zeropp=zeropp)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = packed_model(config, args.rank, zeropp)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    gathered, handle = MostGathered(model), plugin.handle_of(model)
    batch = torch.randint(args.vocab_size, (1, 64))
    found: dict[str, int] = {}
    for _ in range(STEPS):
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        found = held(model, optimizer.optimizer, handle)
        optimizer.zero_grad()
    # On gloo a block is freed before the next one is gathered. The estimate has what accelerators hold: two.
    # A block's size is the one that most units have.
    next_block = sum(mode(unit.gathered_bytes() for unit in units) for units in (handle.frozen_units, handle.units))
    sizes = (module.packed_weight(name).numel() for _, module in packed_modules(model) for name in module.packed_forms)
    return found | {
        "gathered": gathered.num_bytes + next_block + torch.bfloat16.itemsize * max(sizes),  # the largest, decoded
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


def grid_of(args: argparse.Namespace) -> Grid:
    """Measure, and return the table."""
    zeropp = ZeroPPConfig.resolve(None)
    config = LlamaConfig(**dataclasses.asdict(shape_of(args)), max_position_embeddings=1024)
    own = measure(args, config, zeropp)
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    line, rows = estimated(args, config, zeropp), []
    for key, name in NAMES.items():
        most = max(found[key] for found in everyone)
        expected = line.memory[key] if key in line.memory else getattr(line, key)
        row = {"": name, "measured, MB": megabytes(most), "estimated, MB": megabytes(expected)}
        rows.append(row | {"measured / estimated": f"{most / expected:.3f}"})
    return Grid.of(f"hidden {args.hidden_size}, {args.layers} layers, LoRA rank {args.rank}", rows)


def main() -> None:
    """Measure, and print the table for the terminal and for a page."""
    grid = grid_of(parse_args(sys.argv[1:]))
    accelerator = Accelerator()
    if accelerator.is_main_process:
        show([grid], markdown=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
