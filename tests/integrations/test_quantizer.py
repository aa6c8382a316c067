"""Transformers loads straight into packed weights, saves them, reads them back, and refuses what is damaged or hostile."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from frozen_runs import VOCAB, packed_copy, tiny_llama, tiny_mixtral, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_zeropp import ZeroPPQuantConfig
from hf_zeropp.frozen.modules import PackedLinear
from hf_zeropp.integrations.pretrained_shape import pretrained_shape

pytestmark = pytest.mark.one_rank


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("packs", (False, True), ids=("dense embeddings", "packed embeddings"))
def test_loading_equals_packing_and_round_trips(tmp_path, tied, packs):
    tiny_llama(tie_word_embeddings=tied).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16).requires_grad_(False)
    config = ZeroPPQuantConfig(bits=4, pack_embeddings=packs)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, quantization_config=config)
    assert torch.equal(logits(loaded), logits(packed_copy(dense, 4, pack_embeddings=packs)))
    assert type(loaded.lm_head) is (PackedLinear if packs else torch.nn.Linear)
    assert type(loaded.model.layers[0].mlp.up_proj) is PackedLinear
    loaded.save_pretrained(tmp_path / "packed")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(reloaded), logits(loaded))
    head, embedding = (
        module.weight_codes if packs else module.weight for module in (reloaded.lm_head, reloaded.model.embed_tokens)
    )
    assert (head is embedding) == tied
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("dense", "packed")]
    more = 0 if packs else (2 - tied) * 2 * VOCAB * 64  # the embeddings in 16 bits
    assert sizes[1] < 0.32 * sizes[0] + more  # of which most are scales of rows shorter than a block, and headers
    saved = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    settings = {"bits": 4, "block": 128, "pack_embeddings": packs, "quant_method": "zeropp", "skip": [], "version": 3}
    assert saved == settings


def test_a_weight_tied_to_a_skipped_one_stays_dense(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    config = ZeroPPQuantConfig(bits=8, skip=["lm_head"], pack_embeddings=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert type(loaded.lm_head.weight) is torch.nn.Parameter
    loaded.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), logits(loaded))


def test_fused_experts_round_trip(tmp_path):
    model = tiny_mixtral()
    model.save_pretrained(tmp_path / "dense")  # one tensor per expert
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=ZeroPPQuantConfig(bits=8))
    assert loaded.model.layers[0].mlp.experts.gate_up_proj_codes.dtype == torch.uint8
    assert (logits(loaded) - logits(model)).abs().max() < 0.05 * logits(model).abs().max()
    loaded.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), logits(loaded))


MEMORY_PROBE = """
    import os, sys, threading, time, torch
    from transformers import AutoModelForCausalLM
    from hf_zeropp import ZeroPPQuantConfig

    def resident(kind):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))

    torch.set_num_threads(1)
    before, peak, done = resident("RssAnon"), 0, False

    def watch():
        global peak
        while not done:
            peak = max(peak, resident("RssAnon"))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.bfloat16, quantization_config=ZeroPPQuantConfig(bits=4)
    )
    done = True
    watcher.join()
    print("PEAK", max(peak, resident("RssAnon")) - before, sum(p.numel() for p in model.parameters()))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_16_bit_model_is_never_in_memory(tmp_path):
    """Memory the process owns; pages of the checkpoint that the system keeps mapped can be dropped at any time."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 4096}
    model = tiny_llama(**sizes).to(torch.bfloat16)
    dense_bytes = 2 * model.num_parameters()
    model.save_pretrained(tmp_path)
    del model
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY_PROBE), str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak = int(output.split("PEAK ")[1].split()[0])
    assert peak < 0.6 * dense_bytes, f"{peak / dense_bytes:.2f} of the 16-bit model's size"


@pytest.mark.parametrize(
    ("version", "words"), [(None, "an earlier version of hf_zeropp"), (2, "version 2 of hf_zeropp's format")]
)
def test_a_packed_checkpoint_of_another_version_is_refused(packed, version, words):
    """By all that reads one. The first had other codes in 4 bits and wrote no version into config.json."""
    config = json.loads((packed / "config.json").read_text())
    settings = config["quantization_config"]
    assert settings.pop("version") == 3
    settings |= {} if version is None else {"version": version}
    (packed / "config.json").write_text(json.dumps(config))
    for read in (AutoModelForCausalLM.from_pretrained, pretrained_shape):
        with pytest.raises(ValueError, match=f"packed' was packed by {words}.* Pack the 16-bit checkpoint anew"):
            read(str(packed))


def test_a_packed_language_model_gets_a_new_head(tmp_path):
    """A head that the checkpoint does not have is initialized, as over a base in 16 bits, and is a layer that trains."""
    tiny_llama().save_pretrained(tmp_path / "dense")
    settings = {"quant_method": "zeropp", "bits": 4}  # a dictionary has the defaults of the config
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=settings)
    assert type(packed.lm_head) is torch.nn.Linear and type(packed.model.layers[0].mlp.up_proj) is PackedLinear
    packed.save_pretrained(tmp_path / "packed")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed", num_labels=3)
    assert type(model.score) is torch.nn.Linear and model.score.weight.std() > 0
    assert torch.equal(model.model(tokens()).last_hidden_state, packed.model(tokens()).last_hidden_state)


# A packed checkpoint may be cut off, damaged, or made by an enemy.

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj.weight"


class Bomb:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    tiny_llama(num_hidden_layers=1).save_pretrained(folder / "dense")
    config = ZeroPPQuantConfig(bits=4, pack_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config)
    model.save_pretrained(folder / "packed")
    return folder / "packed"


@pytest.fixture
def packed(good: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to damage."""
    return shutil.copytree(good, tmp_path / "packed")


