"""Several ranks of NCCL on one GPU: real NCCL, real streams and both communicators of this package, where there is one GPU.

NCCL refuses two ranks on one GPU if it takes them for processes of one host, and ``NCCL_HOSTID`` says what it takes for a host.
With another id for every rank, and with sockets as the only transport, the ranks are hosts of one GPU each. NVIDIA does not
support this.

Ranks on one GPU take turns: the GPU runs the kernels of one process for a time slice of some milliseconds, then those of
another. A kernel of NCCL that waits for its peer keeps its time slice meanwhile. So a collective takes milliseconds, whatever its
size, and step times tell of the network only where bytes take longer than that. There is no NVLink either: within a node bytes go
over loopback.
"""

from __future__ import annotations

import subprocess

NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    # Each of these would let ranks of one machine meet without sockets, by what they find out about each other.
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",  # a service of NCCL's that would open more connections
    # The protocols for small messages wait for the other rank after every few hundred kilobytes, each time for its time slice.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_CTAS": "4",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "2",
    "NCCL_DEBUG": "WARN",
}
"""Variables of all ranks: sockets alone, rings in large pieces, and few thread blocks for each collective."""


def rank_variables(rank: int) -> dict[str, str]:
    """Return the variables of one rank: what NCCL takes for its host, and the only GPU."""
    return {"NCCL_HOSTID": f"rank{rank}", "LOCAL_RANK": "0"}


def name() -> str:
    """Return what the driver calls the GPU. No process of CUDA is started for it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
