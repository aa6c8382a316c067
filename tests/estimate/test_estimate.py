"""Compare ``hf-zeropp estimate`` with the papers' tables to their last digit, and with what a run holds and sends."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from harness import run_ranks
from torch.distributed.tensor import DTensor

from hf_zeropp import ZeroPPConfig, cli
from hf_zeropp.estimate.memory_and_bytes import estimate, ours
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.integrations.pretrained_shape import units_of
from hf_zeropp.sizes import PREFIXES, parse_count, shorten

# arXiv 1910.02054, some cells of table 1: GB per rank for P_os, P_os+g, P_os+g+p, by model and ranks. It cuts or rounds digits.
ZERO_TABLE_1 = {
    ("7.5B", 1): (120, 120, 120),
    ("7.5B", 64): (31.4, 16.6, 1.88),
    ("7.5B", 1024): (30.1, 15.1, 0.12),
    ("128B", 4): (896, 704, 512),
    ("128B", 256): (518, 263, 8),
    ("1T", 16): (4750, 2875, 1000),
    ("1T", 1024): (4011, 2013, 15.6),
}
SETTINGS = {
    "default": {},
    "int4 weights": {"qwz_bits": 4},
    "no secondary": {"hpz_size": None},
    "secondary of one rank": {"hpz_size": 1},
    "secondary of the world": {"hpz_size": 4},
    "unquantized": {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None},
    "half a model": {"qwz_mode": "delta", "qwz_bits": 4},
    "sums in bf16": {"qgz_accumulator": "bfloat16"},
    "weights and gradients on the rank": {"qgz_accumulate": "whole"},
    "deltas of a copy in int8": {"qwz_mode": "delta", "qwz_bits": 2, "hpz_bits": 8},
}


def by_method(model: ModelShape, setup: Setup) -> dict:
    return {one.method: one for one in estimate(model, setup)}


@pytest.mark.parametrize("cell", ZERO_TABLE_1, ids=lambda cell: f"{cell[0]}-{cell[1]}")
def test_zero_paper_table_1(cell: tuple[str, int]) -> None:
    count, world_size = cell
    lines = by_method(ModelShape.of_count(count), Setup(world_size, ranks_per_node=1))
    for method, printed in zip(("ZeRO-1", "ZeRO-2", "ZeRO-3"), ZERO_TABLE_1[cell], strict=True):
        last_digit = 10.0 ** -len(f"{printed}".partition(".")[2])
        assert lines[method].total / 1e9 == pytest.approx(printed, abs=last_digit), method


def test_zero_plus_plus_paper_figure_4() -> None:
    """With 100 B parameters on 1024 GPUs, 16 per node, a rank holds 1/1024 of 16 bytes each, and hpZ adds 1/16 of 2."""
    lines = by_method(ModelShape.of_count("100B"), Setup(world_size=1024, ranks_per_node=16))
    assert lines["hpZ"].total / lines["ZeRO-3"].total == pytest.approx(8.9, rel=0.02)
    assert lines["DDP"].total / lines["hpZ"].total == pytest.approx(114, rel=0.02)


@pytest.mark.parametrize(
    ("method", "micro_steps", "volume"),
    [
        ("DDP", 8, 2), ("ZeRO-1", 8, 2), ("ZeRO-2", 1, 2), ("ZeRO-2", 8, 9), ("ZeRO-3", 1, 3), ("ZeRO-3", 8, 24),
        ("FSDP2 kept", 1, 2), ("FSDP2 kept", 8, 2), ("FSDP2 node", 1, 2), ("FSDP2 node", 8, 9),
        ("HSDP", 8, 2), ("FSDP2 synced", 8, 24), ("hpZ", 1, 2), ("hpZ", 8, 9), ("FSDP2", 1, 3), ("FSDP2", 8, 17),
    ],
)  # fmt: skip
def test_cross_node_volume_in_multiples_of_m(method: str, micro_steps: int, volume: int) -> None:
    model = ModelShape.of_count("7B")
    line = by_method(model, Setup(world_size=32, ranks_per_node=8, micro_steps=micro_steps))[method]
    assert line.cross_node == pytest.approx(volume * 2 * model.num_params * 3 / 4)
    # Collectives over the world run in rings, and those of HSDP between nodes over one rank of each.
    assert line.in_rings == pytest.approx(line.cross_node * (1 if method == "HSDP" else (31 / 32) / (3 / 4)))


def test_fsdp2_keeps_gradients_of_full_size_unless_it_is_synced() -> None:
    model = ModelShape.of_count("7B")
    lines = by_method(model, Setup(world_size=32, ranks_per_node=8, micro_steps=8))
    full = 2 * model.num_params
    assert [lines[name].memory["accumulator"] for name in ("FSDP2", "HSDP", "FSDP2 synced")] == [full, full, 0]
    assert lines["HSDP"].total == pytest.approx(16 * model.num_params / 8 + full, rel=1e-3)
    assert "FSDP2 synced" not in by_method(model, Setup(world_size=32, ranks_per_node=8))  # nothing to synchronize


def lines_of_70b(**settings) -> tuple[dict[str, float], float]:
    """Memory per rank in GB, by kind, and in total: 8 nodes of 8 ranks, 4 micro-steps."""
    setup = Setup(world_size=64, ranks_per_node=8, micro_steps=4, config=ZeroPPConfig(**settings))
    line = ours(ModelShape.of_count("70B"), setup)
    return {kind: round(num_bytes / 1e9, 1) for kind, num_bytes in line.memory.items()}, line.total / 1e9


def test_memory_of_70b_on_8_nodes_of_8_gpus() -> None:
    """The aim is 45 GB before activations."""
    memory, total = lines_of_70b()
    assert memory["accumulator"] == 35.0 and total == pytest.approx(57.7, abs=0.1)
    memory, total = lines_of_70b(qgz_accumulator="bfloat16")
    assert memory["accumulator"] == 17.5 and total == pytest.approx(40.3, abs=0.1)
    assert (memory["secondary"], memory["optimizer"]) == (8.8, 8.8)
    assert (memory["parameters"], memory["gradients"], memory["wire buffers"]) == (4.4, 0.1, 0.7)


def test_the_accumulator_needs_micro_steps_and_nodes() -> None:
    model, config = ModelShape.of_count("1B"), ZeroPPConfig(qgz_accumulator="bfloat16")
    for world_size, micro_steps in ((16, 1), (8, 4)):  # one micro-step; one node, where FSDP2 keeps full gradients
        setup = Setup(world_size, ranks_per_node=8, micro_steps=micro_steps)
        assert ours(model, dataclasses.replace(setup, config=config)) == ours(model, setup)


def test_wire_buffers_are_one_unit_and_the_deltas_of_all() -> None:
    """A delta in 4 bits arrives from each of the 2 nodes, for all units at once where hops overlap."""
    model, setup = ModelShape.of_count("1B"), Setup(world_size=16, ranks_per_node=8)
    largest = 2 * max(unit.numel for unit in model.units)  # bytes of bf16
    assert ours(model, setup).memory["wire buffers"] == pytest.approx(3 / 8 * largest)
    codes = ZeroPPConfig(qwz_intra_bits=8, qgz_intra_bits=8)
    assert ours(model, dataclasses.replace(setup, config=codes)).memory["wire buffers"] == largest
    with_deltas = ours(model, dataclasses.replace(setup, config=ZeroPPConfig(qwz_mode="delta", qwz_bits=4)))
    deltas = 2 * model.num_params / 16 * (0.5 + 2 / 128)
    assert with_deltas.memory["wire buffers"] == pytest.approx(3 / 8 * largest + deltas, rel=0.01)


def test_what_is_switched_off_costs_what_fsdp2_costs() -> None:
    model = ModelShape.of_count("1B")
    off = ZeroPPConfig(qwz_bits=None, hpz_size=None, qgz_bits=None, qgz_intra_bits=None)
    lines = by_method(model, Setup(world_size=16, ranks_per_node=4, config=off))
    # Wires carry the padding of shards, which the lower bound for FSDP2 leaves out.
    assert lines["this package"].cross_node == pytest.approx(lines["FSDP2"].cross_node, rel=1e-3)
    assert lines["this package"].intra_node == pytest.approx(lines["FSDP2"].intra_node, rel=1e-3)
    assert lines["this package"].memory["secondary"] == 0


def test_one_node_is_stock_fsdp2() -> None:
    lines = by_method(ModelShape.of_count("1B"), Setup(world_size=8, ranks_per_node=8))
    assert dataclasses.replace(lines["this package"], method="FSDP2") == lines["FSDP2"]
    assert all(line.cross_node == 0 for line in lines.values())


# ----------------------------------------------------------------------------------- our line against a run's own books


def llama(tied: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 40, "intermediate_size": 54, "num_attention_heads": 4, "vocab_size": 101}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=tied, **sizes))


def hold_and_send(rank: int, settings: dict, tied: bool, micro_steps: int) -> dict[str, float]:
    """Return the bytes a rank holds in a step of Accelerate's FSDP2 with this package, and the bytes per node and step."""
    from accelerate import Accelerator

    from hf_zeropp import ZeroPPPlugin

    settings = {"ranks_per_node": 2, **settings}
    plugin = ZeroPPPlugin(zeropp=settings, transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, gradient_accumulation_steps=micro_steps)
    model = llama(tied)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    handle = plugin.handle_of(model)
    held = {"accumulator": 0, "between": 0}
    for _ in range(2):  # in the second the optimizer has its states
        handle.traffic.reset()
        for _ in range(micro_steps):
            with accelerator.accumulate(model):
                tokens = torch.zeros(1, 5, dtype=torch.long)
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                held["accumulator"] = max(held["accumulator"], handle.partial_bytes())
                if accelerator.sync_gradients:  # before the last micro-step, reading a gradient would complete it
                    held["gradients"] = sum(local(param.grad) for param in model.parameters())
                else:
                    held["between"] = max(held["between"], sum(memory_of(param.grad) for param in model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return held | {
        "parameters": sum(map(local, model.parameters())),
        "optimizer": sum(map(local, states)),
        "secondary": handle.secondary_bytes(),
        "cross_node": handle.traffic.cross_node_bytes_per_step,
        "intra_node": handle.traffic.intra_node_bytes_per_step,
    }


def local(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes


def memory_of(grad: torch.Tensor | None) -> int:
    if not isinstance(grad, DTensor):  # of a weight that stays whole; ``partial_bytes`` counts it
        return 0
    pending = grad._local_tensor  # a look at the gradient would raise
    return 0 if pending.plain is None else pending.plain.nbytes


@pytest.mark.thorough("3-tied", "1*")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_ours_is_what_a_run_holds_and_sends(tied: bool, micro_steps: int) -> None:
    check_against_run(SETTINGS["default"], tied, micro_steps)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "default"])
def test_ours_under_other_settings(settings: str) -> None:
    check_against_run(SETTINGS[settings], tied=False, micro_steps=2)


def check_against_run(settings: dict, tied: bool, micro_steps: int) -> None:
    ranks = run_ranks(hold_and_send, 4, settings, tied, micro_steps, init=False)
    setup = Setup(4, 2, micro_steps, config=ZeroPPConfig(**settings), on_cpu=True)
    line = ours(ModelShape("llama", units_of(llama(tied))), setup)
    for kind in ("secondary", "accumulator"):  # padded alike on all ranks
        assert {rank[kind] for rank in ranks} == {line.memory[kind]}, kind
    for kind in ("parameters", "optimizer"):  # rank 0 holds no padding of its own
        assert ranks[0][kind] == pytest.approx(line.memory[kind], rel=0.001), kind
    # In a step of several micro-steps most is held when the last one begins to reduce: partial sums, and one unit's gradient.
    if micro_steps == 1:
        assert ranks[0]["gradients"] == pytest.approx(line.memory["gradients"], rel=0.001)
    else:
        assert ranks[0]["between"] == 0
        assert ranks[0]["gradients"] <= line.memory["gradients"] + line.memory["accumulator"]
    assert ranks[0]["cross_node"] == pytest.approx(line.cross_node)
    assert ranks[0]["intra_node"] == pytest.approx(line.intra_node)


def models_of_other_shapes() -> list[torch.nn.Module]:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        MBartConfig,
        MBartForConditionalGeneration,
        Wav2Vec2Config,
        Wav2Vec2Model,
    )

    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40}
    layers = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return [
        MBartForConditionalGeneration(MBartConfig(**sizes, **layers)),  # blocks within blocks
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40)),  # a final norm of another name
        Wav2Vec2Model(Wav2Vec2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)),  # no embedding
    ]


