"""Scripts that do not know the package, run by ``hf_zeropp.run`` as ``hf-zeropp launch`` does on every rank."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from harness import run_ranks
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_zeropp import get_handle, run, traffic
from hf_zeropp.fsdp.sharded_models import find_sharded_modules

PLAIN = Path(__file__).parent / "scripts/plain_accelerate.py"
# The variables that Accelerate's launcher exports for FSDP2, and two emulated nodes.
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "ZEROPP_RANKS_PER_NODE": "2",
}
UNQUANTIZED = {"ZEROPP_QWZ_BITS": "none", "ZEROPP_QGZ_BITS": "none", "ZEROPP_QGZ_INTRA_BITS": "none"}
OFF = {"ZEROPP_ENABLED": "0"}


def run_script(rank: int, command: list[str], micro_steps: int) -> dict | None:
    """Run a script in this process, and return the bytes of its model per step; None where no handle was made."""
    handles = {}

    def keep_handles(*_) -> None:
        found = filter(None, map(get_handle, find_sharded_modules()))
        # The prediction asks process groups, which a Trainer destroys at its end.
        handles.update({id(handle): (handle, handle.predict(micro_steps)) for handle in found})

    register_optimizer_step_post_hook(keep_handles)  # the script's model does not outlive the script
    sys.argv = ["python", *command]
    run.main()
    if not handles:
        return None
    ((handle, predicted),) = handles.values()
    counted = handle.traffic.cross_node_bytes / handle.traffic.steps / 2
    return {"counted": counted, "predicted": traffic.total(predicted.values()).cross_node}


def run_plain(folder: Path, env: dict, *flags: str) -> tuple[list[float], dict | None]:
    out = folder / "losses.json"
    command = [str(PLAIN), "--out", str(out), *flags]
    counts = run_ranks(run_script, 4, command, 2, env=LAUNCHED | env, init=False)
    return json.loads(out.read_text()), counts[0]


@pytest.mark.thorough
def test_a_plain_accelerate_script(tmp_path: Path) -> None:
    stock, without = run_plain(tmp_path, OFF)
    unquantized, _ = run_plain(tmp_path, UNQUANTIZED)
    ours, counts = run_plain(tmp_path, {}, "--save_to", str(tmp_path / "state"))
    # A checkpoint is loaded before anything has run, and PyTorch steps the optimizer for that.
    resumed, _ = run_plain(tmp_path, {}, "--resume_from", str(tmp_path / "state"), "--steps", "1")
    assert resumed[0] < ours[0]
    # Each rank may train a model of its own before anything is sharded.
    assert run_plain(tmp_path, {}, "--train_a_probe_first")[0] == ours
    assert without is None
    assert unquantized == pytest.approx(stock, rel=1e-6)
    assert ours == pytest.approx(stock, rel=2e-3) and ours != stock
    assert counts["counted"] == pytest.approx(counts["predicted"], rel=0.04)


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["", "raise SystemExit"], ids=["ends", "exits"])
def test_a_script_that_never_shards_fails_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    script = tmp_path / "alone.py"
    body = "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.AdamW(model.parameters())\n"
    script.write_text(f"{body}model(torch.ones(1, 4)).sum().backward()\noptimizer.step()\nprint('trained')\n{end}\n")
    command = [sys.executable, "-m", "hf_zeropp.run", str(script)]
    monkeypatch.setenv("WORLD_SIZE", "4")
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1 and "trained" in ran.stdout
    assert "AdamW" in ran.stderr and "no model runs under ZeRO++" in ran.stderr and "call apply_zeropp" in ran.stderr
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert subprocess.run(command, capture_output=True).returncode == 0


ALONE = {
    "plugin": "from accelerate import Accelerator\nfrom hf_zeropp import ZeroPPPlugin\nAccelerator(fsdp_plugin=ZeroPPPlugin())\n",
    "unmodified": "from accelerate import Accelerator\nAccelerator()\n",
    "trainer": (
        "import torch, transformers\nfrom hf_zeropp import ZeroPPCallback\narguments = transformers.TrainingArguments('out')\n"
        "transformers.Trainer(torch.nn.Linear(4, 1), arguments, callbacks=[ZeroPPCallback()])\n"
    ),
}


def start_without_device(rank: int, folder: str) -> list[str]:
    """Run each script in a folder of this rank's, and return what it says."""
    said = []
    for name, body in ALONE.items():
        place = Path(folder) / f"{name}_{rank}"
        place.mkdir()
        os.chdir(place)
        Path("script.py").write_text(f"{body}open('written', 'w')\n")
        AcceleratorState._reset_state(reset_partial_state=True)
        sys.argv = ["python", "script.py"]
        with pytest.raises(ValueError) as error:
            run.main() if name == "unmodified" else runpy.run_path("script.py")
        said.append(str(error.value))
        assert os.listdir() == ["script.py"]
    return said


def test_ranks_that_accelerate_does_not_join_stop_before_they_write(tmp_path: Path) -> None:
    """There is no device, and nothing says that the CPU is to be used. Each rank would be the main process."""
    env = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
    for rank, said in enumerate(run_ranks(start_without_device, 2, str(tmp_path), env=env, init=False)):
        for message in said:
            assert f"rank {rank} of 2" in message and "export ACCELERATE_USE_CPU=true" in message
