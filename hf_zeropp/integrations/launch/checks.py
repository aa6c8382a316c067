"""Mistakes in a job that ``hf-zeropp launch`` finds before it starts a process.

Each of them would otherwise show on every rank, seconds or minutes later, and some would not show at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any

import torch

from hf_zeropp.comm.topology import detect_ranks_per_node, resolve_hpz_size
from hf_zeropp.config import BLOCK, ENV_ENABLED, ZeroPPConfig, check_misplaced, is_like_block

_OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA", "TPU")
"""Values of ``distributed_type`` under which no script shards with FSDP2."""
_ONE_PROCESS = ("NO", "MULTI_CPU")
"""Values of ``distributed_type`` with which Accelerate starts one process of this machine, whatever ``num_processes`` says."""


def check_keys(path: str, file: dict[str, Any]) -> None:
    """Raise if a key of a config file is a misspelt ``zeropp_config``, or belongs below that.

    Accelerate names unknown keys too, but as a whole, and not what was meant. Under ``fsdp_config:`` it drops them.

    Raises:
        ValueError: there is such a key. The message names it.
    """
    for key in file:
        if key != BLOCK and is_like_block(key):
            raise ValueError(f"unknown key {key!r} in {path!r}. Did you mean `{BLOCK}:`?")
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


def check_script(args: argparse.Namespace) -> None:
    """Raise if the script is missing. ``trl sft`` is turned into the module that it stands for.

    Raises:
        ValueError: there is no such file or module.
    """
    if args.no_python:
        return
    script, rest = args.training_script, args.training_script_args
    # ``trl`` is a launcher itself, and would start ranks that know nothing of this one's.
    if script == "trl" and not args.module and not os.path.exists(script) and rest:
        script, rest, args.module = f"trl.scripts.{rest[0].replace('-', '_')}", rest[1:], True
        args.training_script, args.training_script_args = script, rest
    if args.module and not _module_exists(script):
        raise ValueError(f"there is no module {script!r} for -m. Check the name, and that it is installed here.")
    if not args.module and not os.path.isfile(script):
        raise ValueError(
            f"expected a Python script, -m and a module, or a command of trl, got {script!r}, which is not a file. Check the "
            "path; flags of the launcher stand in front of the script."
        )


def check_job(args: argparse.Namespace, file: dict[str, Any], config: ZeroPPConfig) -> None:
    """Raise if the job that was asked for cannot run under ZeRO++.

    Args:
        args: the launcher's flags.
        file: the content of its config file.
        config: the settings.

    Raises:
        ValueError: it cannot. The message says what was expected, what came, and what to do.
    """
    _check_engine(args, file)
    num_processes = _count(args, file, "num_processes")
    num_machines = _count(args, file, "num_machines") or 1
    if num_processes is None:
        return
    engine = str(file.get("distributed_type", "")).upper()
    of_one = (
        "--cpu" if args.cpu else f"distributed_type: {engine}" if engine in _ONE_PROCESS and not args.use_fsdp else None
    )
    if of_one is not None and num_processes > num_machines and args.mpirun_hostfile is None:
        raise ValueError(
            f"Accelerate starts one process with {of_one}, though num_processes={num_processes}. Set `distributed_type: FSDP` "
            "and `fsdp_version: 2` under `fsdp_config:`, on CPU too; there `use_cpu: true` takes the place of --cpu."
        )
    _check_device(file, num_processes)
    if num_processes % num_machines:
        raise ValueError(
            f"num_processes={num_processes} counts the ranks of all machines and must be a multiple of "
            f"num_machines={num_machines}. Change one of them."
        )
    # Ranks would find the same, after they have loaded a model.
    auto = config.ranks_per_node == "auto"
    ranks_per_node = num_processes // num_machines if auto else config.ranks_per_node
    ranks_per_node = detect_ranks_per_node(ranks_per_node, num_processes)
    resolve_hpz_size(config.hpz_size, ranks_per_node, num_processes)


def _check_engine(args: argparse.Namespace, file: dict[str, Any]) -> None:
    """Raise ``ValueError`` if the launcher is configured for an engine that is not FSDP2."""
    engine = str(file.get("distributed_type", "")).upper()
    flags = {"--use_deepspeed": args.use_deepspeed, "--use_megatron_lm": args.use_megatron_lm, "--tpu": args.tpu}
    given = f"distributed_type: {engine}" if engine in _OTHER_ENGINES else next(filter(flags.get, flags), None)
    if given is not None:
        raise ValueError(
            f"ZeRO++ builds on FSDP2: expected distributed_type: FSDP, got {given}. Change it, use `accelerate launch`, or "
            f"set {ENV_ENABLED}=0."
        )
    # The flag has a default, so the file goes over it, unless the flag was given: Accelerate does the same.
    block = {} if "fsdp_version" in args.nondefault else file.get("fsdp_config") or {}
    if not isinstance(block, dict):
        raise ValueError(f"expected a mapping under `fsdp_config:`, got {block!r}. Indent its settings below it.")
    version = str(block.get("fsdp_version", block.get("version", args.fsdp_version)))
    if (args.use_fsdp or engine == "FSDP") and version != "2":
        raise ValueError(
            f"ZeRO++ builds on FSDP2: expected fsdp_version 2, got {version}. Set `fsdp_version: 2` under `fsdp_config:` in the "
            f"config file (or pass --fsdp_version 2), or set {ENV_ENABLED}=0."
        )


def _check_device(file: dict[str, Any], num_processes: int) -> None:
    """Raise ``ValueError`` if Accelerate will find no device for several ranks: it would train on each rank by itself."""
    uses_cpu = file.get("use_cpu") or str(os.environ.get("ACCELERATE_USE_CPU")).lower() in ("1", "true", "yes", "on")
    if num_processes > 1 and not uses_cpu and not torch.accelerator.is_available():
        raise ValueError(
            f"expected an accelerator on this machine for the {num_processes} ranks, got none: each rank would train by itself, "
            "and all would write to the same files. To train on CPU, set `use_cpu: true` in the config file. Otherwise find out "
            "why torch sees no accelerator here (`hf-zeropp env`)."
        )


def _count(args: argparse.Namespace, file: dict[str, Any], name: str) -> int | None:
    """Return a number of processes or machines, None where neither the flags nor the file give one."""
    value = getattr(args, name)
    value = file.get(name) if value is None else value
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{name} must be a positive int, got {value!r}. Set it in the config file, or pass --{name}.")
    return value


def _module_exists(name: str) -> bool:
    folder = os.getcwd()
    # Ranks find modules of the working directory, as ``python -m`` does. This command would not.
    sys.path.insert(0, folder)
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
    finally:
        sys.path.remove(folder)
