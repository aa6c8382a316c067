"""LoRA over frozen units on 4 ranks (2 nodes): the losses are the unsharded model's, and the base never crosses nodes."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from frozen_runs import (
    UNQUANTIZED,
    packed_copy,
    prepare,
    reset_accelerate,
    tiny_llama,
    tokens,
    trainable,
    with_adapter,
)
from harness import run_ranks, selected
from torch.distributed.checkpoint import FileSystemReader

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.frozen.modules import dense_numel
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


CASES = (
    Case(None),
    Case(4),
    Case(8, checkpointing=True, tied=True, dora=True),
    Case(4, tied=True, mixed_precision="bf16", ram_efficient=True),
    Case(None, tied=True, mixed_precision="bf16", checkpointing=True),
    Case(4, ranks_per_node=1, dora=True),
    Case(8, ranks_per_node=4),
)


@dataclasses.dataclass
class Outcome:
    """One rank's results of one case."""

    losses: list[tuple[float, float]]  # sharded, unsharded
    counts: dict[str, tuple[float, float]]  # per step and collective: bytes within the node, across nodes
    predicted: dict[str, tuple[float, float]]
    trainable_numel: int


def run_cases(rank: int, cases: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        outcomes.append(run_case(rank, case))
        reset_accelerate()
    return outcomes


def run_case(rank: int, case: Case) -> Outcome:
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
    batch, losses = tokens(), []
    own = batch[rank : rank + 1]
    for step in range(STEPS):
        if step == 1:  # the first step also sends weights for the first time
            plugin.handle_of(model).traffic.reset()
        loss = train_step(model, optimizer, own, accelerator.backward)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.mixed_precision == "bf16")
        expected = train_step(reference, reference_optimizer, batch, torch.Tensor.backward, autocast)
        losses.append((accelerator.reduce(loss.float(), "mean").item(), expected.item()))
    handle = plugin.handle_of(model)
    return Outcome(
        losses=losses,
        counts=per_step(handle.traffic.counts, STEPS - 1),
        predicted=per_step(handle.predict(micro_steps=1), 1),
        trainable_numel=sum(param.numel() for param in trainable(model)),
    )


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


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[Case, list[Outcome]]:
    """The outcomes of all ranks, by case, for the cases that this run of pytest has selected."""
    cases = selected(request, "case")
    by_rank = run_ranks(run_cases, 4, cases)
    return {case: [ranks[i] for ranks in by_rank] for i, case in enumerate(cases)}


@pytest.mark.thorough(
    "*ranks_per_node=4*", "*ranks_per_node=1*", "*bits=8*ranks_per_node=2*", "*bits=None*ranks_per_node=2*"
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_those_of_the_unsharded_model(outcomes, case):
    tolerance = 3e-5 if case.mixed_precision == "no" else 0.02
    for outcome in outcomes[case]:
        for ours, theirs in outcome.losses:
            assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.thorough(
    "*ranks_per_node=4*", "*ranks_per_node=1*", "*bits=8*ranks_per_node=2*", "*bits=None*ranks_per_node=2*"
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_the_predicted_ones_and_the_base_stays_in_its_node(outcomes, case):
    for outcome in outcomes[case]:
        assert outcome.counts == outcome.predicted
        assert (GATHER_FROZEN in outcome.counts) == (1 < case.ranks_per_node < 4)  # one node has nothing to save
        assert outcome.counts.get(GATHER_FROZEN, (0, 0))[1] == 0
        across = sum(cross for _, cross in outcome.counts.values())
        if case.ranks_per_node == 4:
            assert across == 0
            continue
        # Adapters are gathered once and reduced once: twice this rank's share arrives from each other node. The rest is padding.
        width = 4 if case.mixed_precision == "no" else 2
        num_nodes = 4 // case.ranks_per_node
        adapters = 2 * width * outcome.trainable_numel * (num_nodes - 1) / 4
        assert adapters * 0.99 <= across <= adapters * 1.4


def run_wide(rank: int, bits: int) -> tuple[int, int]:
    """Bytes of the frozen weights that this rank holds, and their number, for a model whose norms are negligible."""
    model = with_adapter(tiny_llama(hidden_size=256, intermediate_size=512, vocab_size=512))
    _, plugin, model, _ = prepare(model, frozen_bits=bits, pack_embeddings=True, **UNQUANTIZED)
    params = [param for unit in plugin.handle_of(model).frozen_units for param in unit.params]
    storages = [param.to_local().untyped_storage() for param in params]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values()), dense_numel(model, params)


@pytest.mark.thorough("8-*")
@pytest.mark.parametrize(("bits", "limit"), [(4, 0.54), (8, 1.02)])
def test_resident_bytes_of_the_base(bits, limit):
    for nbytes, numel in run_ranks(run_wide, 4, bits):
        assert nbytes <= limit / 2 * numel


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
