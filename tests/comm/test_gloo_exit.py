"""A process that ran ZeRO++ lets other threads run Python before it ends, because gloo's threads may still need to."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = """
import threading, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from hf_zeropp import apply_zeropp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
fully_shard(model)
apply_zeropp(model, {"ranks_per_node": 1})

def drop_last_work():  # as late as a thread may be that was preempted
    time.sleep(0.02)
    print("dropped", flush=True)

threading.Thread(target=drop_last_work, daemon=True).start()
"""


def test_threads_finish_behind_the_scripts_last_line() -> None:
    """Without the handler the interpreter would be gone before the thread wakes up."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout == "dropped\n"
