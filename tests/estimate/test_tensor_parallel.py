"""``hf-zeropp estimate --tensor-parallel`` against a run in which layers are cut over neighbours and sharded over the others."""

import pytest
import torch
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hf_zeropp import ZeroPPConfig, apply_zeropp, cli
from hf_zeropp.estimate.memory_and_bytes import estimate
from hf_zeropp.estimate.model_shape import ModelShape, ParamShape, UnitShape
from hf_zeropp.estimate.training_job import Setup

WORLD, RANKS_PER_NODE, TENSOR, MICRO_STEPS = 8, 4, 2, 2
HIDDEN, INNER, BLOCKS = 32, 64, 3


def shape() -> ModelShape:
    params = ParamShape((INNER, HIDDEN), packable=True), ParamShape((HIDDEN, INNER), packable=True)
    return ModelShape("layers", tuple(UnitShape(f"block {index}", params) for index in range(BLOCKS)))


def hold_and_send(rank: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (WORLD // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor"))
    model = torch.nn.Sequential()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for _ in range(BLOCKS):
        block = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN, INNER, bias=False), torch.nn.Linear(INNER, HIDDEN, bias=False)
        )
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model.append(fully_shard(block, mesh=mesh["shard"], mp_policy=policy))
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
    handle = apply_zeropp(model, {"ranks_per_node": RANKS_PER_NODE})
    for micro_step in range(MICRO_STEPS):
        handle.set_last_micro_step(micro_step == MICRO_STEPS - 1)
        model(torch.ones(2, HIDDEN)).sum().backward()
    return {
        "parameters": sum(param.to_local().nbytes for param in model.parameters()),
        "secondary": handle.secondary_bytes(),
        # Every rank of a node receives as much.
        "cross_node": handle.traffic.cross_node_bytes,
        "intra_node": handle.traffic.intra_node_bytes,
    }


def test_what_a_run_holds_and_sends():
    config = ZeroPPConfig(ranks_per_node=RANKS_PER_NODE)
    setup = Setup(WORLD, RANKS_PER_NODE, MICRO_STEPS, config=config, tensor_parallel=TENSOR, on_cpu=True)
    line = estimate(shape(), setup)[-1]
    ranks = run_ranks(hold_and_send, WORLD)
    for rank in ranks:
        assert rank["parameters"] == line.memory["parameters"]
        assert rank["secondary"] == line.memory["secondary"]
        assert rank["cross_node"] == pytest.approx(line.cross_node)
        assert rank["intra_node"] == pytest.approx(line.intra_node)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tensor-parallel", "3"], "expected tensor-parallel ranks that divide the 8 ranks of a node, got 3"),
        (["--tensor-parallel", "2", "--gpu", "h100", "--network", "100gbit"], "expected no --tensor-parallel beside"),
    ],
)
def test_what_cannot_be_estimated(arguments, said):
    with pytest.raises(SystemExit, match=said):
        cli.main(["estimate", "7B", "--world", "16", *arguments])


def test_the_title_names_the_ranks(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["estimate", "7B", "--world", "64", "--tensor-parallel", "8"])
    assert "8 nodes x 8 ranks, layers cut over 8 ranks, adamw" in capsys.readouterr().out
