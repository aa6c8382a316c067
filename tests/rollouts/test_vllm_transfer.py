"""vLLM's real engine follows an ``UpdateSender`` by the weight-transfer backend ``hf_zeropp``.

``bash scripts/test_vllm.sh`` installs vLLM for a CPU in an environment of its own, and runs this.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runs import ENGINE, ENVIRONMENT, differences, engine_weights, greedy_by_engine, greedy_by_model
from harness import run_ranks
from rollout_runs import prompts, save_model, tokenizer
from transformers import AutoModelForCausalLM

from hf_zeropp.rollouts.versions import UpdateSender
from hf_zeropp.rollouts.versions.log import DamagedUpdateError

pytestmark = pytest.mark.vllm


def take(llm, version: int) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()


@torch.no_grad()
def move(model, size: float) -> None:
    """Move one weight in twenty."""
    for param in model.parameters():
        param += size * torch.randn_like(param) * (torch.rand_like(param) < 0.05)


def follow(rank: int, folder: str, model: str) -> list[dict]:
    from vllm import LLM

    llm = LLM(model, weight_transfer_config={"backend": "hf_zeropp"}, max_model_len=32, **ENGINE)
    llm.init_weight_transfer_engine({"init_info": {"place": folder}})
    sender, trained = UpdateSender(folder), AutoModelForCausalLM.from_pretrained(model)
    ids, found = tokenizer()(prompts(64, seed=7))["input_ids"], []

    def look() -> dict:
        weights = {name: param.detach() for name, param in trained.named_parameters()}
        pairs = zip(greedy_by_engine(llm, ids), greedy_by_model(trained, ids), strict=True)
        return {
            "differences": differences(engine_weights(llm), weights),
            "unequal": sum(ours != theirs for ours, theirs in pairs),
        }

    for version in range(1, 4):
        move(trained, 0.1)
        sender.publish(trained.named_parameters())
        take(llm, version)
        found.append(look())
    ahead = [param.clone() for param in trained.parameters()]
    move(trained, 0.1)
    sender.publish(trained.named_parameters())
    path = Path(folder, sender.log.files[-1].name)
    good = path.read_bytes()
    path.write_bytes(good[:-1000] + bytes([good[-1000] ^ 1]) + good[-999:])
    with pytest.raises(DamagedUpdateError, match=path.name):
        take(llm, 4)
    latest = [param.clone() for param in trained.parameters()]
    with torch.no_grad():
        for param, old in zip(trained.parameters(), ahead, strict=True):
            param.copy_(old)
    found.append(look())  # version 3 still
    path.write_bytes(good)
    with torch.no_grad():
        for param, new in zip(trained.parameters(), latest, strict=True):
            param.copy_(new)
    take(llm, 4)
    return [*found, look()]


def test_a_server_takes_versions_whole_and_stays_at_the_last_good_one(tmp_path):
    model = save_model(tmp_path / "model")
    (found,) = run_ranks(follow, 1, str(tmp_path / "log"), model, env=ENVIRONMENT, init=False, limit_s=600)
    assert found == [{"differences": [], "unequal": 0}] * 5