def store(folder: Path, tensors: dict[str, torch.Tensor], name: str = WEIGHTS) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})


def change(suffix: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        store(folder, tensors | {UP + suffix: new(tensors[UP + suffix])})

    return damage


def say(**quantization: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= quantization
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def split(folder: Path, second: str = "model-2.safetensors") -> None:
    """Store the head in a file of its own, which the index calls ``second``."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    in_second = [name for name in tensors if name.startswith("lm_head")]
    store(folder, {name: tensors.pop(name) for name in in_second}, second)
    store(folder, tensors, "model-1.safetensors")
    weight_map = dict.fromkeys(tensors, "model-1.safetensors") | dict.fromkeys(in_second, second)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def ask_for_all_memory(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{}")


def rename_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb(folder.parent / "exploded")))


def be_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "exploded")))


def name_a_pickle_in_the_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "weights.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "exploded")))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {UP: "weights.bin"}}))


def link_out(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere.safetensors")


def climb_out(folder: Path) -> None:
    split(folder, "../model-2.safetensors")


def lose_a_file(folder: Path) -> None:
    split(folder)
    (folder / "model-2.safetensors").unlink()


def hold_a_tensor_twice(folder: Path) -> None:
    split(folder)
    both = load_file(folder / "model-1.safetensors") | load_file(folder / "model-2.safetensors")
    store(folder, both, "model-2.safetensors")


def lose_scales(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[UP + "_scales"]
    store(folder, tensors)


def rename_a_weight(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    store(folder, {name.replace(".up_proj", ".up_proj_new"): tensor for name, tensor in tensors.items()})


ATTACKS = {
    cut_off: "model.safetensors' is cut off",
    ask_for_all_memory: "model.safetensors' is cut off",
    rename_a_pickle: "model.safetensors' is cut off",
    be_a_pickle: "pytorch_model.bin' is not a safetensors file",
    name_a_pickle_in_the_index: "weights.bin' is not a safetensors file",
    link_out: "model.safetensors' leads out of its folder",
    climb_out: "model-2.safetensors",
    lose_a_file: "model-2.safetensors' cannot be opened",
    hold_a_tensor_twice: "Both .*model-1.* and .*model-2.* hold",
    lose_scales: "no file of the checkpoint holds .*weight_scales",
    rename_a_weight: "does not fit",
    change("_scales", lambda scales: scales.to(torch.int8)): "weight_scales is I8",
    change("_scales", lambda scales: torch.full_like(scales, 255)): "weight_scales holds scales that are NaN",
    change("_codes", lambda codes: codes[1:]): "These are not a weight in 4 bits",
    say(bits=8): "not a weight in 8 bits",
    say(skip="lm_head"): "skip must be",
    # Transformers would fill the dense weight that is not there with random values.
    say(skip=["lm_head"]): r"holds lm_head.weight_codes, but by config.json .* says skip=\['lm_head'\]",
    say(pack_embeddings=False): r"weight_codes, but by config.json .* says skip=\[\] and pack_embeddings=False",
}


@pytest.mark.parametrize(("damage", "match"), ATTACKS.items(), ids=ATTACKS.values())
def test_a_damaged_or_hostile_checkpoint_is_refused(packed, damage, match):
    damage(packed)
    with pytest.raises(ValueError, match=match):
        AutoModelForCausalLM.from_pretrained(packed)
    assert not (packed.parent / "exploded").exists()


def test_two_files_and_the_links_of_the_hub_cache_are_followed(packed):
    split(packed)
    snapshot, blobs = packed.parent / "models--a--b/snapshots/0123", packed.parent / "models--a--b/blobs"
    shutil.copytree(packed, snapshot)
    blobs.mkdir()
    for file in snapshot.iterdir():
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    for folder in (packed, snapshot):
        AutoModelForCausalLM.from_pretrained(folder)
