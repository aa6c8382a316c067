"""Axolotl, started as its users do, where it is installed (``bash scripts/test_versions.sh axolotl``); else its interface."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from accelerate import Accelerator
from harness import free_port
from rollout_runs import tokenizer
from test_trl import phrases
from trainer_runs import tiny_model

from hf_zeropp.integrations.launch import unmodified

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/configs/axolotl_lora.yaml"
PLUGIN = "hf_zeropp.integrations.axolotl"
ON_CPU = Path(__file__).parent / "scripts/axolotl_on_cpu.py"


def axolotl_config(folder: Path, zeropp) -> Path:
    """The example, with a tiny model and data, for 2 ranks on CPU."""
    tokenizer().save_pretrained(folder / "model")
    tiny_model().save_pretrained(folder / "model")
    lines = [json.dumps({"text": text}) for text in phrases(64, 12, 1)]
    (folder / "data").mkdir()
    (folder / "data/train.jsonl").write_text("\n".join(lines))
    config = yaml.safe_load(EXAMPLE.read_text()) | {
        "zeropp": zeropp,
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "data/train.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "special_tokens": {"pad_token": "<pad>"},
        "sequence_len": 32,
        "max_steps": 3,
        "logging_steps": 1,
        "lr_scheduler": "constant",
        "bf16": False,
        "tf32": False,
    }
    del config["num_epochs"]
    (folder / "axolotl.yaml").write_text(json.dumps(config))
    return folder / "axolotl.yaml"


def train_with_axolotl(folder: Path, zeropp) -> tuple[list[float], str]:
    """Returns the losses, and all that was printed."""
    folder.mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled", "HF_HOME": str(folder)}
    environ = os.environ | offline | {"ACCELERATE_USE_CPU": "true"}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, *launcher, str(ON_CPU), str(axolotl_config(folder, zeropp))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=folder, env=environ)
    assert result.returncode == 0, result.stderr[-3000:]
    printed = result.stdout + result.stderr
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)], printed


@pytest.mark.skipif(
    find_spec("axolotl") is None, reason="Axolotl is not installed: bash scripts/test_versions.sh axolotl"
)
def test_axolotl_trains_lora_on_a_packed_base(tmp_path: Path) -> None:
    ours, printed = train_with_axolotl(tmp_path / "ours", {"ranks_per_node": 1, "frozen_bits": 8})
    stock, stock_printed = train_with_axolotl(tmp_path / "stock", False)
    assert len(stock) == 3 and ours == pytest.approx(stock, rel=0.01) and ours != stock
    assert "gather, across nodes" in printed and "gather, across nodes" not in stock_printed
    assert (tmp_path / "ours/out/adapter_model.safetensors").stat().st_size > 1000


@pytest.fixture
def plugin(monkeypatch):
    """The plugin, on Axolotl's base class, or where Axolotl is not installed on an empty one."""
    if find_spec("axolotl") is None:
        modules = {name: ModuleType(name) for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base")}
        modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    from hf_zeropp.integrations.axolotl import ZeroPPAxolotlPlugin

    monkeypatch.setattr(Accelerator, "__init__", Accelerator.__init__)
    monkeypatch.setattr(unmodified, "_settings", None)
    return ZeroPPAxolotlPlugin()


def test_the_plugin_of_axolotl_puts_its_settings_in_force(plugin) -> None:
    import accelerate.accelerator
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    assert yaml.safe_load(EXAMPLE.read_text())["plugins"] == [f"{type(plugin).__module__}.{type(plugin).__name__}"]
    module, name = plugin.get_input_args().rsplit(".", 1)
    assert getattr(sys.modules[module], name)(zeropp={"preset": "paper"}).zeropp == {"preset": "paper"}
    config = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}, "zeropp": {"preset": "paper"}}
    plugin.register(config)
    assert unmodified._settings == {"preset": "paper"}
    accelerate.accelerator.fsdp2_prepare_model = None  # as Axolotl replaces it
    plugin.post_trainer_create(config | {"zeropp": False}, None)
    assert accelerate.accelerator.fsdp2_prepare_model is None
    plugin.post_trainer_create(config, None)
    assert accelerate.accelerator.fsdp2_prepare_model is fsdp2_prepare_model


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zeropp": {}}, "expected fsdp_version: 2 and an fsdp_config"),
        ({"zeropp": None, "fsdp_version": 1, "fsdp_config": {"x": 1}}, "got fsdp_version: 1"),
        ({"zeropp": {"presett": 1}, "fsdp_version": 2, "fsdp_config": {"x": 1}}, "Did you mean 'preset'"),
    ],
)
def test_mistakes_in_an_axolotl_config(plugin, config, words) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        plugin.register(config)
    plugin.register(config | {"zeropp": False})
