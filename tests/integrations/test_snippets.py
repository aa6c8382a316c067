"""The Python snippets of the guides run as they stand, on four ranks as two nodes, with a tiny model and data of a user's."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate_runs import batch_of, tiny_llama
from harness import Scenarios, scenarios_of
from torch.utils.data import DataLoader
from trainer_runs import tiny_model, token_data

from hf_zeropp.config import is_enabled

ROOT = Path(__file__).parent.parent.parent
GUIDES = (ROOT / "README.md", ROOT / "hf_zeropp" / "README.md")
LAUNCHED = {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2"}


def snippets() -> list[str]:
    text = "\n".join(guide.read_text() for guide in GUIDES)
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def begin() -> None:
    """Let Accelerate start as in a fresh process, in a folder that ranks share."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    tiny_llama().save_pretrained("base", is_main_process=dist.get_rank() == 0)
    dist.barrier()


def loader_of_rows() -> DataLoader:
    """For all ranks: Accelerate gives each of them its part."""
    return DataLoader([{"input_ids": row, "labels": row} for row in batch_of(0, 0, 16)], batch_size=2)


def run(words: str, names: dict[str, Any]) -> dict[str, Any]:
    (snippet,) = [snippet for snippet in snippets() if words in snippet]
    # The Trainer takes a machine without GPUs for a mistake unless it is told.
    text = snippet.replace("bf16=True, ", "bf16=True, use_cpu=True, report_to='none', ")
    exec(compile(text, f"the snippet with {words}", "exec"), names)
    return names


def scenario_with_accelerate(rank: int) -> None:
    """Train, look at the traffic, save, resume, export."""
    begin()
    model = tiny_llama()
    names = {"model": model, "loader": loader_of_rows(), "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    run("fsdp_plugin=plugin", names)
    run("handle.traffic.print", names)
    if is_enabled():
        assert names["handle"].traffic.cross_node_bytes > 0
        assert names["handle"].is_active and names["handle"].config.preset_name(on_cpu=True) == "balanced"
    else:
        assert names["handle"] is None
    run("accelerator.save_state", names)
    names["accelerator"].wait_for_everyone()
    reloaded = type(model).from_pretrained("out")
    state = names["state"]
    assert all(torch.equal(param, state[name]) for name, param in reloaded.named_parameters() if name in state)


def scenario_with_accelerate_and_the_switch_off(rank: int) -> None:
    """The same snippets, as "See that it is on" says."""
    with mock.patch.dict(os.environ, ZEROPP_ENABLED="0"):
        scenario_with_accelerate(rank)


def scenario_with_the_trainer(rank: int) -> None:
    begin()
    names = run("callbacks=[callback]", {"model": tiny_model(), "dataset": token_data(32)})
    assert names["callback"].handle.is_active


def scenario_with_lora(rank: int) -> None:
    """And then as the first snippet goes on."""
    begin()
    names = run("get_peft_model", {"path": "base"})
    trained = [param for param in names["model"].parameters() if param.requires_grad]
    assert trained and names["model"].config.quantization_config.bits == 4
    names |= {"loader": loader_of_rows(), "optimizer": torch.optim.AdamW(trained, lr=1e-3)}
    run("fsdp_plugin=plugin", names)
    assert names["plugin"].handle_of(names["model"]).is_active


def scenario_with_plain_fsdp2(rank: int) -> None:
    batches = [{"input_ids": batch_of(rank, step), "labels": batch_of(rank, step)} for step in range(4)]
    names = run("fully_shard(layer)", {"model": tiny_llama(), "micro_batches": batches})
    assert names["handle"].is_active and names["handle"].traffic.cross_node_bytes > 0
    run("gather.copy.state", names)


SCENARIOS = Scenarios(4, scenarios_of(__name__), env=LAUNCHED)


@SCENARIOS.parametrize
def test_snippets_run(scenario: str) -> None:
    SCENARIOS.check(scenario)


def test_every_snippet_of_the_guides_runs() -> None:
    ran = ("fsdp_plugin=plugin", "handle.traffic.print", "accelerator.save_state", "callbacks=[callback]")
    ran += ("get_peft_model", "fully_shard(layer)", "gather.copy.state")
    assert [snippet for snippet in snippets() if not any(words in snippet for words in ran)] == []
