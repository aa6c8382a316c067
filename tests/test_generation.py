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
from harness import each_case, run_ranks
from rollout_runs import train_step

from hf_zeropp import compat
from hf_zeropp.comm.agreement import Agreement
from hf_zeropp.generation import generation_mode
from hf_zeropp.sizes import parse_bytes
from hf_zeropp.traffic import GATHER_CROSS, GATHER_FROZEN, GATHER_NODE, Bytes, total

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


def run_setups(rank: int, names: list[str]) -> None:
    each_case(names, lambda name: run_setup(rank, name))


def run_setup(rank: int, name: str) -> None:
    """Tokens are those of the unsharded model, and nothing crosses nodes after the first one."""
    has_adapter, zeropp = SETUPS[name]
    model = tiny_llama(tie_word_embeddings=not has_adapter)
    model = with_adapter(model) if has_adapter else model
    reference = packed_copy(model, zeropp.get("frozen_bits"))
    accelerator, plugin, model, optimizer = prepare(model, **zeropp)
    with groups_of_questions() as groups:  # the first forward of all is one of `generate`
        for way in WAYS.values():
            assert torch.equal(generate(model, rank, **way), generate(reference, rank, **way)), way
    greedy = generate(reference, rank, do_sample=False)
    traffic = plugin.handle_of(model).traffic
    traffic.reset()
    generate(model, rank, do_sample=False)
    later = traffic.counts

    traffic.reset()
    with generation_mode(model, memory_budget="1GB"):
        with pytest.raises(ValueError, match="outermost"), generation_mode(model, memory_budget="2GB"):
            pass
        for _ in range(2):
            assert torch.equal(generate(model, rank, do_sample=False), greedy)
    budget = traffic.counts

    if name == "lora, no secondary":
        assert set(groups) == {4}, "without secondary shards the world goes on together"
    else:
        assert total([*later.values(), *budget.values()]).cross_node == 0
        assert groups[0] == 4, "all ranks agree on the weights when generation begins"
        of_node = 1 if "replicas" in name else 2
        assert set(groups) == {of_node, 4}
        assert groups.count(of_node) > groups.count(4), "the node's ranks alone ask whether to go on"

    train_step(accelerator, model, optimizer, seed=rank)
    traffic.reset()
    generate(model, rank, do_sample=False)
    if name == "lora 4 bits":
        check_what_crosses(traffic.counts, later, budget)
    reset_accelerate()


def check_what_crosses(updated: dict[str, Bytes], later: dict[str, Bytes], budget: dict[str, Bytes]) -> None:
    """Trained weights cross nodes once behind an update, the frozen base never again. A memory budget gathers once."""
    assert updated[GATHER_CROSS].calls == 2 and updated[GATHER_CROSS].cross_node > 0  # two blocks hold adapters
    assert updated[GATHER_FROZEN].cross_node == 0
    assert updated[GATHER_NODE].calls > 2 * updated[GATHER_CROSS].calls
    assert budget[GATHER_FROZEN].calls == 4  # embedding, two blocks, and norm with head
    assert later[GATHER_FROZEN].calls > 4


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


MAIN = ["lora 4 bits", "full"]


@pytest.mark.thorough("the others")
@pytest.mark.parametrize("are_main", [True, False], ids=["the main setups", "the others"])
def test_tokens_are_those_of_the_unsharded_model_and_cross_nodes_once(are_main):
    run_ranks(run_setups, 4, [name for name in SETUPS if (name in MAIN) == are_main])


def test_memory_budgets():
    assert [parse_bytes(size) for size in (None, 5, "800MB", "1.5 GB", "7b")] == [0, 5, 800_000_000, 1_500_000_000, 7]
    with pytest.raises(ValueError, match="1.5GB"):
        parse_bytes("lots")
