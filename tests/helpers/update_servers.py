"""Stand-ins for vLLM servers that take versions over HTTP, with a real ``UpdateReceiver`` inside."""

from __future__ import annotations

import http.server
import json
import threading

import torch
from harness import free_port

from hf_zeropp.rollouts.versions import UpdateReceiver


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
