"""PEFT's operations on packed, sharded weights, on 4 ranks (2 nodes), against the same model unsharded."""

from __future__ import annotations

import pytest
import torch
from frozen_runs import UNQUANTIZED, packed_copy, prepare, reset_accelerate, tiny_llama, tokens, trainable, with_adapter
from harness import run_ranks
from peft import PeftModel, TrainableTokensConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from hf_zeropp.frozen.units import frozen_parameters


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(tokens()).logits


def run_adapters(rank: int, bits: int | None, use_dora: bool) -> dict[str, tuple[float, float]]:
    """After each operation: how far sharded and unsharded logits are apart, and how far it moved them."""
    model = with_adapter(tiny_llama(tie_word_embeddings=use_dora), ("default", "other"), use_dora=use_dora)
    reference = packed_copy(model, bits)
    *_, model, _ = prepare(model, frozen_bits=bits, **UNQUANTIZED)
    start, gaps = logits(reference), {}

    def note(name: str) -> None:
        ours, theirs = logits(model), logits(reference)
        gaps[name] = ((ours - theirs).abs().max().item(), (theirs - start).abs().max().item())

    note("adapter")
    for name in ("other", "default"):
        model.set_adapter(name)
        reference.set_adapter(name)
        note(name)
    with model.disable_adapter(), reference.disable_adapter():
        note("disabled")
    return gaps


@pytest.mark.thorough("None*", "8*")
@pytest.mark.parametrize(("bits", "use_dora"), [(4, False), (8, True), (None, False)])
def test_switching_and_disabling_adapters_equal_the_unsharded_model(bits, use_dora):
    for gaps in run_ranks(run_adapters, 4, bits, use_dora):
        for name, (gap, moved) in gaps.items():
            assert gap < 1e-5, (name, gaps)
            assert (moved == 0) == (name in ("adapter", "default")), (name, gaps)


def run_merging(rank: int, bits: int | None, use_dora: bool) -> tuple[list[str], float]:
    """Return the errors of a merge, a safe merge and an unmerge, and how far these attempts moved the logits."""
    *_, model, _ = prepare(with_adapter(tiny_llama(), use_dora=use_dora), frozen_bits=bits, **UNQUANTIZED)
    before, said = logits(model), []
    layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
    for operation in (model.merge_adapter, lambda: model.merge_adapter(safe_merge=True), layer.unmerge):
        with pytest.raises(RuntimeError) as error:
            operation()
        said.append(str(error.value))
    return said, (logits(model) - before).abs().max().item()


@pytest.mark.thorough("None*")
@pytest.mark.parametrize(("bits", "use_dora"), [(4, False), (None, True)])
def test_merging_into_a_sharded_base_is_refused_and_changes_nothing(bits, use_dora):
    for said, moved in run_ranks(run_merging, 4, bits, use_dora):
        assert len(said) == 3 and moved == 0
        assert all("sharded within nodes" in each and "merge_and_unload" in each for each in said)


def run_tokens(rank: int) -> list[float]:
    """How far the logits are from the unsharded model's behind one step, in each case."""
    return [gap_of_tokens(*case, with_lora) for case in TOKENS for with_lora in (True, False)]


# Whether the head is tied, the bits of a base that was packed before, and those of what is packed while it is sharded.
TOKENS = [(True, None, None), (True, 4, None), (True, None, 4), (False, None, 4)]


def gap_of_tokens(tied: bool, bits: int | None, frozen_bits: int | None, with_lora: bool) -> float:
    reset_accelerate()
    base = packed_copy(tiny_llama(tie_word_embeddings=tied).requires_grad_(False), bits, pack_embeddings=True)
    if with_lora:
        model = with_adapter(base, trainable_token_indices=[*range(40)])
    else:
        settings = {"token_indices": [*range(40)], "target_modules": ["embed_tokens"], "init_weights": False}
        torch.manual_seed(1)
        model = get_peft_model(base, TrainableTokensConfig(**settings))
    reference = packed_copy(model, frozen_bits, pack_embeddings=True)
    settings = {"frozen_bits": frozen_bits, "pack_embeddings": frozen_bits is not None, **UNQUANTIZED}
    *_, model, optimizer = prepare(model, **settings)
    kept_in_node = set(frozen_parameters(model))
    assert {param for param in model.parameters() if not param.requires_grad} == kept_in_node
    # A packed weight is stored as codes and scales.
    of_tokens = "token_adapter.base_layer" if with_lora else "embed_tokens.base_layer"
    assert sum(of_tokens in name for name, _ in model.named_parameters()) == (2 if bits or frozen_bits else 1)
    for each, step in ((model, optimizer), (reference, torch.optim.SGD(trainable(reference), lr=0.05))):
        each(input_ids=tokens(), labels=tokens()).loss.backward()
        step.step()
    return (logits(model) - logits(reference)).abs().max().item()


def test_single_tokens_train_as_in_the_unsharded_model():
    """Also where Accelerate would make two units of the embedding and the head, which share them. The base stays in the node."""
    for gaps in run_ranks(run_tokens, 4):
        assert max(gaps) < 1e-5, gaps


def run_saving(rank: int, folder: str) -> float:
    model = with_adapter(tiny_llama())
    accelerator, _, model, _ = prepare(model, frozen_bits=4, **UNQUANTIZED)
    expected = logits(model)
    state_dict = accelerator.get_state_dict(model)
    if rank == 0:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state_dict)
    accelerator.wait_for_everyone()
    reset_accelerate()
    reloaded = packed_copy(PeftModel.from_pretrained(tiny_llama(), folder), 4)
    return (logits(reloaded) - expected).abs().max().item()


@pytest.mark.thorough
def test_the_adapter_folder_is_peft_s(tmp_path):
    assert max(run_ranks(run_saving, 4, str(tmp_path))) < 1e-5
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 60_000, "the base is not in it"
