"""Stand-ins for vLLM servers that take versions over HTTP, with a real ``UpdateReceiver`` inside."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator
from frozen_runs import prepare, reset_accelerate, trainable
from harness import free_port
from peft import LoraConfig, get_peft_model
from rollout_runs import LORA, no_full_tensors, seen_in_forward, train_step
from transformers import AutoModelForCausalLM

from hf_zeropp.rollouts.versions import UpdateReceiver
from hf_zeropp.traffic import GATHER_CROSS, Bytes

CASES: dict[str, tuple[dict | None, dict]] = {
    "full": (None, {"mixed_precision": "bf16", "qwz_mode": "exact"}),
    "LoRA": (LORA, {"mixed_precision": "bf16"}),
    "LoRA on 4 bits": (LORA, {"frozen_bits": 4}),
}
"""Adapters, and arguments of ``prepare``."""

TAKEN = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
"""The requests of one update."""


class Engine:
    """A server's part of the protocol. As vLLM, it wants to know the place first, and updates one by one, while paused."""

    def __init__(self) -> None:
        self.receiver: UpdateReceiver | None = None
        self.is_paused, self.is_updating, self.refuses, self.calls = False, False, 0, []

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.receiver.weights

    def answer(self, path: str, content: dict) -> None:
        self.calls.append(path)
        if path == "/init_weight_transfer_engine":
            self.receiver = UpdateReceiver(content["init_info"]["place"])
        elif path == "/pause?mode=keep":
            self.is_paused = True
        elif path == "/start_weight_update":
            assert self.is_paused and not self.is_updating
            self.is_updating = True
        elif path == "/update_weights":
            assert self.is_updating
            if self.refuses:
                self.refuses -= 1
                raise RuntimeError("out of memory on the server")
            version = content["update_info"]["version"]
            self.receiver.update(version)
            assert self.receiver.version == version
        elif path == "/finish_weight_update":
            assert self.is_updating
            self.is_updating = False
        elif path != "/reset_prefix_cache":
            assert path == "/resume" and not self.is_updating
            self.is_paused = False


class Server:
    """An ``Engine`` behind a port. ``stop`` and ``start`` are a process that dies, and another one in its place."""

    def __init__(self, backend: str = "hf_zeropp") -> None:
        self.port, self.backend = free_port(), backend
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        self.engine = engine = Engine()
        about = {
            "/health": {},
            "/v1/models": {"data": [{"id": "model"}]},
            "/server_info?config_format=json": {"vllm_config": {"weight_transfer_config": {"backend": self.backend}}},
            "/get_world_size": {"world_size": 1},
        }

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                try:
                    engine.answer(self.path, content)
                    status, text = 200, b"{}"
                except Exception as error:
                    status, text = 500, repr(error).encode()
                self._send(status, text)

            def do_GET(self) -> None:
                self._send(200, json.dumps(about[self.path]).encode())

            def _send(self, status: int, text: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def wrong_in(engine: Engine, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of weights that a server does not have bit for bit."""
    found = engine.weights
    return [
        name
        for name in expected.keys() | found.keys()
        if name not in found or name not in expected or not torch.equal(bits_of(found[name]), bits_of(expected[name]))
    ]


def bits_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


def sync_after_steps(
    rank: int,
    folder: str,
    sync_of: Callable[[nn.Module, Accelerator, list[str], Path], Callable[[], None]],
    cases: list[str],
    num_servers: int,
    away: tuple[int, ...] = (),
) -> dict[str, dict[str, Any]]:
    """Train four steps of an Accelerate loop in each case, each followed by a sync to servers. Return what is to be looked at.

    Args:
        rank: this one.
        folder: has the model, and gets a folder for each case.
        sync_of: returns TRL's sync of a model to servers by their URLs, with a folder for what is sent.
        cases: names of ``CASES``.
        num_servers: of rank 0.
        away: steps for which the servers are gone.
    """
    servers = [Server().start() for _ in range(num_servers)] if rank == 0 else []
    urls = [server.url for server in servers] or ["http://nobody"]
    found = {}
    for case in cases:
        lora, settings = CASES[case]
        model = AutoModelForCausalLM.from_pretrained(Path(folder, "model"))
        model = model if lora is None else get_peft_model(model, LoraConfig(**lora))
        accelerator, plugin, model, optimizer = prepare(model, **settings)
        sync = sync_of(model, accelerator, urls, Path(folder, case))
        traffic = plugin.handle_of(model).traffic
        wrong, crossed, moved, errors = [], [], [], []
        for step in range(4):
            train_step(accelerator, model, optimizer, seed=10 * rank + step)
            for server in servers:
                if step in away:
                    server.stop()
                elif step - 1 in away:
                    server.start()
            before = [param.to_local().clone() for param in trainable(model)]
            traffic.reset()
            try:
                with no_full_tensors():
                    sync()
                errors.append("")
            except RuntimeError as error:
                errors.append(str(error))
            crossed.append(traffic.cross_node_bytes)
            after = [param.to_local() for param in trainable(model)]
            moved.append(sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True)))
            expected = seen_in_forward(model)
            wrong.append([name for server in servers for name in wrong_in(server.engine, expected)])
        found[case] = {
            "wrong": wrong,
            "moved": moved,
            "errors": errors,
            "files": [path.name for path in Path(folder, case).rglob("*")] if rank == 0 else [],
            "calls": [list(server.engine.calls) for server in servers],
            "bytes": (crossed, plugin.handle_of(model).predict(1).get(GATHER_CROSS, Bytes()).cross_node * 2),
        }
        for server in servers:
            server.engine.calls.clear()
        reset_accelerate()
    return found


def check_bytes_and_files(rank: int, found: dict[str, dict[str, Any]]) -> None:
    """Check that no sync moved a weight or sent a byte more than the next forward pass would, and that rank 0 sent changes."""
    for case, result in found.items():
        assert result["moved"] == [0] * 4, (case, result)
        crossed, one_gather = result["bytes"]
        if case != "full":  # how many words change is not known before
            assert crossed == [one_gather] * 4, (case, crossed, one_gather)
        if rank == 0:
            assert [name for name in result["files"] if name.startswith("changes")], "nothing was sent as changes"
