"""Weights that are published have the names and forms of ``save_pretrained``'s files, in every family of the zoo.

In one process, without sharding: the conversion alone, block by block, against the file that Transformers writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn as nn
from expected import ALL
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_zeropp.frozen.published import PublishedWeight, merged_weights
from hf_zeropp.integrations.wrap_policy import block_names
from hf_zeropp.rollouts.publish import _converted_model, _read

pytestmark = pytest.mark.one_rank


def by_block(model: PreTrainedModel) -> dict[nn.Module | None, list[PublishedWeight]]:
    """The weights of each block that the usual wrap policy makes a unit of, and those of the rest."""
    names = block_names(model)
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    block_of = {param: block for block in blocks for param in block.parameters()}  # the innermost one stays
    groups: dict[nn.Module | None, list[PublishedWeight]] = {}
    for weight in merged_weights(model):
        groups.setdefault(block_of.get(weight.param), []).append(weight)
    return groups


def tied_names(model: PreTrainedModel) -> set[str]:
    """The names of parameters that have several: files keep any one of them."""
    found: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), set()).add(name)
    return {name for names in found.values() if len(names) > 1 for name in names}


MAIN = ("llama", "mixtral", "qwen2_moe", "gpt_oss", "t5", "llava")
"""Some that are converted for their files, and some that are not."""
FAMILIES = [pytest.param(each, marks=[] if each.name in MAIN else pytest.mark.thorough, id=each.name) for each in ALL]


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_are_those_of_the_files(family, tmp_path: Path) -> None:
    model = family.model()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    groups = by_block(model)
    converted = _converted_model(model, groups)
    if family.name in ("mixtral", "qwen2_moe", "llama"):
        assert (converted is None) == (family.name == "llama")
    published = {name: weight.clone() for members in groups.values() for name, weight in _read(members, converted)}
    buffers = revert_weight_conversion(model, dict(model.named_buffers())).keys()
    not_saved = model._keys_to_ignore_on_save or ()
    missing = saved.keys() - published.keys() - buffers
    added = published.keys() - saved.keys() - set(not_saved)
    tied = tied_names(model)
    assert missing <= tied and added <= tied, (sorted(missing), sorted(added))
    for name in published.keys() & saved.keys():
        assert torch.equal(published[name], saved[name]), name
