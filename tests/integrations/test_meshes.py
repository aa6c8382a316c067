"""The meshes of Transformers' ``DistributedConfig`` and of Accelerate's ``ParallelismConfig``, on eight ranks of four nodes."""

from __future__ import annotations

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
    set_seed,
)
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.traffic import GATHER_CROSS

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


def loaded(saved: str, mesh: dict):
    """Return a saved model, which Transformers shards over the mesh while it loads it."""
    return AutoModelForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(**mesh))


def trained(folder: str, zeropp, model, **arguments):
    """Train a model that is sharded already, in steps of two micro-steps. Return its Trainer."""
    usual = {"fsdp": None, "max_grad_norm": 0.0, "max_steps": 3, "gradient_accumulation_steps": 2}
    trainer = build_trainer(folder, zeropp, model=model, **(usual | arguments))
    trainer.train()
    return trainer


def counted_and_predicted(trainer, micro_steps: int = 2) -> tuple[dict, dict]:
    """Return by collective the bytes of three steps across nodes and within them: as counted, and as predicted."""
    handle = callback_of(trainer).handle
    counted = {name: (count.cross_node, count.intra_node) for name, count in handle.traffic.counts.items()}
    predicted = handle.predict(micro_steps).items()
    return counted, {name: (3 * each.cross_node, 3 * each.intra_node) for name, each in predicted}


def train_each(rank: int, folder: str, saved: str, mesh: dict, ways: dict) -> dict[str, tuple]:
    allow_parallelism_on_cpu()
    found = {}
    for name, (zeropp, switch) in ways.items():
        with mock.patch.dict("os.environ", {"ZEROPP_ENABLED": switch}):
            model = loaded(saved, mesh)
            assert any(isinstance(module, FSDPModule) for module in model.modules())
            trainer = trained(folder, zeropp, model)
        handle = callback_of(trainer).handle
        counted = predicted = None
        if handle is not None and handle.is_active:
            counted, predicted = counted_and_predicted(trainer)
            # Experts that are whole on one rank are not sharded: there is nothing to gather.
            assert num_fsdp2_gathers(model) == (2 if mesh.get("ep_size") == WORLD else 0)
        found[name] = losses(trainer), counted, predicted
    return found


def tiny_experts() -> Qwen3MoeForCausalLM:
    """Return a model with eight experts in each of two layers."""
    set_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, moe_intermediate_size=32, num_experts=8))


def train_adapters(rank: int, folder: str, saved: str) -> dict[str, tuple]:
    allow_parallelism_on_cpu()
    found = {}
    for name in ("stock", "unquantized", "defaults"):
        model = loaded(saved, EXPERT_MESHES["ep across nodes"])
        set_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        trainer = trained(folder, WAYS[name][0], model)
        adapters = torch.cat([param.detach().flatten() for param in model.parameters() if param.requires_grad])
        of_ranks = [torch.empty_like(adapters) for _ in range(WORLD)]
        dist.all_gather(of_ranks, adapters)
        handle = callback_of(trainer).handle
        crossings = None if handle is None else handle.traffic.counts[GATHER_CROSS].calls
        units = None if handle is None else len(handle.gathers)
        is_equal = all(torch.equal(adapters, other) for other in of_ranks)
        found[name] = losses(trainer), is_equal, crossings, units
    return found


@pytest.mark.thorough
def test_adapters_beside_frozen_experts(tmp_path):
    """PEFT adds them to a model that was sharded at load: the base crosses nodes once, and adapters are whole on every rank."""
    saved = str(tmp_path / "model")
    tiny_experts().save_pretrained(saved)
    for found in run_ranks(train_adapters, WORLD, str(tmp_path), saved, limit_s=300):
        stock = found["stock"][0]
        for way, bound in (("unquantized", 1e-5), ("defaults", 0.01)):
            own, is_equal, crossings, units = found[way]
            assert own == pytest.approx(stock, rel=bound) and is_equal
            assert crossings == units > 0