def sharded_units(rank: int) -> list[list[tuple[int, bool]]]:
    from accelerate import Accelerator

    from hf_zeropp import ZeroPPPlugin
    from hf_zeropp.fsdp.sharded_models import find_units

    accelerator = Accelerator(fsdp_plugin=ZeroPPPlugin())
    found = []
    for model in models_of_other_shapes():
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        units = find_units(prepared)
        found.append(
            sorted((sum(param.numel() for param in unit.params), unit.reshards_after_forward) for unit in units)
        )
    return found


def test_units_are_those_of_a_run() -> None:
    expected = run_ranks(sharded_units, 2, init=False)[0]
    for model, units in zip(models_of_other_shapes(), expected, strict=True):
        assert sorted((unit.numel, unit.reshards) for unit in units_of(model)) == units, type(model).__name__


# ------------------------------------------------------------------------------------------------- the command itself


@pytest.mark.parametrize(
    ("job", "kinds"),
    [
        (["7B", "--world", "64", "--accumulation", "8"], ["parameters"]),
        # A rank holds a millionth of it.
        (["350M", "--world", "1024", "--lora", "4"], ["adapters", "frozen base"]),
        # The largest world, and numbers of three digits, a point and a unit: as wide as they become.
        (["1.23T", "--world", "16384", "--lora", "64"], ["adapters", "frozen base"]),
        (["405B", "--world", "1024", "--lora", "16", "--frozen-bits", "4"], ["adapters", "frozen base"]),
    ],
    ids=["7B", "small", "wide", "LoRA"],
)
def test_command_prints_every_method_in_80_columns(
    job: list[str], kinds: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut, and no row is broken: a kind of memory and its numbers stand on one line, one for each method."""
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["estimate", *job])
    shown = capsys.readouterr().out
    for word in ("DDP", "ZeRO-3", "HSDP", "hpZ", "FSDP2", "kept", "node", "this", "package"):
        assert word in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown and max(map(len, shown.splitlines())) <= 80
    rows = [line.split() for line in shown.splitlines()]
    num_methods = 9 if "--accumulation" in job else 8
    traffic = ("across nodes", "in rings", "within node")
    for label in (*kinds, "gradients", "optimizer", "secondary", "total", "+ gathered", *traffic):
        words = label.split()
        assert [len(row) for row in rows if row[: len(words)] == words] == [len(words) + num_methods], label


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (999.4, "999"), (999.5, "1K"), (1_749_600_000, "1.75G"), (3.2e18, "3.2e+03P")]
)
def test_numbers_have_three_digits_and_a_unit(number: float, text: str) -> None:
    assert shorten(number, PREFIXES) == text


def test_command_reads_a_config_from_disk_and_gives_json(capsys: pytest.CaptureFixture, tmp_path) -> None:
    model = llama(tied=True)
    model.config.save_pretrained(tmp_path)
    cli.main(["estimate", str(tmp_path), "--world", "4", "--ranks-per-node", "2", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"]["parameters"] == model.num_parameters() and answer["setup"]["world_size"] == 4
    assert answer["estimates"][-1]["total"] == sum(answer["estimates"][-1]["memory"].values())


@pytest.mark.parametrize(
    ("model", "world", "said"),
    [
        ("no/such-model/anywhere", "8", "neither a parameter count"),
        ("0", "8", "positive parameter count"),
        ("7B", "10", "8 ranks per node must divide the world of 10"),
    ],
)
def test_command_says_what_is_wrong(model: str, world: str, said: str) -> None:
    with pytest.raises(SystemExit, match=f"hf-zeropp estimate: .*{said}"):
        cli.main(["estimate", model, "--world", world])


@pytest.mark.parametrize(("text", "count"), [("7.5B", 7_500_000_000), ("350m", 350_000_000), ("12", 12), ("7Q", None)])
def test_counts(text: str, count: int | None) -> None:
    assert parse_count(text) == count


def test_estimate_needs_no_process_group_and_no_transformers() -> None:
    script = (
        "import sys; from hf_zeropp.estimate.memory_and_bytes import *; import torch.distributed as dist;"
        "estimate(ModelShape.of_count('7B'), Setup(64, 8)); assert not dist.is_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
