"""PEFT's operations on packed, sharded weights, on 4 ranks (2 nodes), against the same model unsharded."""

from __future__ import annotations

import pytest
import torch
from frozen_runs import UNQUANTIZED, packed_copy, prepare, reset_accelerate, tiny_llama, tokens, trainable, with_adapter
from harness import expect_errors, run_ranks
from peft import PeftModel, TrainableTokensConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor

from hf_zeropp.frozen.modules import packed_modules
from hf_zeropp.frozen.storage import as_bytes
from hf_zeropp.frozen.units import frozen_parameters


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(tokens()).logits


def stored_base(model) -> list[torch.Tensor]:
    """This rank's part of the base's matrices: codes where they are packed."""
    stored = (
        param for name, param in model.named_parameters() if "base_layer.weight" in name and "_scales" not in name
    )
    locals_ = (param.to_local() if isinstance(param, DTensor) else param for param in stored)
    return [(as_bytes(param) if param.itemsize == 1 else param).detach().clone() for param in locals_]


def run_merging(rank: int, bits: int | None, use_dora: bool) -> dict[str, tuple[float, float]]:
    """After each operation: how far sharded and unsharded logits are apart, and how far it moved them."""
    model = with_adapter(tiny_llama(tie_word_embeddings=use_dora), ("default", "other"), use_dora=use_dora)
    reference = packed_copy(model, bits)
    *_, model, _ = prepare(model, frozen_bits=bits, **UNQUANTIZED)
    start, gaps = logits(reference), {}

    def note(name: str) -> None:
        ours, theirs = logits(model), logits(reference)
        gaps[name] = ((ours - theirs).abs().max().item(), (theirs - start).abs().max().item())

    def both(operation) -> None:
        operation(reference)
        operation(model)

    note("adapter")
    before = stored_base(model)
    both(lambda each: each.merge_adapter())
    note("merged")
    assert all(not torch.equal(*pair) for pair in zip(before, stored_base(model), strict=True))
    both(lambda each: each.unmerge_adapter())
    note("unmerged")
    if bits is not None:
        assert all(torch.equal(*pair) for pair in zip(before, stored_base(model), strict=True)), "codes are restored"
    both(lambda each: each.merge_adapter(safe_merge=True))
    note("safely merged")
    both(lambda each: each.unmerge_adapter())
    both(lambda each: each.set_adapter("other"))
    note("other adapter")
    # Older PEFT merges a second adapter of DoRA by norms of the weight that holds the first, and its unmerge gives another base.
    if not use_dora or hasattr(LoraLayer, "_unmerged_base_weight"):
        both(lambda each: each.merge_adapter(adapter_names=["default", "other"]))
        note("both merged")
        both(lambda each: each.unmerge_adapter())
    both(lambda each: each.set_adapter("default"))
    note("back")
    with model.disable_adapter(), reference.disable_adapter():
        note("disabled")
    return gaps


@pytest.mark.parametrize(("bits", "use_dora"), [(4, False), (8, True), (None, False), (None, True)])
def test_merging_switching_and_disabling_equal_the_unsharded_model(bits, use_dora):
    for gaps in run_ranks(run_merging, 4, bits, use_dora):
        for name, (gap, moved) in gaps.items():
            assert gap < 1e-5, (name, gaps)
            if bits is not None:  # packing a sum rounds it, and unmerging restores the codes
                assert (moved == 0) == (name in ("adapter", "unmerged", "back")), (name, gaps)


def run_tokens(rank: int, tied: bool, bits: int | None, frozen_bits: int | None, with_lora: bool) -> float:
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


@pytest.mark.parametrize(
    ("tied", "bits", "frozen_bits"), [(True, None, None), (True, 4, None), (True, None, 4), (False, None, 4)]
)
@pytest.mark.parametrize("with_lora", [True, False])
def test_single_tokens_train_as_in_the_unsharded_model(tied, bits, frozen_bits, with_lora):
    """Also where Accelerate would make two units of the embedding and the head, which share them. The base stays in the node."""
    assert max(run_ranks(run_tokens, 4, tied, bits, frozen_bits, with_lora)) < 1e-5


def unmerge_what_was_merged_before(rank: int) -> tuple[torch.Tensor, ...]:
    """The logits of a packed model: at the start, with one adapter merged and sharded, with another one too, and unmerged."""
    model = with_adapter(tiny_llama(), ("default", "other"))
    for name, param in model.named_parameters():
        if "lora_B" in name:  # both are smaller than what packing rounds, most of them
            param.data.mul_(0.003 if "other" in name else 0.03)
    model = packed_copy(model, 4)
    with model.disable_adapter():
        found = [logits(model)]
    model.merge_adapter()
    *_, model, _ = prepare(model, frozen_bits=4, **UNQUANTIZED)
    for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
        kept, stored = vars(layer)["_zeropp_kept"].codes, layer.get_base_layer().weight_codes.to_local()
        assert kept.shape == stored.shape and kept.untyped_storage().nbytes() == kept.nbytes
    found.append(logits(model))
    model.merge_adapter(["other"])
    found.append(logits(model))
    model.unmerge_adapter()
    with model.disable_adapter():
        found.append(logits(model))
    return tuple(found)


def test_a_merge_before_sharding_is_taken_back_behind_it():
    for start, merged, both, unmerged in run_ranks(unmerge_what_was_merged_before, 4):
        assert torch.equal(start, unmerged) and not torch.equal(start, merged)
        assert (both - start).norm() > 0.5 * (merged - start).norm(), "the second does not take the first out"


def run_merging_in_a_forward(rank: int, bits: int | None) -> None:
    model = with_adapter(tiny_llama())
    *_, model, _ = prepare(model, frozen_bits=bits, **UNQUANTIZED)
    logits(model)
    model.merge_adapter()
    with model.disable_adapter():
        logits(model)  # PEFT unmerges in the middle of it


@pytest.mark.parametrize("bits", [None, 4])
def test_unmerging_within_a_forward_pass_is_refused(bits):
    for said in expect_errors(run_merging_in_a_forward, 4, bits):
        assert said.startswith("RuntimeError: An adapter is merged or unmerged while") and "unmerge_adapter()" in said


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


def test_the_adapter_folder_is_peft_s(tmp_path):
    assert max(run_ranks(run_saving, 4, str(tmp_path))) < 1e-5
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 60_000, "the base is not in it"


def test_merge_and_unload_leaves_packed_layers():
    model = packed_copy(with_adapter(tiny_llama()), 8)
    before = logits(model)
    merged = model.merge_and_unload()
    assert len(list(packed_modules(merged))) == 14  # 7 linear layers in each block
    assert (logits(merged) - before).abs().max() < 0.1 * before.abs().max()
