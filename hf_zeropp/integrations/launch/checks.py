"""Mistakes in a job that ``hf-zeropp launch`` finds before it starts a process, because nobody would tell of them later.

Settings would be dropped, or the job would train without ZeRO++, on one process, or on fewer ranks than were meant. All other
mistakes are told by Accelerate or by every rank: unknown keys, a script that is not there, FSDP1, no accelerator, sizes of nodes.
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_zeropp.config import BLOCK, ENV_ENABLED, check_misplaced, is_like_block

_OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Values of ``distributed_type`` under which no script shards with FSDP2."""
_ONE_PROCESS = ("NO", "MULTI_CPU")
"""Values of ``distributed_type`` with which Accelerate starts one process of this machine, whatever ``num_processes`` says."""


def check_keys(path: str, file: dict[str, Any]) -> None:
    """Raise if settings stand under ``fsdp_config:`` of a config file, where Accelerate drops keys that it does not know.

    Raises:
        ValueError: there is such a key. The message names it.
    """
    of_fsdp = file.get("fsdp_config")
    for key in of_fsdp if isinstance(of_fsdp, dict) else ():
        if is_like_block(key):
            raise ValueError(
                f"{key!r} stands under `fsdp_config:` in {path!r}, where it has no effect. Put its settings under `{BLOCK}:`, at "
                "the top level of the file."
            )
        check_misplaced(
            [str(key).removeprefix("fsdp_")],
            f"under `fsdp_config:` in {path!r}",
            f"under `{BLOCK}:`, at the top level of the file",
        )


def check_job(args: argparse.Namespace, file: dict[str, Any]) -> None:
    """Raise if the job would train without ZeRO++, or on fewer ranks than it names.

    Args:
        args: the launcher's flags.
        file: the content of its config file.

    Raises:
        ValueError: it would. The message says what was expected, what came, and what to do.
    """
    engine = "" if args.use_fsdp else str(file.get("distributed_type", "")).upper()
    others = [flag for flag in ("--use_deepspeed", "--use_megatron_lm", "--tpu") if getattr(args, flag[2:])]
    if others or engine in _OTHER_ENGINES:
        raise ValueError(
            "ZeRO++ builds on FSDP2: expected distributed_type: FSDP, got "
            f"{others[0] if others else f'distributed_type: {engine}'}. Change it, use `accelerate launch`, or set "
            f"{ENV_ENABLED}=0."
        )
    num_processes = args.num_processes or file.get("num_processes")
    num_machines = args.num_machines or file.get("num_machines") or 1
    if not isinstance(num_processes, int) or not isinstance(num_machines, int):
        return  # Accelerate counts the devices, or says that this is no number
    of_one = "--cpu" if args.cpu else f"distributed_type: {engine}" if engine in _ONE_PROCESS else None
    if of_one is not None and num_processes > num_machines and args.mpirun_hostfile is None:
        raise ValueError(
            f"Accelerate starts one process with {of_one}, though num_processes={num_processes}. Set `distributed_type: FSDP` "
            "and `fsdp_version: 2` under `fsdp_config:`, on CPU too; there `use_cpu: true` takes the place of --cpu."
        )
    if num_processes % num_machines:
        raise ValueError(
            f"num_processes={num_processes} counts the ranks of all machines and must be a multiple of "
            f"num_machines={num_machines}. Change one of them."
        )
