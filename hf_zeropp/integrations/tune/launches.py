"""One trial: start a user's launch, follow its ranks, end it, and remove what it has left."""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from hf_zeropp.config import ENV_ENABLED
from hf_zeropp.integrations.launch.command import RUNNER, config_file_of, read_launch_config
from hf_zeropp.integrations.tune import ENV_TRIAL, traces
from hf_zeropp.integrations.tune.candidates import Candidate
from hf_zeropp.integrations.tune.trial import MESSAGES, MIN_STEPS

_END_S = 60.0
"""Seconds that a launcher gets to end after its ranks have reported, and ranks to end after the first has failed or ended."""
_QUIET = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "SWANLAB_MODE": "disabled",
    "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",
}
"""Variables under which a script leaves no compiled modules beside itself and no runs at trackers."""

_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


class TrialError(ValueError):
    """A trial gave no measurement. The message says why, in one line."""


def command_of(words: list[str], trial: int = 0) -> list[str]:
    """Return the command that starts the ranks with ``hf_zeropp.run`` in front of the script.

    Args:
        words: a command of ``torchrun``, ``hf-zeropp launch`` or ``accelerate launch``, or only what stands behind the last two.
        trial: its number. Where there are several machines each trial has a port of its own, so that no node meets another that
            has not ended the trial before.
    """
    if not _is_torchrun(words):
        words = _behind_launch(words)
        args = launch_command_parser().parse_args(words)
        flags, script = _cut(words, args)
        file = read_launch_config(path) if (path := config_file_of(args)) else {}
        if (args.num_machines or file.get("num_machines") or 1) > 1:
            port = args.main_process_port or file.get("main_process_port") or 29500
            flags = [*flags, "--main_process_port", str(port + trial)]
        return [sys.executable, "-m", "hf_zeropp.cli", "launch", *flags, *script]
    args = get_args_parser().parse_args(words[1:])
    flags, script = _cut(words[1:], args)
    if args.module:
        script = ["-m", *script]
        flags = [flag for flag in flags if flag not in ("-m", "--module")]
    if args.training_script != RUNNER:
        script = ["-m", RUNNER, *script]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *_port_of_torchrun(args, trial), *script]


def has_config_file(words: list[str]) -> bool:
    """Return whether the job is launched with a config file of Accelerate's."""
    if _is_torchrun(words):
        return False
    return config_file_of(launch_command_parser().parse_args(_behind_launch(words))) is not None


def _is_torchrun(words: list[str]) -> bool:
    return os.path.basename(words[0]) == "torchrun"


def _behind_launch(words: list[str]) -> list[str]:
    is_whole = [os.path.basename(words[0]), *words[1:2]] in (["hf-zeropp", "launch"], ["accelerate", "launch"])
    return words[2 * is_whole :]


def _cut(words: list[str], args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return a launcher's flags, and the script with its arguments."""
    place = len(words) - len(args.training_script_args) - 1
    return words[:place], words[place:]


def _port_of_torchrun(args: argparse.Namespace, trial: int) -> list[str]:
    if args.nnodes in ("1", "1:1"):
        return []
    if args.rdzv_endpoint:
        host, _, port = args.rdzv_endpoint.rpartition(":")
        return ["--rdzv-endpoint", f"{host}:{int(port) + trial}"]
    return ["--master-port", str((args.master_port or 29500) + trial)]


def launch(
    command: list[str], folder: Path, candidate: Candidate, steps: int, on_step: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Start the user's job once, and return what each rank of the world has measured. No process and no file of it is left.

    Args:
        command: that ``command_of`` returns.
        folder: for this trial alone. It is made here.
        candidate: what is tried.
        steps: optimizer steps.
        on_step: called with the number of steps that the node's ranks have made.

    Raises:
        TrialError: the script failed, or ended before the steps.
    """
    folder.mkdir()
    began_s = time.time()
    order = {"folder": str(folder), "steps": steps, "candidate": dataclasses.asdict(candidate)}
    switch = {ENV_ENABLED: "0" if candidate.settings is None else "1"}
    environment = os.environ | _QUIET | switch | {ENV_TRIAL: json.dumps(order)}
    heard: dict[str, list[Any]] = {}
    with open(folder / MESSAGES, "w+") as messages, open(folder / "output", "w+") as output:
        fcntl.flock(messages, fcntl.LOCK_EX)
        # In a session of its own the job does not get the terminal's Ctrl-C. It is ended here.
        launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for kind, said in _follow(launcher, messages):
                if kind == "step":
                    on_step(said)
                else:
                    heard.setdefault(kind, []).append(said)
        finally:
            _clean_up(launcher, folder, began_s)
        output.seek(0)
        return _result(heard, steps, output.read())


def _follow(launcher: subprocess.Popen[bytes], messages: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield the ranks' messages until the launcher has ended, or should have."""
    deadline, has_ended, unfinished = math.inf, False, ""
    while not has_ended and time.monotonic() < deadline:
        time.sleep(0.2)
        has_ended = launcher.poll() is not None  # what ranks have written before is read below
        *whole, unfinished = (unfinished + messages.read()).split("\n")
        for kind, said in map(json.loads, whole):
            yield kind, said
            if kind != "step":
                deadline = min(deadline, time.monotonic() + _END_S)


def _clean_up(launcher: subprocess.Popen[bytes], folder: Path, began_s: float) -> None:
    # A second interruption must not stop this half-way, and counts when it is done. A signal mask would hold for this thread
    # alone: the progress bar has another one, and Python would run the handler all the same.
    arrived: list[int] = []
    handlers = {number: signal.signal(number, lambda which, frame: arrived.append(which)) for number in _INTERRUPTIONS}
    try:
        _end(launcher)
        # It is no reason to leave the trial out: the tuners of other nodes know nothing of it, and must decide alike.
        for failure in traces.undo(folder, began_s):
            print(f"hf-zeropp tune: something of a trial is left: {failure}", file=sys.stderr)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        raise KeyboardInterrupt


def _result(heard: dict[str, list[Any]], steps: int, output: str) -> list[dict[str, Any]]:
    if "report" in heard:
        return heard["report"][0]
    if failures := heard.get("failed"):
        # When one rank fails, the others lose their connections.
        causes = [why for why in failures if "onnection" not in why and "failed on rank" not in why]
        raise TrialError(f"the script failed: {(causes or failures)[0]}")
    if "ended" in heard:
        made, unsharded = heard["ended"][0]
        if made:
            fewer = f", or `--steps {made}`" if made >= MIN_STEPS else ""
            raise TrialError(f"the script ended after {made} of {steps} steps: give it more data{fewer}")
        if unsharded:
            raise TrialError(
                "the script trains, but shards no model with FSDP2: set `distributed_type: FSDP` and `fsdp_version: 2` in "
                "the Accelerate config (behind torchrun export ACCELERATE_USE_FSDP=true and FSDP_VERSION=2)"
            )
        raise TrialError("the script ended without an optimizer step")
    said = output.strip().splitlines() or ["nothing was printed"]
    raise TrialError(f"the ranks ended without a word: {said[-1].strip()}")


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher and all that it has started: ranks lie in sessions of their own."""
    family = [psutil.Process(launcher.pid)] if psutil.pid_exists(launcher.pid) else []
    with suppress(psutil.NoSuchProcess):
        family += [child for parent in family for child in parent.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(family, timeout=3)
    launcher.wait()
