"""TRL's GRPOTrainer with vLLM's real engine in each of 4 ranks (2 nodes): after every sync the engine is the model.

``bash scripts/test_vllm.sh`` installs vLLM for a CPU in an environment of its own, and runs this.
"""

from __future__ import annotations

import functools
import gc
import itertools
from pathlib import Path

import pytest
import torch
from engine_runs import ENGINE, ENVIRONMENT, differences, engine_weights, greedy_by_engine, greedy_by_model
from frozen_runs import reset_accelerate
from harness import run_ranks
from peft import LoraConfig
from rollout_runs import (
    LORA_SCALE,
    arguments,
    distinct_tokens,
    no_full_tensors,
    prompt_data,
    prompts,
    save_model,
    seen_in_forward,
)
from trainer_runs import TWO_NODES, UNQUANTIZED, callback_of
from transformers import MixtralConfig

from hf_zeropp import ZeroPPCallback

pytestmark = pytest.mark.vllm

LORA = {"peft_config": LoraConfig(r=8, lora_alpha=8 * LORA_SCALE, target_modules="all-linear", task_type="CAUSAL_LM")}
# Model, trainer, settings.
CASES = {
    "full": ({}, {}, TWO_NODES),
    "full, tied, deltas": ({"tie_word_embeddings": True}, {}, TWO_NODES | {"qwz_mode": "delta", "qwz_bits": 4}),
    "full, unquantized": ({}, {}, TWO_NODES | UNQUANTIZED),
    "LoRA": ({}, LORA, TWO_NODES),
    "LoRA on 4 bits": ({}, LORA, TWO_NODES | {"frozen_bits": 4}),
}
# Files have a tensor for each expert, the model one for all, and the engine another. A process that has had an engine without
# experts can have none with experts.
EXPERTS = {"experts": ({"config": MixtralConfig, "num_local_experts": 4}, {}, TWO_NODES)}
# In the last two the engine is spread over the ranks of a node.
RUNS = {
    "an engine per rank": (CASES, 1),
    "experts": (EXPERTS, 1),
    "an engine per node": ({"LoRA on 4 bits": CASES["LoRA on 4 bits"]}, 2),
    "experts, an engine per node": (EXPERTS, 2),
}


class Watch:
    """Looks at the engine after each sync of a trainer's."""

    def __init__(self, trainer) -> None:
        self.trainer, self.llm = trainer, trainer.vllm_generation.llm
        self.sync = trainer.vllm_generation.sync_weights
        self.is_spread = trainer.vllm_generation.tensor_parallel_size > 1
        self.before = engine_weights(self.llm)
        self.ids = trainer.processing_class(prompts(64, seed=7))["input_ids"]
        self.found: list[dict] = []
        self.crossed: list[int] = []
        trainer.vllm_generation.sync_weights = self

    def __call__(self) -> None:
        self.sync()
        model, traffic = self.trainer.model, callback_of(self.trainer).handle.traffic
        crossed = traffic.cross_node_bytes
        engine = engine_weights(self.llm)
        written = greedy_by_engine(self.llm, self.ids)
        self.found.append(
            {
                # Ranks that share an engine have a part of each weight.
                "differences": [] if self.is_spread else differences(engine, seen_in_forward(model)),
                "changed": sum(not torch.equal(engine[name], self.before[name]) for name in engine),
                "unequal": sum(
                    ours != theirs for ours, theirs in zip(written, greedy_by_model(model, self.ids), strict=True)
                ),
                "distinct": len({token for row in written for token in row}),
                "crossed_later": traffic.cross_node_bytes - crossed,
            }
        )
        self.before = engine
        self.crossed.append(crossed)


@pytest.fixture(autouse=True)
def no_shared_memory_is_left():
    """Engines on CPUs that are spread over ranks leave shared memory behind, and fail where there is some of an earlier run."""
    yield
    for left in Path("/dev/shm").glob("*-cpushm_*"):
        left.unlink()


def train_each(rank: int, folder: str, cases: dict[str, tuple[str, dict, dict]], spread: int = 1) -> dict[str, dict]:
    """One process trains all cases, because it takes longer to import vLLM than to use it."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **ENGINE)
    found = {}
    for case, settings in cases.items():
        found[case] = train(folder, *settings, spread)
        reset_accelerate()
        gc.collect()
    return found


def train(folder: str, model: str, how: dict, zeropp: dict, spread: int) -> dict:
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **arguments(folder, zeropp),
        vllm_mode="colocate",
        vllm_tensor_parallel_size=spread,
        vllm_max_model_length=32,
        vllm_gpu_memory_utilization=0.05,
    )
    trainer = GRPOTrainer(
        model, distinct_tokens, args=args, train_dataset=prompt_data(), callbacks=[ZeroPPCallback()], **how
    )
    watch = Watch(trainer)
    with no_full_tensors():
        trainer.train()
    handle = callback_of(trainer).handle
    predicted = sum(count.cross_node for count in handle.predict(1).values()) * handle.traffic.ranks_per_node
    # From one sync to the next: the reduction of a step, and the gather that its successor would begin with.
    per_step = [later - earlier for earlier, later in itertools.pairwise(watch.crossed)]
    return {"syncs": watch.found, "bytes": (per_step, predicted)}


@pytest.mark.parametrize("chosen, spread", RUNS.values(), ids=RUNS)
def test_the_engine_is_the_model_after_every_sync(tmp_path, chosen, spread):
    cases = {case: (save_model(tmp_path / case, **shape), how, zeropp) for case, (shape, how, zeropp) in chosen.items()}
    for found in run_ranks(train_each, 4, str(tmp_path), cases, spread, env=ENVIRONMENT, timeout_s=600, limit_s=1200):
        for case, run in found.items():
            assert len(run["syncs"]) == 3
            for i, sync in enumerate(run["syncs"]):
                assert sync["differences"] == [] and sync["unequal"] == 0 and sync["crossed_later"] == 0, (case, sync)
                assert sync["distinct"] > 10 and (sync["changed"] >= 8 or i == 0), (case, sync)
            per_step, predicted = run["bytes"]
            assert per_step == [predicted] * 2 and predicted > 0, (case, run["bytes"])
