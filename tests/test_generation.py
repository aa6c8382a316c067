"""Generation on 4 ranks (2 nodes): the unsharded model's tokens, and bytes within the node alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from frozen_runs import (
    REPLICAS,
    UNQUANTIZED,
    VOCAB,
    packed_copy,
    prepare,
    reset_accelerate,
    tiny_llama,
    with_adapter,
)
from harness import run_ranks, selected
from rollout_runs import train_step

from hf_zeropp import compat
from hf_zeropp.comm.agreement import Agreement
from hf_zeropp.generation import generation_mode
from hf_zeropp.sizes import parse_bytes
from hf_zeropp.traffic import GATHER_CROSS, GATHER_FROZEN, GATHER_NODE

WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
}
# Before, ranks without a cache cannot stop at different times: masks grow on.
if compat.is_at_least("transformers", (5, 18)):
    WAYS["no cache"] = {"do_sample": False, "use_cache": False}
SETUPS = {
    "lora 4 bits": (True, {"frozen_bits": 4, **UNQUANTIZED}),
    "lora 16 bits": (True, {"frozen_bits": None, **UNQUANTIZED}),
    "full": (False, UNQUANTIZED),
    "lora 4 bits in replicas": (True, {"frozen_bits": 4, **REPLICAS, **UNQUANTIZED}),
    "lora, no secondary": (True, {"frozen_bits": 8, "hpz_size": None, **UNQUANTIZED}),
}


def generate(model, rank: int, **way) -> torch.Tensor:
    """Prompts and lengths differ between ranks."""
    prompt = torch.randint(3, VOCAB, (2, 4 + rank), generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(rank)
    return model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3 + 2 * rank, pad_token_id=0, **way
    )


def run_setups(rank: int, names: list[str]) -> dict[str, dict]:
    results = {}
    for name in names:
        has_adapter, zeropp = SETUPS[name]
        results[name] = run_setup(rank, has_adapter, zeropp)
        reset_accelerate()
    return results


def run_setup(rank: int, has_adapter: bool, zeropp: dict) -> dict:
    model = tiny_llama(tie_word_embeddings=not has_adapter)
    model = with_adapter(model) if has_adapter else model
    reference = packed_copy(model, zeropp.get("frozen_bits"))
    accelerator, plugin, model, optimizer = prepare(model, **zeropp)
    with groups_of_questions() as groups:  # the first forward of all is one of `generate`
        same = {
            name: torch.equal(generate(model, rank, **way), generate(reference, rank, **way))
            for name, way in WAYS.items()
        }
    traffic = plugin.handle_of(model).traffic

    def counted(action) -> dict[str, tuple[int, int]]:
        traffic.reset()
        action()
        return {collective: (count.calls, count.cross_node) for collective, count in traffic.counts.items()}

    def with_budget() -> None:
        with generation_mode(model, memory_budget="1GB"):
            with pytest.raises(ValueError, match="outermost"), generation_mode(model, memory_budget="2GB"):
                pass
            same["budget"] = torch.equal(
                generate(model, rank, do_sample=False), generate(reference, rank, do_sample=False)
            )
            generate(model, rank, do_sample=False)

    later, budget = counted(lambda: generate(model, rank, do_sample=False)), counted(with_budget)
    train_step(accelerator, model, optimizer, seed=rank)
    updated = counted(lambda: generate(model, rank, do_sample=False))
    return {"same": same, "groups": groups, "later": later, "budget": budget, "updated": updated}


@contextlib.contextmanager
def groups_of_questions() -> Iterator[list[int]]:
    """Sizes of the groups in which ranks ask each other something inside: about weights, or whether to go on generating."""
    sizes: list[int] = []

    def all_reduce(tensor, *args, group=None, original=dist.all_reduce, **kwargs):
        sizes.append(dist.get_world_size(group))
        return original(tensor, *args, group=group, **kwargs)

    def ask(agreement, *args, original=Agreement.ask):
        sizes.append(agreement._num_ranks)
        return original(agreement, *args)

    with mock.patch.object(dist, "all_reduce", all_reduce), mock.patch.object(Agreement, "ask", ask):
        yield sizes


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, dict]]:
    """The results of each rank, by the name of the setup, for the setups that this run of pytest has selected."""
    return run_ranks(run_setups, 4, selected(request, "setup"))


@pytest.mark.thorough("lora, no secondary", "lora 16 bits", "lora 4 bits in replicas")
@pytest.mark.parametrize("setup", SETUPS)
def test_tokens_are_those_of_the_unsharded_model(results, setup):
    for rank in results:
        assert all(rank[setup]["same"].values()), rank[setup]["same"]


@pytest.mark.thorough("lora 16 bits", "lora 4 bits in replicas")
@pytest.mark.parametrize("setup", [setup for setup in SETUPS if "no secondary" not in setup])
def test_nothing_crosses_nodes_after_the_first_token(results, setup):
    for rank in results:
        groups = rank[setup]["groups"]
        assert groups[0] == 4, "all ranks agree on the weights when generation begins"
        of_node = 1 if "replicas" in setup else 2
        assert set(groups) == {of_node, 4} and groups.count(of_node) > groups.count(4), (
            "the node's ranks alone ask whether to go on"
        )
        assert all(cross == 0 for _, cross in rank[setup]["later"].values())
        assert all(cross == 0 for _, cross in rank[setup]["budget"].values())


@pytest.mark.parametrize("setup", ["lora 4 bits"])
def test_an_update_crosses_once_and_a_memory_budget_gathers_once(results, setup):
    """Trained weights cross nodes once behind an update. The frozen base never crosses again."""
    for rank in results:
        updated = rank[setup]["updated"]
        assert updated[GATHER_CROSS][0] == 2 and updated[GATHER_CROSS][1] > 0  # two blocks hold adapters
        assert updated[GATHER_FROZEN][1] == 0
        assert updated[GATHER_NODE][0] > 2 * updated[GATHER_CROSS][0]
        assert rank[setup]["budget"][GATHER_FROZEN][0] == 4  # embedding, two blocks, and norm with head
        assert rank[setup]["later"][GATHER_FROZEN][0] > 4


@pytest.mark.thorough
@pytest.mark.parametrize("setup", ["lora, no secondary"])
def test_without_secondary_shards_the_world_goes_on_together(results, setup):
    for rank in results:
        assert set(rank[setup]["groups"]) == {4}


def test_memory_budgets():
    assert [parse_bytes(size) for size in (None, 5, "800MB", "1.5 GB", "7b")] == [0, 5, 800_000_000, 1_500_000_000, 7]
    with pytest.raises(ValueError, match="1.5GB"):
        parse_bytes("lots")
