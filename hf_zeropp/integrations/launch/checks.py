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
    """Raise if settings stand in another place of a config file than under ``zeropp_config:``.

    Accelerate drops them under ``fsdp_config:``, and at the top level it takes them for keys of a newer version of itself.

    Raises:
        ValueError: there is such a key. The message names it.
    """
    for key in file:
        if key != BLOCK and is_like_block(key):
            raise ValueError(f"{key!r} in {path!r} is no key of this file. Write `{BLOCK}:` in its place.")
    check_misplaced(file, f"at the top level of {path!r}")
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
    num_processes, num_machines = _count("num_processes", args, file), _count("num_machines", args, file) or 1
    if num_processes is not None:  # Accelerate counts the devices otherwise
        _check_ranks(args, engine, num_processes, num_machines)
    if num_machines > 1 and args.mpirun_hostfile is None:
        _check_meeting_point(args, file, num_machines)


def _check_ranks(args: argparse.Namespace, engine: str, num_processes: int, num_machines: int) -> None:
    """Raise if Accelerate would start fewer ranks than the job names."""
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


def _count(name: str, args: argparse.Namespace, file: dict[str, Any]) -> int | None:
    """Return a number of processes or machines, by the flag or else the file; None where neither says one.

    Raises:
        ValueError: it is no positive integer. Accelerate would end in an error that names no key.
    """
    flag = getattr(args, name)
    value = file.get(name) if flag is None else flag
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be a positive integer without quotes, got {value!r}.")
    return value


def _check_meeting_point(args: argparse.Namespace, file: dict[str, Any], num_machines: int) -> None:
    """Raise if the machines of a job do not know where to meet: they would wait for each other for ever."""
    needed = {"main_process_ip": "the address of machine 0, the same on all"}
    if args.rdzv_backend == "static" and file.get("rdzv_backend", "static") == "static":
        needed["machine_rank"] = f"0 to {num_machines - 1}, another one on each machine"
    for name, what in needed.items():
        if getattr(args, name) is None and file.get(name) is None:
            raise ValueError(f"num_machines={num_machines} needs {name}: {what}. Pass --{name}, or set it in the file.")
