"""TRL's server mode on 4 ranks (2 nodes), with TRL's own client, and a server that takes versions over HTTP.

The server is a stand-in (helpers/update_servers.py). test_vllm_server.py runs ``vllm serve``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from frozen_runs import tiny_llama
from harness import run_ranks
from rollout_runs import save_model
from trl.generation import vllm_client, vllm_generation
from update_servers import TAKEN, Server, check_bytes_and_files, sync_after_steps

from hf_zeropp.rollouts import trl_server
from hf_zeropp.rollouts.trl_server import send_updates_to_server
from hf_zeropp.rollouts.trl_sync import publish_to_vllm

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def no_vllm_is_needed(monkeypatch):
    let_client_run(lambda owner, name, value: monkeypatch.setattr(owner, name, value, raising=False))


def let_client_run(setattr=setattr) -> None:
    """TRL's client asks whether vLLM is there, and for this machine's address. All else it says over HTTP."""
    for module in (vllm_client, vllm_generation):
        setattr(module, "is_vllm_available", lambda **kwargs: True)
    setattr(vllm_client, "get_ip", lambda: "127.0.0.1")


def generation_with(model, accelerator, url: str, output_dir: Path) -> vllm_generation.VLLMGeneration:
    """As a TRL trainer makes it, behind the callback's ``on_init_end``."""
    args = SimpleNamespace(use_vllm=True, vllm_mode="server", output_dir=str(output_dir), vllm_server_timeout=2)
    publish_to_vllm(args)
    send_updates_to_server(args)
    return vllm_generation.VLLMGeneration(model, accelerator, None, mode="server", server_base_url=url)


def sync_of(model, accelerator: Accelerator, urls: list[str], folder: Path) -> Callable[[], None]:
    let_client_run()
    return generation_with(model, accelerator, urls[0], folder).sync_weights


def test_a_server_of_trl_gets_what_changed_without_a_byte_more_across_nodes(tmp_path):
    """It is away for the third of four steps."""
    save_model(tmp_path / "model")
    results = run_ranks(sync_after_steps, 4, str(tmp_path), sync_of, ["full", "LoRA on 4 bits"], 1, (2,))
    for rank, found in enumerate(results):
        check_bytes_and_files(rank, found)
        for case, result in found.items():
            assert [bool(wrong) for wrong in result["wrong"]] == [0, 0, rank == 0, 0]
            assert result["errors"] == results[0][case]["errors"]
            first, second, third, fourth = result["errors"]
            assert "No server took version 3 of the weights within 2 s" in third and first == second == fourth == ""
            if rank == 0:
                # Those of the server that came back. TRL resets its cache behind each sync that succeeded.
                assert result["calls"] == [["/init_weight_transfer_engine", *TAKEN, "/reset_prefix_cache"]]


def test_servers_with_other_backends_keep_the_way_of_trl(tmp_path):
    server = Server(backend="nccl").start()
    with pytest.raises(NotImplementedError, match="NCCL weight-transfer engine, which needs a CUDA device"):
        generation_with(tiny_llama(), Accelerator(cpu=True), server.url, tmp_path)
    server.stop()
    assert not trl_server._next, "a later Trainer would send its weights to this one's folder"


def test_a_trainer_without_zeropp_is_told_of_the_backend(tmp_path):
    server = Server().start()
    model, accelerator = tiny_llama(), Accelerator(cpu=True)
    generation_with(model, accelerator, server.url, tmp_path)  # it takes what was noted for it
    with pytest.raises(RuntimeError, match=r"the Trainer is not under ZeRO\+\+\. Pass ZeroPPCallback\(\)"):
        vllm_generation.VLLMGeneration(model, accelerator, None, mode="server", server_base_url=server.url)
    server.stop()


def test_a_cache_that_cannot_be_reset_is_an_error_of_the_sync(tmp_path, monkeypatch):
    server = Server().start()
    generation = generation_with(tiny_llama(), Accelerator(cpu=True), server.url, tmp_path)

    def post(url, **kwargs):
        raise ConnectionError(url)

    monkeypatch.setattr(generation.vllm_client.session, "post", post)
    with pytest.raises(RuntimeError, match="took new weights, and then could not reset its cache: ConnectionError"):
        generation.sync_weights()
    server.stop()


def test_nothing_is_prepared_for_other_modes(monkeypatch):
    monkeypatch.setattr(trl_server, "_next", [])
    for args in ({"use_vllm": False}, {"use_vllm": True, "vllm_mode": "colocate"}, {}):
        send_updates_to_server(SimpleNamespace(**args))
    assert trl_server._next == []
