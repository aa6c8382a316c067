"""TRL's own ``_sync_weight`` of AsyncGRPOTrainer on 4 ranks (2 nodes), and servers that take versions over HTTP.

The trainer itself computes with kernels for GPUs, so it is not run. Servers are stand-ins (helpers/update_servers.py);
test_vllm_server.py sends versions to vLLM itself.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from frozen_runs import prepare, tiny_llama
from harness import run_ranks
from rollout_runs import save_model, seen_in_forward, train_step
from update_servers import CASES, TAKEN, Server, check_bytes_and_files, sync_after_steps, wrong_in

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from hf_zeropp.rollouts import server_updates, trl_async
from hf_zeropp.rollouts.trl_async import UpdateTransfer

pytestmark = pytest.mark.thorough


def trainer_with(accelerator: Accelerator, model, transfer) -> AsyncGRPOTrainer:
    """A trainer with what ``_sync_weight`` reads, as its constructor sets it: the transfer is rank 0's."""
    trainer = AsyncGRPOTrainer.__new__(AsyncGRPOTrainer)
    trainer.accelerator, trainer.model = accelerator, model
    trainer.weight_transfer = transfer if accelerator.is_main_process else None
    trainer.rollout_worker, trainer._lora_sync, trainer.model_version = None, False, 0
    trainer._metrics = {"train": defaultdict(list)}
    return trainer


def sync_of(model, accelerator: Accelerator, urls: list[str], folder: Path) -> Callable[[], None]:
    return trainer_with(accelerator, model, UpdateTransfer(folder, urls, timeout_s=30))._sync_weight


def test_servers_follow_bit_by_bit_without_a_byte_more_across_nodes(tmp_path):
    save_model(tmp_path / "model")
    for rank, found in enumerate(run_ranks(sync_after_steps, 4, str(tmp_path), sync_of, list(CASES), 2)):
        check_bytes_and_files(rank, found)
        for case, result in found.items():
            assert result["wrong"] == [[]] * 4 and result["errors"] == [""] * 4, (case, result)
            if rank == 0:
                assert result["calls"] == [["/init_weight_transfer_engine", *TAKEN * 4]] * 2


def lose_and_find_servers(rank: int, folder: str) -> dict[str, list]:
    accelerator, _, model, optimizer = prepare(tiny_llama(), mixed_precision="bf16", qwz_mode="exact")
    servers = [Server().start() for _ in range(2)] if rank == 0 else []
    urls = [server.url for server in servers] or ["http://nobody"]
    transfer = UpdateTransfer(Path(folder, "log"), urls, timeout_s=2)
    trainer, found = trainer_with(accelerator, model, transfer), {}
    warnings: list[str] = []
    server_updates.logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())

    def sync(moment: str, do: Callable[[], None] = lambda: None) -> None:
        if rank == 0:
            do()
        train_step(accelerator, model, optimizer, seed=10 * rank + len(found))
        warnings.clear()
        try:
            trainer._sync_weight()
            error = ""
        except RuntimeError as raised:
            error = str(raised)
        expected = seen_in_forward(model)
        engines = [server.engine for server in servers]
        states = [(engine.receiver and wrong_in(engine, expected) == [], engine.is_paused) for engine in engines]
        found[moment] = [error, states, " ".join(warnings)]

    def fail_in_mid_iteration() -> None:
        def publish(weights):
            transfer._sender.publish = publishes
            next(weights), next(weights)
            raise MemoryError("no memory")

        publishes, transfer._sender.publish = transfer._sender.publish, publish

    sync("both")
    sync("one is gone", lambda: servers[1].stop())
    sync("and back", lambda: servers[1].start())
    sync("it refuses once", lambda: setattr(servers[1].engine, "refuses", 1))
    sync("it refuses", lambda: setattr(servers[1].engine, "refuses", 2))
    sync("it does not", lambda: None)
    sync("no memory", fail_in_mid_iteration)
    sync("memory", lambda: None)
    sync("both are gone", lambda: [server.stop() for server in servers])
    sync("both are back", lambda: [server.start() for server in servers])
    # A trainer that resumes goes on in the same folder.
    trainer = trainer_with(accelerator, model, UpdateTransfer(Path(folder, "log"), urls, timeout_s=2))
    sync("another trainer")
    Path(folder, "file").touch()
    trainer = trainer_with(accelerator, model, UpdateTransfer(Path(folder, "file"), urls, timeout_s=2))
    sync("no folder")
    return found


def test_servers_that_fail_come_back_and_all_ranks_raise_alike(tmp_path):
    results = run_ranks(lose_and_find_servers, 4, str(tmp_path))
    errors = [{moment: said[0] for moment, said in found.items()} for found in results]
    assert errors == [errors[0]] * 4
    good, old, paused = (True, False), (False, False), (False, True)
    states = {moment: states for moment, (_, states, _) in results[0].items()}
    assert states == {
        "both": [good, good],
        "one is gone": [good, old],
        "and back": [good, good],
        "it refuses once": [good, good],
        "it refuses": [good, paused],
        "it does not": [good, good],
        "no memory": [old, old],
        "memory": [good, good],
        "both are gone": [old, old],
        "both are back": [good, good],
        "another trainer": [good, good],
        "no folder": [old, old],
    }
    log = str(tmp_path / "log")
    raised = {moment: error for moment, error in errors[0].items() if error}
    assert raised.keys() == {"no memory", "both are gone", "no folder"}
    assert f"could not be written to {log}: MemoryError('no memory'). Look at its free space" in raised["no memory"]
    assert "No server took version 8 of the weights within 2 s: http://127.0.0.1:" in raised["both are gone"]
    assert "Connection refused" in raised["both are gone"] and f"reach {log}" in raised["both are gone"]
    assert "name another folder" in raised["no folder"]
    warned = {moment: words for moment, (_, _, words) in results[0].items() if words and moment not in raised}
    assert warned.keys() == {"one is gone", "it refuses"}
    assert "Version 2 of the weights is not at http://127.0.0.1:" in warned["one is gone"]
    assert "out of memory on the server" in warned["it refuses"]


class Recorder:
    """A transfer that is not ours."""

    def __init__(self) -> None:
        self.calls: list = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def send_weights(self, iterator) -> None:
        self.calls.append({name: weight.data_ptr() for name, weight in iterator})


def test_other_transfers_and_other_models_keep_the_way_of_trl(tmp_path):
    model, server = tiny_llama(), Server().start()
    trl_async.let_syncs_use_transfers()
    trainer = trainer_with(Accelerator(cpu=True), model, recorder := Recorder())
    trainer._sync_weight()
    own = {name: param.data_ptr() for name, param in model.named_parameters()}
    assert recorder.calls == ["pause", own, "resume"]
    trainer.weight_transfer = UpdateTransfer(tmp_path, server.url)
    trainer._sync_weight()
    server.stop()
    assert trainer.model_version == 2
    assert all(torch.equal(server.engine.weights[name], param) for name, param in model.named_parameters())


def test_what_is_no_server_is_refused(tmp_path, monkeypatch):
    for servers in ([], "localhost:8000", ["http://one", "two"]):
        with pytest.raises(ValueError, match="expected the URLs of one server or more"):
            UpdateTransfer(tmp_path, servers)
    with pytest.raises(ValueError, match="expected timeout_s above 0, got 0"):
        UpdateTransfer(tmp_path, "http://one", timeout_s=0)
    monkeypatch.setattr(trl_async, "is_at_least", lambda library, release: False)
    with pytest.raises(ValueError, match=r"expected TRL 1\.16 or newer, got .*\. Install it"):
        UpdateTransfer(tmp_path, "http://one")
