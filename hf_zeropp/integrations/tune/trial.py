"""One trial: the user's command runs to its end, and what its ranks on this node have recorded is put together."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_zeropp.config import ENV_ENABLED, ENV_PREFIX, ENV_RECORD, ZeroPPConfig
from hf_zeropp.step_record import read_records

STOCK = "stock FSDP2"
WHOLE = "balanced (qgz_accumulate: whole)"
UNQUANTIZED = "unquantized (qgz_accumulate: whole)"
TRIED: dict[str, dict[str, Any]] = {
    "balanced": {"preset": "balanced"},
    WHOLE: {"preset": "balanced", "qgz_accumulate": "whole"},
    # Gathers are those of FSDP2 that keeps weights, which is its best way behind a fast network. What balanced gains beside this
    # candidate is due to the three techniques of ZeRO++.
    UNQUANTIZED: {
        "preset": "balanced",
        "qwz_bits": None,
        "hpz_size": None,
        "qgz_bits": None,
        "qgz_intra_bits": None,
        "qgz_until": 1.0,
        "qgz_accumulate": "whole",
    },
    **{name: {"preset": name} for name in ("exact", "half_model", "min_traffic")},
}
"""The candidates beside stock, by name, with the settings of each as a config file has them."""
DIFFERENT = ("qwz_mode", "qwz_bits")
"""The settings in which the presets that are tried differ."""
SKIPPED_STEPS = 3
"""Steps that are not measured: the first makes optimizer states, and whole weights cross where changes of them follow."""
MIN_STEPS = 2 * SKIPPED_STEPS
_END_S = 30.0
"""Seconds that a job gets to end when the command is interrupted."""
_SHOWN_LINES = 12
"""The last lines of a job that failed, which are shown."""


class TrialError(ValueError):
    """A trial gave no measurement. The message says why."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """The records of this node's ranks in one run of the job, put together.

    Attributes:
        seconds: of each measured step, on the rank that took longest.
        losses: of each step from the first on, the mean of the ranks; empty where the model returned none.
        received: bytes that this node received per measured step from other nodes; 0 where nothing was counted.
        zero3: bytes that it would have received under ZeRO-3 by its definition; 0 as above.
        rate: the learning rate of the optimizer's slowest group, at its peak. A short job ends its schedule near 0.
        settings: in force; None with stock.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    received: float
    zero3: float
    rate: float
    settings: dict[str, Any] | None

    @classmethod
    def of(cls, ranks: Sequence[Sequence[dict[str, Any]]]) -> Trial:
        """Put together the lines of each rank.

        Raises:
            TrialError: they are no measurement.
        """
        num_steps = min(map(len, ranks), default=0)
        if num_steps == 0:
            raise TrialError(
                "no optimizer step of a model that FSDP2 shards was seen: set `distributed_type: FSDP` and `fsdp_version: 2`, "
                "and start a script that does not know this package by `hf-zeropp launch`, or with -m hf_zeropp.run in front"
            )
        if num_steps < MIN_STEPS:
            raise TrialError(
                f"the script made {num_steps} optimizer steps, and at least {MIN_STEPS} are needed: let it make more"
            )
        steps = [*zip(*(rank[:num_steps] for rank in ranks), strict=True)]
        measured = [line for step in steps[SKIPPED_STEPS:] for line in step]
        losses = [[line["loss"] for line in step] for step in steps]
        return cls(
            seconds=tuple(max(line["seconds"] for line in step) for step in steps[SKIPPED_STEPS:]),
            losses=() if any(None in step for step in losses) else tuple(map(statistics.fmean, losses)),
            received=statistics.fmean(line["received"] for line in measured),
            zero3=statistics.fmean(line["zero3"] for line in measured),
            rate=max(line["rate"] for line in measured),
            settings=measured[-1]["settings"],
        )


def start(job: Sequence[str], name: str, folder: Path, say: Callable[[str], None]) -> Trial:
    """Run the user's command once, to its end.

    Args:
        job: its words. ``{folder}`` in them becomes a folder of this trial.
        name: of the candidate: ``STOCK``, or one of ``TRIED``.
        folder: for this trial alone. It is made here.
        say: called with the candidate and the steps that it has made.

    Raises:
        TrialError: the job failed, was not recorded, or ran under settings of its own.
    """
    records, own = folder / "records", folder / "folder"
    records.mkdir(parents=True)
    own.mkdir()
    environment = os.environ | _variables(name) | {ENV_RECORD: str(records)}
    command = [word.replace("{folder}", str(own)) for word in job]
    with open(folder / "output", "w") as output:
        try:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise TrialError(f"the command cannot be started: {error}") from error
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                say(f"{name}: {max(map(len, read_records(records)), default=0)} steps")
        finally:
            if process.poll() is None:  # the command was interrupted. The job's launcher ends the ranks.
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                process.kill()  # nothing happens to a process that has ended
                process.wait()
        if process.returncode:
            raise TrialError(f"the job failed with exit status {process.returncode}. {_ending(Path(output.name))}")
    trial = Trial.of(read_records(records))
    if name == STOCK:
        return trial
    if trial.settings is None:
        raise TrialError(
            "nothing runs under ZeRO++: the model is sharded within one node (on one machine ZEROPP_RANKS_PER_NODE=1 tries what "
            "the preset pcie does), or the script turns it off (zeropp=False)"
        )
    if not _settings(name).items() <= trial.settings.items():
        raise TrialError(
            "the script has settings of its own (zeropp=...), which go over the environment: leave them out"
        )
    return trial


def _ending(output: Path) -> str:
    """Return the last lines of a failed job, and where all of its output lies from now on.

    The last lines are often a launcher's, and the error of a rank comes long before them.
    """
    with tempfile.NamedTemporaryFile(prefix="hf-zeropp-tune-failed-", suffix=".log", delete=False) as kept:
        kept.write(output.read_bytes())
    last = "\n".join(f"    {line}" for line in output.read_text(errors="replace").rstrip().splitlines()[-_SHOWN_LINES:])
    return f"It ended with:\n{last}\nAll of its output is in {kept.name}."


def _settings(name: str) -> dict[str, Any]:
    """Return the settings in which a candidate differs from the others, without its preset."""
    chosen = dict(TRIED[name])
    preset = ZeroPPConfig.preset(chosen.pop("preset"))
    return {field: getattr(preset, field) for field in DIFFERENT} | chosen


def _variables(name: str) -> dict[str, str]:
    """Return the variables under which the job runs as a candidate. They go over its file; its other settings stay."""
    if name == STOCK:
        return {ENV_ENABLED: "0"}
    settings = TRIED[name] | _settings(name)
    return {ENV_ENABLED: "1"} | {
        f"{ENV_PREFIX}{field.upper()}": "none" if value is None else str(value) for field, value in settings.items()
    }
