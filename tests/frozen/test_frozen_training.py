"""LoRA over frozen units on 4 ranks (2 nodes): the losses are the unsharded model's, and the base never crosses nodes."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from frozen_runs import UNQUANTIZED, packed_copy, prepare, reset_accelerate, tiny_llama, tokens, trainable, with_adapter
from harness import each_case, run_ranks
from torch.distributed.checkpoint import FileSystemReader

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.traffic import GATHER_FROZEN

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run LoRA. ``ram_efficient``: rank 0 alone holds the weights at first."""

    bits: int | None
    checkpointing: bool = False
    tied: bool = False
    dora: bool = False
    mixed_precision: str = "no"
    ranks_per_node: int = 2
    ram_efficient: bool = False

    def model(self):
        model = with_adapter(tiny_llama(tie_word_embeddings=self.tied), use_dora=self.dora)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        return model


CASES = [Case(4), Case(4, tied=True, mixed_precision="bf16", ram_efficient=True)]
OTHERS = [
    Case(None),
    Case(8, checkpointing=True, tied=True, dora=True),
    Case(None, tied=True, mixed_precision="bf16", checkpointing=True),
    Case(4, ranks_per_node=1, dora=True),
    Case(8, ranks_per_node=4),
]


def run_cases(rank: int, cases: list[Case]) -> None:
    each_case(cases, lambda case: run_case(rank, case))


def run_case(rank: int, case: Case) -> None:
    reset_accelerate()
    model = case.model()
    reference = packed_copy(model, case.bits)
    if case.ram_efficient and rank:
        for param in model.parameters():
            param.data.fill_(7)
    accelerator, plugin, model, optimizer = prepare(
        model,
        ranks_per_node=case.ranks_per_node,
        mixed_precision=case.mixed_precision,
        ram_efficient=case.ram_efficient,
        frozen_bits=case.bits,
        **UNQUANTIZED,
    )
    reference_optimizer = torch.optim.SGD(trainable(reference), lr=0.05)
    tolerance = 3e-5 if case.mixed_precision == "no" else 0.02
    batch = tokens()
    own = batch[rank : rank + 1]
    for step in range(STEPS):
        if step == 1:  # the first step also sends weights for the first time
            plugin.handle_of(model).traffic.reset()
        loss = train_step(model, optimizer, own, accelerator.backward)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.mixed_precision == "bf16")
        expected = train_step(reference, reference_optimizer, batch, torch.Tensor.backward, autocast)
        assert accelerator.reduce(loss.float(), "mean").item() == pytest.approx(expected.item(), abs=tolerance)
    handle = plugin.handle_of(model)
    counts = per_step(handle.traffic.counts, STEPS - 1)
    assert counts == per_step(handle.predict(micro_steps=1), 1)
    assert (GATHER_FROZEN in counts) == (1 < case.ranks_per_node < 4)  # one node has nothing to save
    assert counts.get(GATHER_FROZEN, (0, 0))[1] == 0
    # Adapters are gathered once and reduced once: twice this rank's share arrives from each other node. The rest is padding.
    width = 4 if case.mixed_precision == "no" else 2
    num_nodes = 4 // case.ranks_per_node
    adapters = 2 * width * sum(param.numel() for param in trainable(model)) * (num_nodes - 1) / 4
    assert adapters * 0.99 <= sum(cross for _, cross in counts.values()) <= adapters * 1.4


def train_step(model, optimizer, batch: torch.Tensor, backward, autocast=None) -> torch.Tensor:
    with autocast or contextlib.nullcontext():
        loss = model(input_ids=batch, labels=batch).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def per_step(counts, steps: int) -> dict[str, tuple[float, float]]:
    rows = {name: (count.intra_node / steps, count.cross_node / steps) for name, count in counts.items()}
    return {name: row for name, row in rows.items() if any(row)}


@pytest.mark.thorough("others")
@pytest.mark.parametrize("cases", [CASES, OTHERS], ids=["in 4 bits", "others"])
def test_losses_are_those_of_the_unsharded_model_and_bytes_the_predicted_ones(cases):
    run_ranks(run_cases, 4, cases)


def run_without_trainable_parameters(rank: int) -> tuple[float, set[str]]:
    """A reference model: prepared alone, evaluated, and used to generate."""
    model = tiny_llama().requires_grad_(False)
    reference = packed_copy(model, 8)
    plugin = ZeroPPPlugin(zeropp={"ranks_per_node": 2, "frozen_bits": 8})
    # ``Accelerator.prepare`` wants an optimizer beside a model. This function is what it calls, and what trainers use.
    model = fsdp2_prepare_model(Accelerator(fsdp_plugin=plugin), model)
    batch = tokens()
    gap = (model(batch).logits - reference(batch).logits).abs().max().item()
    assert torch.equal(*(each.generate(batch, max_new_tokens=3 + rank, do_sample=False) for each in (model, reference)))
    return gap, {name for name, count in plugin.handle_of(model).traffic.counts.items() if count.cross_node}


def test_a_model_without_trainable_parameters_never_crosses_nodes():
    assert run_ranks(run_without_trainable_parameters, 4) == [(0.0, set())] * 4


def run_sharded_save(rank: int, folder: str, ranks_per_node: int) -> torch.Tensor:
    """Save with nodes of 2 ranks, or load with nodes of another size; then compute."""
    model = with_adapter(tiny_llama())
    accelerator, _, model, _ = prepare(model, ranks_per_node=ranks_per_node, frozen_bits=4, **UNQUANTIZED)
    accelerator.state.fsdp_plugin.state_dict_type = "SHARDED_STATE_DICT"
    accelerator.state.fsdp_plugin.set_state_dict_type()
    if ranks_per_node == 2:
        accelerator.save_state(folder)
    else:
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().zero_()
        accelerator.load_state(folder)
    with torch.no_grad():
        logits = model(tokens()).logits
    dist.barrier()
    return logits


def names_of_codes(written) -> set[str]:
    return {index.fqn for index in written if index.fqn.endswith("_codes")}


def test_sharded_checkpoints_hold_the_base_once_and_fit_other_nodes(tmp_path):
    saved = run_ranks(run_sharded_save, 4, str(tmp_path), 2)
    folder = next(path.parent for path in tmp_path.rglob(".metadata") if "model" in path.parent.name)
    written = FileSystemReader(folder).read_metadata().storage_data
    assert {len([index for index in written if index.fqn == fqn]) for fqn in names_of_codes(written)} == {2}
    # Nothing else is in the files: each part was written by one of the nodes.
    assert sum(info.length for info in written.values()) == sum(file.stat().st_size for file in folder.glob("*.distcp"))
    loaded = run_ranks(run_sharded_save, 4, str(tmp_path), 4)
    for ours, theirs in zip(saved, loaded, strict=True):
        assert torch.equal(ours, theirs)
