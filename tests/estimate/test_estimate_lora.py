"""Compare the estimate of a LoRA job with what the Accelerate plugin holds and sends, with a base in 16, 8 and 4 bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_runs import VOCAB, prepare, reset_accelerate, tiny_llama, tokens
from harness import run_ranks
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_zeropp import ZeroPPConfig, ZeroPPHandle, ZeroPPQuantConfig, cli
from hf_zeropp.estimate.memory_and_bytes import Estimate, ours
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.frozen import modules, storage
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.integrations.pretrained_shape import pretrained_shape
from hf_zeropp.ops.frozen_format import FrozenFormat

RANK = 4
MICRO_STEPS = 2
# Bits of the base, whether the embedding is tied to the head (then both belong to the model's frozen unit), and whether they are
# packed too.
CASES = [(None, False, False), (8, True, True), (4, False, True), (4, False, False)]
# Nothing divides these sizes evenly: ranks pad their shards, and the last block of a row is shorter than the others.
SIZES = {"hidden_size": 72, "num_attention_heads": 4, "intermediate_size": 286, "num_hidden_layers": 3}


def llama(tied: bool) -> nn.Module:
    return tiny_llama(tie_word_embeddings=tied, **SIZES)


# ------------------------------------------------------------------------------------------------- against real ranks


def hold_and_send(rank: int, as_floats: bool) -> list[dict[str, float]]:
    """Return, for each of ``CASES``, the bytes that a rank holds after a step, and the bytes per node and step."""
    storage.force_floats = as_floats
    return [hold_and_send_one(*case) for case in CASES]


def hold_and_send_one(bits: int | None, tied: bool, packs: bool) -> dict[str, float]:
    config = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(llama(tied).to(torch.bfloat16), config)
    accelerator, plugin, model, optimizer = prepare(
        model, mixed_precision="bf16", frozen_bits=bits, pack_embeddings=packs
    )
    handle = plugin.handle_of(model)
    peak = Peak(model, handle)
    for micro_step in range(MICRO_STEPS):
        handle.set_last_micro_step(micro_step == MICRO_STEPS - 1)
        accelerator.backward(model(input_ids=tokens(), labels=tokens()).loss)
    optimizer.step()
    reset_accelerate()
    trained = [param for param in model.parameters() if param.requires_grad]
    decoded = 0 if bits is None else modules.shared_scratch().nbytes
    return {
        "parameters": sum(map(local, trained)),
        "gradients": sum(local(param.grad) for param in trained),
        "frozen": sum(memory_of(param) for unit in handle.frozen_units for param in unit.params),
        "secondary": handle.secondary_bytes(),
        # On gloo one block is freed before the next is gathered. On accelerators two are there, as the estimate has it.
        "gathered": peak.num_bytes + largest(handle.units) + largest_block(handle.frozen_units) + decoded,
        "cross_node": handle.traffic.cross_node_bytes_per_step,
        "intra_node": handle.traffic.intra_node_bytes_per_step,
    }


def local(tensor: Any) -> int:
    return tensor.to_local().nbytes


def memory_of(tensor: Any) -> int:
    """Return the bytes that a shard keeps in memory, which may be a view into more than it shows."""
    return tensor.to_local().untyped_storage().nbytes()


class Peak:
    """The most bytes that were gathered when a linear layer computed, in forward passes."""

    def __init__(self, model: nn.Module, handle: ZeroPPHandle) -> None:
        self.num_bytes = 0
        self._units = [*handle.units, *handle.frozen_units]
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._look)

    def _look(self, *call: Any) -> None:
        self.num_bytes = max(self.num_bytes, sum(unit.gathered_bytes() for unit in self._units if unit.is_unsharded))


def largest(units: list[Unit]) -> int:
    return max(unit.gathered_bytes() for unit in units)


def largest_block(units: list[Unit]) -> int:
    """Return the bytes of the frozen unit that is largest while it is gathered.

    Where FSDP2 shards codes as floats (torch 2.11), a block has two units: first that of packed weights, then that of the others.
    """
    sizes, follows_packed = [0], False
    for unit in units:
        is_packed = all(param.is_floating_point() and param.dtype.itemsize == 1 for param in unit.params)
        if follows_packed and not is_packed:
            sizes[-1] += unit.gathered_bytes()
        else:
            sizes.append(unit.gathered_bytes())
        follows_packed = is_packed
    return max(sizes)


@pytest.mark.thorough("codes as floats")
@pytest.mark.parametrize("as_floats", [False, True], ids=["codes as integers", "codes as floats"])
def test_a_run_holds_and_sends_what_is_estimated(tmp_path: Path, as_floats: bool) -> None:
    ranks = run_ranks(hold_and_send, 4, as_floats, init=False)
    for case, (bits, tied, packs) in enumerate(CASES):
        llama(tied).config.save_pretrained(tmp_path)
        line = estimate_of(str(tmp_path), bits, packs)
        held = ranks[0][case]  # rank 0 holds no padding of its own
        for kind in ("parameters", "frozen", "secondary"):
            assert held[kind] == line.memory[kind], (bits, kind)
        # Most is held before the last micro-step reduces. Gradients are then made in the room of partial sums.
        assert held["gradients"] <= line.memory["gradients"] + line.memory["accumulator"]
        for name in ("gathered", "cross_node", "intra_node"):
            assert held[name] == getattr(line, name), (bits, name)


def estimate_of(source: str, bits: int | None, packs: bool) -> Estimate:
    config = ZeroPPConfig(frozen_bits=bits, pack_embeddings=packs)
    setup = Setup(4, 2, MICRO_STEPS, config=config, on_cpu=True)
    return ours(pretrained_shape(source, lora_rank=RANK), setup)


# ------------------------------------------------------------------------------------------------------- by arithmetic


@pytest.mark.parametrize(("bits", "bytes_per_weight"), [(None, 2), (8, 1 + 2 / 128), (4, 0.5 + 2 / 128)])
def test_a_node_holds_the_base_once(bits: int | None, bytes_per_weight: float) -> None:
    base = ModelShape.of_count("7B")
    config = ZeroPPConfig(frozen_bits=bits)
    line = ours(base.with_lora(16), Setup(world_size=64, ranks_per_node=8, config=config))
    assert line.memory["frozen"] * 8 == pytest.approx(bytes_per_weight * base.num_params, rel=0.001)
    assert line.cross_node < 0.02 * base.num_params


def test_one_node_packs_its_base_too() -> None:
    model = ModelShape.of_count("1B").with_lora(8)
    held = [ours(model, Setup(4, 4, config=ZeroPPConfig(frozen_bits=bits))).memory["frozen"] for bits in (None, 4)]
    assert held[1] / held[0] == pytest.approx((0.5 + 2 / 128) / 2, rel=0.01)


def test_lora_of_a_count_is_lora_of_its_matrices() -> None:
    """A matrix [rows, columns] gets rank * (rows + columns) parameters."""
    model = ModelShape.of_count("7B")
    shapes = [param.shape for unit in model.units for param in unit.params if param.packable]
    assert model.with_lora(16).num_trainable == sum(16 * sum(shape) for shape in shapes)
    assert model.with_lora(16).num_params == model.num_params + model.with_lora(16).num_trainable


# --------------------------------------------------------------------------------------------------------- the command


def base_of(capsys: pytest.CaptureFixture, *flags: str) -> float:
    """Return the bytes of the frozen base that the command prints for this package."""
    cli.main(["estimate", *flags, "--world", "4", "--ranks-per-node", "2", "--json"])
    return json.loads(capsys.readouterr().out)["estimates"][-1]["memory"]["frozen"]


def test_bits_come_from_the_flag_else_from_the_settings(capsys, tmp_path: Path, monkeypatch) -> None:
    job = ("1B", "--lora", "8")
    packed, dense = base_of(capsys, *job, "--frozen-bits", "4"), base_of(capsys, *job)
    assert packed / dense == pytest.approx((0.5 + 2 / 128) / 2, rel=0.001)
    settings = tmp_path / "settings.yaml"
    settings.write_text("frozen_bits: 4\n")
    assert base_of(capsys, *job, "--zeropp", str(settings)) == packed
    monkeypatch.setenv("ZEROPP_CONFIG_FILE", str(settings))
    assert base_of(capsys, *job) == packed
    assert base_of(capsys, *job, "--frozen-bits", "16") == dense
    monkeypatch.setenv("ZEROPP_FROZEN_BITS", "8")
    assert packed < base_of(capsys, *job) < dense


def test_a_packed_checkpoint_stays_packed(capsys, tmp_path: Path) -> None:
    config = llama(tied=False).config
    config.save_pretrained(tmp_path / "dense")
    whole = {"bits": 4, "pack_embeddings": True}
    for name, settings in (("packed", {"bits": 4}), ("whole", whole), ("in part", whole | {"skip": ["lm_head"]})):
        config.quantization_config = ZeroPPQuantConfig(**settings)
        config.save_pretrained(tmp_path / name)
    packed = base_of(capsys, str(tmp_path / "packed"), "--lora", "4")
    assert packed == base_of(capsys, str(tmp_path / "dense"), "--lora", "4", "--frozen-bits", "4")
    # It stays so, whatever the flag says.
    assert packed == base_of(capsys, str(tmp_path / "packed"), "--lora", "4", "--frozen-bits", "16")
    shard = (-(-VOCAB // 2), SIZES["hidden_size"])  # of the embedding, and of the head
    more = 2 * math.prod(shard) - FrozenFormat(4).nbytes(shard)
    for name, dense in (("whole", 0), ("in part", 1)):
        assert base_of(capsys, str(tmp_path / name), "--lora", "4") == packed - (2 - dense) * more


def test_frozen_bits_without_frozen_weights_are_a_mistake() -> None:
    with pytest.raises(SystemExit, match="--frozen-bits 4 is for frozen weights.*--lora 16"):
        cli.main(["estimate", "1B", "--world", "4", "--ranks-per-node", "2", "--frozen-bits", "4"])
