"""See that an installed hf_zeropp works: its kernels load without a compiler, its command answers, and two ranks train.

scripts/check_wheel.sh runs it with a wheel in a fresh environment. It needs nothing of the repository.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "cmake", "ninja")
STEPS = 20


def check_install() -> None:
    """The package is the installed one, with its kernels, its types and its command, and nothing here could compile it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # kernels that do not load are told of by a warning
        import hf_zeropp
        from hf_zeropp.ops import kernels
    home = Path(hf_zeropp.__file__).parent
    assert [name for name in COMPILERS if shutil.which(name)] == []
    assert home.is_relative_to(sys.prefix), f"{home} is not in {sys.prefix}"
    assert (home / "py.typed").is_file()
    assert hf_zeropp.__version__ == metadata.version("hf-zeropp")
    chosen = kernels.kernel_info().cpu
    assert chosen != "reference", "the compiled kernels did not load"
    shown = subprocess.run(
        [Path(sys.executable).parent / "hf-zeropp", "env"], capture_output=True, text=True, check=True
    ).stdout
    assert hf_zeropp.__version__ in shown and metadata.version("torch") in shown, shown
    print(f"hf_zeropp {hf_zeropp.__version__}, {chosen} kernels, torch {torch.__version__}")


def train(rank: int, store: str) -> None:
    """Two nodes of one rank: the loss falls, and PyTorch code in the place of the kernels gives the same bits."""
    from hf_zeropp.ops.kernels import set_kernels

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    losses = losses_of_a_run(rank)
    assert losses[-1] < 0.5 * losses[0], losses
    set_kernels("reference")
    assert losses_of_a_run(rank) == losses
    dist.destroy_process_group()


def losses_of_a_run(rank: int) -> list[float]:
    """Train a small model, and see that as much crosses nodes as was predicted."""
    from hf_zeropp import apply_zeropp

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    handle = apply_zeropp(fully_shard(model), {"preset": "balanced", "ranks_per_node": 1})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(STEPS):
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert handle.traffic.counts == {name: count.times(STEPS) for name, count in handle.predict().items()}
    return losses


if __name__ == "__main__":
    check_install()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (f"{folder}/store",), nprocs=2)
    print("two ranks trained, and sent what was predicted")
