"""A process of this package lets other threads run Python before it ends, because gloo's threads may still need to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

APPLY = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from hf_zeropp import apply_zeropp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
fully_shard(model)
apply_zeropp(model, {"ranks_per_node": 1})
"""

LATE_THREAD = """
import threading, time

def drop_last_work():  # as late as a thread may be that was preempted
    time.sleep(0.3)
    print("dropped", flush=True)

threading.Thread(target=drop_last_work, daemon=True).start()
"""


def output_of(command: list[str], **variables: str) -> str:
    environment = os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def test_threads_finish_behind_the_scripts_last_line() -> None:
    """Without the handler the interpreter would be gone before the thread wakes up."""
    assert output_of([sys.executable, "-c", APPLY + LATE_THREAD]) == "dropped\n"


def test_threads_of_a_script_on_stock_fsdp2_finish_too(tmp_path: Path) -> None:
    """``hf-zeropp tune`` compares with stock, and a trial that aborts at its end would leave other nodes waiting."""
    script = tmp_path / "script.py"
    script.write_text(LATE_THREAD)
    command = [sys.executable, "-m", "hf_zeropp.run", str(script)]
    assert output_of(command, ZEROPP_ENABLED="0") == "dropped\n"
