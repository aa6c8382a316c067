"""Ranks that compute on GPUs: one GPU each where there are as many, all on one otherwise (scripts/benchmarks/library/one_gpu.py).

``GPU_TESTS_DEVICE=cpu`` runs the tests that use this on a CPU over gloo, to find their own mistakes where there is no GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "scripts/benchmarks"))
from library import one_gpu  # noqa: E402

from hf_zeropp.comm.backend_variables import set_backend_variables  # noqa: E402

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
ON_ONE_GPU = one_gpu.NCCL | {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
needs_ranks_on_gpus = [pytest.mark.gpu] if DEVICE == "cuda" else []
"""Marks of a file whose tests start ranks by ``run_on_gpus``: ``pytestmark = needs_ranks_on_gpus``."""


def run_on_gpus(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "nccl",
    is_bound: bool = False,
    limit_s: float = 45.0,
) -> list[Any]:
    """Run ``function(rank, *args)`` on ranks that have a GPU as their current device. Results are in rank order.

    Args:
        function: of a module.
        backend: of the process group; None leaves the group to the function.
        is_bound: whether the group is told its device. NCCL then makes every other group by splitting this one.
        limit_s: seconds after which ranks that have not ended are killed.
    """
    shared = ON_ONE_GPU if torch.cuda.device_count() < world_size else {}
    environment = shared | {"ACCELERATE_USE_CPU": str(DEVICE == "cpu").lower()}
    return run_ranks(
        _run_on_gpu,
        world_size,
        world_size,
        function,
        args,
        backend,
        is_bound,
        env=environment,
        init=False,
        limit_s=limit_s,
    )


def _run_on_gpu(
    rank: int, world_size: int, function: Callable[..., Any], args: tuple, backend: str | None, is_bound: bool
) -> Any:
    device = None
    if DEVICE == "cuda":
        index = rank % torch.cuda.device_count()
        if torch.cuda.device_count() < world_size:
            os.environ |= one_gpu.rank_variables(rank)
        os.environ["LOCAL_RANK"] = str(index)
        # Before ``init_device_mesh``, which chooses a device by LOCAL_RANK unless CUDA is in use already.
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
    if backend is not None:
        set_backend_variables()  # as hf-zeropp launch does
        dist.init_process_group(
            backend if DEVICE == "cuda" else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
            device_id=device if is_bound else None,
        )
    return function(rank, *args)
