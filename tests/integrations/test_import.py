"""Importing the package changes nothing outside of it, and a ZeroPPCallback no Trainer before it takes part in one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.one_rank

SCRIPT = """
import os
import accelerate.accelerator, transformers.trainer
from accelerate.state import AcceleratorState
from transformers import Trainer

def surroundings():
    owners = Trainer, AcceleratorState, accelerate.Accelerator, accelerate.accelerator, transformers.trainer
    return dict(os.environ), [*transformers.trainer.DEFAULT_CALLBACKS], [dict(vars(owner)) for owner in owners]

before = surroundings()
from hf_zeropp import *
import hf_zeropp.integrations.launch.command, hf_zeropp.run
assert surroundings() == before

def of_trainers():
    return dict(vars(Trainer)), dict(vars(transformers.trainer)), [*transformers.trainer.DEFAULT_CALLBACKS]

before = of_trainers()
ZeroPPCallback()
assert of_trainers() == before
"""


def test_importing_and_constructing_leave_other_libraries_as_they_are() -> None:
    unset = ("GLOO_SOCKET_IFNAME", "NCCL_LAUNCH_ORDER_IMPLICIT")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    environ = kept | {"NCCL_SOCKET_IFNAME": "=lo"}  # from which gloo's variable is set, but not by an import
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