def train_on_parts_of_sequences(rank: int, folder: str) -> dict[str, tuple]:
    """Train with context parallelism, in which a rank attends to its own part of a sequence alone.

    PyTorch's attention for it runs on GPUs alone.
    """
    allow_parallelism_on_cpu()
    AttentionInterface.register("sdpa", eager_attention_forward)
    found = {}
    for name in ("stock", "unquantized", "defaults"):
        trainer = build_trainer(
            folder,
            WAYS[name][0] and WAYS[name][0] | {"ranks_per_node": 2},
            model=tiny_model(attn_implementation="sdpa"),
            parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2),
            max_steps=3,
            max_grad_norm=0.0,
        )
        trainer.train()
        handle = callback_of(trainer).handle
        found[name] = losses(trainer), handle and (*counted_and_predicted(trainer, 1), handle.topology.ranks)
    return found


@pytest.mark.thorough
def test_context_parallelism_of_accelerate(tmp_path):
    """ZeRO++ runs over all ranks, since Accelerate shards over "dp_shard" and "cp" together."""
    for found in run_ranks(train_on_parts_of_sequences, 4, str(tmp_path)):
        for way, bound in (("unquantized", 1e-6), ("defaults", 0.01)):
            own, (counted, predicted, ranks) = found[way]
            assert own == pytest.approx(found["stock"][0], rel=bound) and ranks == (0, 1, 2, 3)
            assert counted == predicted


def test_accelerate_leaves_sequence_parallelism_to_deepspeed():
    """The guide says so by these words."""
    with pytest.raises(ValueError, match=r"sp_backend must be one of \['deepspeed'\], but got torch"):
        ParallelismConfig(sp_size=2, sp_backend="torch")


def test_transformers_refuses_stages_beside_shards():
    """The guide says so by these words."""
    with pytest.raises(ValueError, match="Combining FSDP with pipeline parallelism is not supported yet"):
        DistributedConfig(pp_size=2, fsdp_size=2)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [*MESHES, *EXPERT_MESHES])
def test_model_sharded_at_load(tmp_path, mesh):
    saved = str(tmp_path / "model")
    (tiny_experts() if mesh in EXPERT_MESHES else tiny_model()).save_pretrained(saved)
    settings = (MESHES | EXPERT_MESHES)[mesh]
    for found in run_ranks(train_each, WORLD, str(tmp_path), saved, settings, WAYS, limit_s=300):
        stock = found["stock"][0]
        assert found["off"][0] == stock
        assert found["unquantized"][0] == pytest.approx(stock, rel=1e-6)
        assert found["defaults"][0] == pytest.approx(stock, rel=0.01) and found["defaults"][0] != stock
        for way in ("unquantized", "defaults"):
            _, counted, predicted = found[way]
            assert counted == predicted
            across, within = (sum(each) for each in zip(*counted.values(), strict=True))
            # Where tensor parallelism takes a node, none of the ranks that hold the same part is beside another.
            assert across > 0 and (within > 0) == ("tp" not in mesh)
            assert ("reduce, replicas" in counted) == ("dp_replicate" in mesh)
            # Of what runs in passes only other parallelism, and units that stay FSDP2's, are not this package's.


KINDS = MESHES | {"fsdp x ep": EXPERT_MESHES["ep across nodes"]}


def saved_model(folder: str, mesh: str) -> str:
    path = f"{folder}/model"
    (tiny_experts() if "ep" in mesh.split(" x ") else tiny_model()).save_pretrained(path)
    return path


def sharded_at_load(saved: str, mesh: dict) -> tuple[torch.nn.Module, ZeroPPHandle]:
    model = loaded(saved, mesh)
    return model, apply_zeropp(model, FOUR_NODES)


def loss_of(model: torch.nn.Module, rank: int, mesh: dict, step: int = 0) -> torch.Tensor:
    """Return the loss of tokens that the ranks of one tensor-parallel group have in common."""
    generator = torch.Generator().manual_seed(1000 * step + rank // mesh.get("tp_size", 1))
    tokens = torch.randint(3, VOCAB, (2, 16), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(weight).detach().clone() for name, weight in model.state_dict().items()}


def save_and_load(rank: int, folder: str, saved: str, mesh: dict) -> None:
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
@pytest.mark.parametrize("mesh", KINDS)
def test_full_weights_are_saved_and_loaded(tmp_path, mesh):
    run_ranks(save_and_load, WORLD, str(tmp_path), saved_model(str(tmp_path), mesh), KINDS[mesh], limit_s=300)
