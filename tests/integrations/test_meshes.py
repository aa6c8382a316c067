"""The meshes of Transformers' ``DistributedConfig`` and of Accelerate's ``ParallelismConfig``, on eight ranks of four nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from harness import run_ranks
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from toy import full
from trainer_runs import UNQUANTIZED, VOCAB, build_trainer, callback_of, losses, num_fsdp2_gathers, tiny_model
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.traffic import GATHER_CROSS, total

WORLD, FOUR_NODES = 8, {"ranks_per_node": 2}
MESHES = {
    "fsdp": {"fsdp_size": 8},
    "dp_replicate x fsdp": {"dp_replicate_size": 2, "fsdp_size": 4},
    "fsdp x tp": {"fsdp_size": 4, "tp_size": 2},
    "dp_replicate x fsdp x tp": {"dp_replicate_size": 2, "fsdp_size": 2, "tp_size": 2},
}
EXPERT_MESHES = {
    "ep within nodes": {"fsdp_size": 8, "ep_size": 2},
    "ep across nodes": {"fsdp_size": 8, "ep_size": 4},
    "whole experts": {"fsdp_size": 8, "ep_size": 8},
    "dp_replicate x fsdp x ep": {"dp_replicate_size": 2, "fsdp_size": 4, "ep_size": 2},
}
WAYS = {
    "stock": (False, "1"),
    "off": (FOUR_NODES, "0"),
    "unquantized": (FOUR_NODES | UNQUANTIZED, "1"),
    "defaults": (FOUR_NODES, "1"),
}


def allow_parallelism_on_cpu() -> None:
    """Accelerate asks for accelerators where there is a second kind of parallelism. Nothing that follows needs one."""
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    build = ParallelismConfig.build_device_mesh
    ParallelismConfig.build_device_mesh = lambda self, device_type: build(self, "cpu")


def loaded(saved: str, mesh: str):
    """Return a saved model, which Transformers shards over the mesh while it loads it."""
    config = DistributedConfig(**(MESHES | EXPERT_MESHES)[mesh])
    return AutoModelForCausalLM.from_pretrained(saved, distributed_config=config)


def compare_ways(
    folder: str,
    new_model: Callable[[], torch.nn.Module],
    check: Callable[[Trainer, ZeroPPHandle], None],
    rounding: float = 1e-6,
    **arguments,
) -> None:
    """Train a model for three steps in each of ``WAYS``, compare losses with stock, and check each Trainer under ZeRO++.

    Args:
        folder: for the Trainer.
        new_model: makes the model, sharded or not.
        check: is called with each Trainer that ran under ZeRO++, and the handle.
        rounding: of losses when nothing is quantized.
        arguments: of ``build_trainer``.
    """
    found = {}
    for way, (zeropp, switch) in WAYS.items():
        with mock.patch.dict("os.environ", {"ZEROPP_ENABLED": switch}):
            trainer = build_trainer(folder, zeropp, model=new_model(), max_grad_norm=0.0, max_steps=3, **arguments)
            trainer.train()
        found[way] = losses(trainer)
        handle = callback_of(trainer).handle
        if handle is not None and handle.is_active:
            check(trainer, handle)
    assert found["off"] == found["stock"]
    assert found["unquantized"] == pytest.approx(found["stock"], rel=rounding)
    assert found["defaults"] == pytest.approx(found["stock"], rel=0.01) and found["defaults"] != found["stock"]


def check_bytes(trainer: Trainer, handle: ZeroPPHandle) -> None:
    """Check that as many bytes crossed nodes, and moved within them, in three steps as were predicted."""
    predicted = handle.predict(trainer.args.gradient_accumulation_steps)
    assert handle.traffic.counts == {name: each.times(3) for name, each in predicted.items()}


SHARDED_AT_LOAD = {"fsdp": None, "gradient_accumulation_steps": 2}
"""Arguments of ``build_trainer`` for a model that is sharded already."""


def tiny_experts() -> Qwen3MoeForCausalLM:
    """Return a model with eight experts in each of two layers."""
    set_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **special))


def train_adapters(rank: int, folder: str, saved: str) -> None:
    allow_parallelism_on_cpu()

    def new_model() -> torch.nn.Module:
        model = loaded(saved, "ep across nodes")
        set_seed(0)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    def check(trainer: Trainer, handle: ZeroPPHandle) -> None:
        trained = [param.detach().flatten() for param in trainer.model.parameters() if param.requires_grad]
        adapters = torch.cat(trained)
        of_ranks = [torch.empty_like(adapters) for _ in range(WORLD)]
        dist.all_gather(of_ranks, adapters)
        assert all(torch.equal(adapters, other) for other in of_ranks)
        assert handle.traffic.counts[GATHER_CROSS].calls == len(handle.gathers) > 0

    compare_ways(folder, new_model, check, rounding=1e-5, **SHARDED_AT_LOAD)


@pytest.mark.thorough
def test_adapters_beside_frozen_experts(tmp_path):
    """PEFT adds them to a model that was sharded at load: the base crosses nodes once, and adapters are whole on every rank."""
    saved = saved_model(tmp_path, "ep across nodes")
    run_ranks(train_adapters, WORLD, str(tmp_path), saved, limit_s=300)


def train_on_parts_of_sequences(rank: int, folder: str) -> None:
    """Train with context parallelism, in which a rank attends to its own part of a sequence alone.

    PyTorch's attention for it runs on GPUs alone.
    """
    allow_parallelism_on_cpu()
    AttentionInterface.register("sdpa", eager_attention_forward)

    def check(trainer: Trainer, handle: ZeroPPHandle) -> None:
        assert handle.topology.ranks == (0, 1, 2, 3)
        check_bytes(trainer, handle)

    parallelism = ParallelismConfig(dp_shard_size=2, cp_size=2)
    compare_ways(folder, lambda: tiny_model(attn_implementation="sdpa"), check, parallelism_config=parallelism)


@pytest.mark.thorough
def test_context_parallelism_of_accelerate(tmp_path):
    """ZeRO++ runs over all ranks, since Accelerate shards over "dp_shard" and "cp" together."""
    run_ranks(train_on_parts_of_sequences, 4, str(tmp_path))


def test_what_other_libraries_refuse():
    """The guide says so by these words."""
    with pytest.raises(ValueError, match=r"sp_backend must be one of \['deepspeed'\], but got torch"):
        ParallelismConfig(sp_size=2, sp_backend="torch")
    with pytest.raises(ValueError, match="Combining FSDP with pipeline parallelism is not supported yet"):
        DistributedConfig(pp_size=2, fsdp_size=2)


def saved_model(folder: Path, mesh: str) -> str:
    path = str(folder / "model")
    (tiny_experts() if mesh in EXPERT_MESHES else tiny_model()).save_pretrained(path)
    return path


def train_sharded_at_load(rank: int, folder: str, saved: str, mesh: str) -> None:
    allow_parallelism_on_cpu()

    def check(trainer: Trainer, handle: ZeroPPHandle) -> None:
        check_bytes(trainer, handle)
        # Experts that are whole on one rank are not sharded: there is nothing to gather.
        assert num_fsdp2_gathers(trainer.model) == (2 if mesh == "whole experts" else 0)
        moved = total(handle.traffic.counts.values())
        # With tensor parallelism over the ranks of a node, the ranks that shard one part of the model are on different nodes.
        assert moved.cross_node > 0 and (moved.intra_node > 0) == ("tp" not in mesh)
        assert ("reduce, replicas" in handle.traffic.counts) == ("dp_replicate" in mesh)

    def new_model() -> torch.nn.Module:
        model = loaded(saved, mesh)
        assert any(isinstance(module, FSDPModule) for module in model.modules())
        return model

    compare_ways(folder, new_model, check, **SHARDED_AT_LOAD)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [*MESHES, *EXPERT_MESHES])
def test_model_sharded_at_load(tmp_path, mesh):
    run_ranks(train_sharded_at_load, WORLD, str(tmp_path), saved_model(tmp_path, mesh), mesh, limit_s=300)


def sharded_at_load(saved: str, mesh: str) -> tuple[torch.nn.Module, ZeroPPHandle]:
    model = loaded(saved, mesh)
    return model, apply_zeropp(model, FOUR_NODES)


def loss_of(model: torch.nn.Module, rank: int, mesh: str, step: int = 0) -> torch.Tensor:
    """Return the loss of tokens that the ranks of one tensor-parallel group have in common."""
    generator = torch.Generator().manual_seed(1000 * step + (rank // 2 if "tp" in mesh else rank))
    tokens = torch.randint(3, VOCAB, (2, 16), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(weight).detach().clone() for name, weight in model.state_dict().items()}


def save_and_load(rank: int, folder: str, saved: str, mesh: str) -> None:
    """Full weights that were saved behind a step are those of the ranks, and a model of them goes on from there."""
    model, handle = sharded_at_load(saved, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, rank, mesh).backward()
    optimizer.step()
    optimizer.zero_grad()
    handle.reshard()
    expected = full_weights(model)
    model.save_pretrained(f"{folder}/saved")
    dist.barrier()
    whole = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    again, _ = sharded_at_load(f"{folder}/saved", mesh)
    for one in (whole, again):
        found = full_weights(one)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    losses = [loss_of(one, rank, mesh, step=1) for one in (model, again, whole)]
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2], rtol=0.01, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [*MESHES, "ep across nodes"])
def test_full_weights_are_saved_and_loaded(tmp_path, mesh):
    run_ranks(save_and_load, WORLD, str(tmp_path), saved_model(tmp_path, mesh), mesh, limit_s=300)
