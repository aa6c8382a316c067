"""``apply_zeropp``: installs once, refuses what cannot work, and then on every rank, saying what to do instead."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Scenarios, expect_errors, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import EXACT, POLICIES, Block, backward, full_gradients, make_lm, shard, tokens_of

from hf_zeropp import ZeroPPConfig, apply_zeropp, get_handle
from hf_zeropp.compat import MovedNameError
from hf_zeropp.config import BITS_OF_MODE
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.micro_steps import STEPS_UNTIL_REMINDER
from hf_zeropp.fsdp.units import find_units
from hf_zeropp.fsdp.weights.gather import CountedWeightGather
from hf_zeropp.handle import ZeroPPHandle

NODES = {"ranks_per_node": 2}
LIMIT_S = 60.0  # a hang would take gloo's timeout of 60 s: errors must come well before it


def errors_of(function, *args, world_size: int = 4, env=None) -> list[str]:
    return expect_errors(function, world_size, *args, env=env, limit_s=LIMIT_S)


def assert_all_say(messages: list[str], *words: str) -> None:
    for message in messages:
        for word in words:
            assert word in message, f"{word!r} is not in: {message}"


def applied_twice(rank: int) -> None:
    """The same model and settings give the same handle, installed once."""
    model = shard(make_lm())
    handle = apply_zeropp(model, NODES)
    comms = [unit.all_gather for unit in handle.units]
    assert apply_zeropp(model, NODES) is handle is get_handle(model)
    assert apply_zeropp(model, ZeroPPConfig(**NODES)) is handle
    # "auto" was resolved once, for this device, and stands for itself no more.
    assert (handle.config.qwz_intra_bits, handle.config.qgz_intra_bits) == (8, 8)
    assert apply_zeropp(model, NODES | {"qwz_intra_bits": 8, "qgz_intra_bits": "auto"}) is handle
    assert [unit.all_gather for unit in find_units(model)] == comms
    with pytest.raises(ValueError, match="already runs ZeRO\\+\\+ with .*qwz_bits=8.*cannot change to .*qwz_bits=4"):
        apply_zeropp(model, NODES | {"qwz_bits": 4})


def applied_below_or_above(rank: int) -> None:
    """A block is refused if the model has ZeRO++, and the model if a block has."""
    model = shard(make_lm())
    apply_zeropp(model, NODES)
    with pytest.raises(ValueError, match="already runs ZeRO\\+\\+ through another apply_zeropp call"):
        apply_zeropp(model.blocks[0], NODES)


def applied_again_with_a_block_more(rank: int) -> None:
    """A block that was sharded after the first call is named; FSDP2's gather would serve it without a word otherwise."""
    model = make_lm()
    shard(model)
    apply_zeropp(model, NODES)
    model.blocks.append(fully_shard(Block()))
    with pytest.raises(ValueError, match="Units blocks.2 were sharded after apply_zeropp"):
        apply_zeropp(model, NODES)


def applied_after_training_began(rank: int) -> None:
    """With the root unsharded and gradients there: the next step is right."""
    model, stock = shard(make_lm()), shard(make_lm())
    for one in (model, stock):
        backward(one, rank)
        with torch.no_grad():
            one(tokens_of(rank))
    apply_zeropp(model, NODES | EXACT | {"hpz_size": "node"})
    for one in (model, stock):
        backward(one, rank, 1)
    ours, theirs = full_gradients(model), full_gradients(stock)
    for name, gradient in ours.items():  # two sums of four terms, in another order
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)


def two_models(rank: int) -> None:
    """Each has its own books; a step of one leaves the other's copies alone or refills them, never stale."""
    models = [shard(make_lm(seed)) for seed in range(2)]
    handles = [apply_zeropp(model, NODES) for model in models]
    assert handles[0] is not handles[1]
    assert handles[0].topology is handles[1].topology
    backward(models[0], rank)
    assert handles[0].traffic.cross_node_bytes > 0 and handles[1].traffic.cross_node_bytes == 0
    backward(models[1], rank)
    torch.optim.SGD(models[0].parameters(), lr=0.1).step()
    assert (handles[0].traffic.steps, handles[1].traffic.steps) == (1, 0)


def models_are_freed(rank: int) -> None:
    """A handle dies with its model; the hooks of optimizers are the process's, and no more with more models."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    apply_zeropp(shard(make_lm()), NODES)
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    model = shard(make_lm())
    handle = apply_zeropp(model, NODES)
    backward(model, rank)
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks
    died = weakref.ref(model), weakref.ref(handle)
    del model, handle
    gc.collect()
    assert [ref() for ref in died] == [None, None]


def a_handle_may_die_while_optimizers_step(rank: int) -> None:
    """Collected in the middle of a hook: the step of another model goes on."""
    models = [shard(make_lm()) for _ in range(2)]
    handles = [apply_zeropp(model, NODES) for model in models]
    for model in models:
        backward(model, rank)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    survivor = handles[0]
    after_step = Decisions.after_optimizer_step

    def collect(decisions, optimizer) -> None:
        models[1:] = handles[1:] = []
        gc.collect()
        after_step(decisions, optimizer)

    with mock.patch.object(Decisions, "after_optimizer_step", collect):
        optimizer.step()
    assert survivor.traffic.steps == 1


def nothing_to_quantize_nothing_to_keep(rank: int) -> None:
    """qgZ alone leaves the gathers to FSDP2, and counts their bytes."""
    handle = apply_zeropp(shard(make_lm()), NODES | EXACT | {"qgz_bits": 4})
    assert handle.gathers == []
    assert all(type(unit.all_gather) is CountedWeightGather for unit in handle.units)


def torch_compiled_or_not(rank: int) -> None:
    model = shard(make_lm())
    handle = apply_zeropp(torch.compile(model, backend="eager"), NODES)
    assert get_handle(model) is handle is apply_zeropp(model, NODES)


def settings_from_the_environment(rank: int) -> None:
    """None means the environment; each rank reads its own."""
    handle = apply_zeropp(shard(make_lm()))
    assert (handle.config.qwz_bits, handle.topology.ranks_per_node) == (4, 2)


def logged_by(action: Callable[[], object]) -> str:
    """Return what ``action`` prints to the user of a script that configures no logging."""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        action()
    return shown.getvalue()


def says_that_it_is_on(rank: int) -> None:
    """Rank 0 says so in one line, with the bytes that a step then takes."""
    kinds = {"preset 'balanced'": {}, "preset 'half_model'": {"preset": "half_model"}, "no preset": {"qgz_bits": 8}}
    for words, settings in kinds.items():
        model = shard(make_lm())
        line = logged_by(lambda model=model, settings=settings: apply_zeropp(model, NODES | settings))
        if rank:
            assert line == ""
            continue
        assert (
            line.startswith("ZeRO++ is on: 2 nodes x 2 ranks, ")
            and f"{words}, 3 units" in line
            and line.count("\n") == 1
        )
        zero3 = get_handle(model).traffic.zero3_bytes(1)
        assert f"take {zero3 / 1e6:.3g} MB or more" in line
    assert logged_by(lambda: apply_zeropp(shard(make_lm()), NODES | {"preset": "exact"})).count("at most") == (
        rank == 0
    )


def the_bytes_that_it_says_are_counted(rank: int) -> None:
    for settings in ({}, {"hpz_size": None}, {"qgz_bits": 8}):
        model = shard(make_lm())
        line = logged_by(lambda model=model, settings=settings: apply_zeropp(model, NODES | settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, rank)
        optimizer.step()
        expected = f"expected to receive {get_handle(model).traffic.cross_node_bytes / 1e6:.3g} MB from other nodes"
        assert rank or expected in line, (expected, line)


def a_loop_without_progress_is_reminded(rank: int) -> None:
    for tells_progress in (False, True):
        model = shard(make_lm())
        handle = apply_zeropp(model, NODES | {"qgz_until": 0.5})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if tells_progress:
            handle.set_progress(0.0)
        backward(model, rank)

        def train(optimizer=optimizer) -> None:
            for _ in range(STEPS_UNTIL_REMINDER + 1):
                optimizer.step()

        assert logged_by(train).count("Call handle.set_progress") == (rank == 0 and not tells_progress)


WORKS = Scenarios(
    4,
    [
        applied_twice,
        says_that_it_is_on,
        the_bytes_that_it_says_are_counted,
        a_loop_without_progress_is_reminded,
        applied_below_or_above,
        applied_again_with_a_block_more,
        applied_after_training_began,
        two_models,
        models_are_freed,
        a_handle_may_die_while_optimizers_step,
        nothing_to_quantize_nothing_to_keep,
        torch_compiled_or_not,
        settings_from_the_environment,
    ],
    env={"ZEROPP_QWZ_BITS": "4", "ZEROPP_RANKS_PER_NODE": "2"},
)


@WORKS.parametrize
def test_apply(scenario):
    WORKS.check(scenario)


# Mistakes. In one start of the ranks, one after the other: each must raise on every rank, and leave the next possible.


def attempt(model, config=None, mesh=None) -> str:
    """The error's text, or what handle there is instead."""
    try:
        handle: ZeroPPHandle = apply_zeropp(model, config, mesh=mesh)
    except Exception as error:  # noqa: BLE001 - what it is is the test
        return f"{type(error).__name__}: {error}"
    return f"no error: {handle.config}"


def model_on_part_of_the_world():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("part", "shard"))
    return shard(make_lm(), mesh=mesh["shard"])


def model_on_part_of_the_world_across_nodes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "part"))
    return shard(make_lm(), mesh=mesh["shard"])


def model_with_replicas_within_nodes():
    return shard(make_lm(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def model_with_replicas_of_some_units():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_lm()
    fully_shard(model.blocks[0], mesh=mesh)
    return fully_shard(model, mesh=mesh["shard"])


def attempt_with_replicas() -> str:
    """Two nodes shard the model across them twice: ranks 0 and 2, and ranks 1 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))["shard"]
    return attempt(shard(make_lm(), mesh=mesh), NODES, mesh)


def model_with_one_unit_resharded_to_a_part():
    model = make_lm()
    fully_shard(model.blocks[1], reshard_after_forward=2)
    return shard_rest(model)


def shard_rest(model):
    fully_shard(model.blocks[0])
    return fully_shard(model)


def changed(how) -> torch.nn.Module:
    model = make_lm()
    how(model)
    return shard(model)


def transpose(model: torch.nn.Module) -> None:
    model.blocks[1].up.weight = torch.nn.Parameter(model.blocks[1].up.weight.detach().T.contiguous())


def attempt_with_a_moved_name(model: torch.nn.Module, is_moved: bool) -> str:
    """Apply where the installed libraries are not those of the other ranks."""
    error = MovedNameError("somelib 3.0 has no `gone`") if is_moved else None
    with mock.patch("hf_zeropp.plan.check_seams", side_effect=error):
        return attempt(model, NODES)


def run_mistakes(rank: int, file: str) -> dict[str, str]:
    plain = shard(make_lm())
    odd = {"qwz_bits": 8 if rank != 2 else 4} | NODES
    other_model = shard(make_lm(depth=3 if rank == 3 else 2))
    return {
        "not sharded": attempt(make_lm(), NODES),
        "part of the world": attempt(model_on_part_of_the_world(), NODES),
        "part across nodes": attempt(model_on_part_of_the_world_across_nodes(), NODES),
        "replicas within nodes": attempt(model_with_replicas_within_nodes(), NODES),
        "replicas of some units": attempt(model_with_replicas_of_some_units(), NODES | {"ranks_per_node": 1}),
        "replicas": attempt_with_replicas(),
        "resharded to a part": attempt(model_with_one_unit_resharded_to_a_part(), NODES),
        "unknown setting": attempt(plain, {"qwz_bit": 8}),
        "bad value": attempt(plain, {"qwz_bits": 3}),
        "contradiction": attempt(plain, {"qgz_until": 0.5, "qgz_bits": None, "qgz_intra_bits": None}),
        "nodes do not divide": attempt(plain, {"ranks_per_node": 3}),
        "nodes too large": attempt(plain, {"ranks_per_node": 8}),
        "hpz does not divide": attempt(plain, NODES | {"hpz_size": 3}),
        "other settings on one rank": attempt(plain, odd),
        "other node size on one rank": attempt(plain, {"ranks_per_node": 2 if rank else 4}),
        "other model on one rank": attempt(other_model, NODES),
        "frozen on one rank": attempt(changed(lambda model: model.head.requires_grad_(rank != 1)), NODES),
        "bf16 on one rank": attempt(shard(make_lm().to(torch.bfloat16 if rank == 2 else torch.float32)), NODES),
        "another policy on one rank": attempt(shard(make_lm(), POLICIES["bf16" if rank == 1 else "fp32"]), NODES),
        "transposed on one rank": attempt(changed(transpose if rank == 3 else lambda model: None), NODES),
        "another library on one rank": attempt_with_a_moved_name(plain, rank == 1),
        "mistake on one rank": attempt(plain, NODES if rank != 1 else {"qgz_bits": 5}),
        "file on one rank": attempt(plain, NODES if rank != 3 else file),
        "wrong type on one rank": attempt(plain, NODES if rank != 0 else 7),
        "good in the end": attempt(plain, NODES),
    }


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> list[dict[str, str]]:
    missing = str(tmp_path_factory.mktemp("settings") / "missing.yaml")
    return run_ranks(run_mistakes, 4, missing, limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("not sharded", ["not sharded", "fully_shard", "found none"]),
        ("part of the world", ["sharded over ranks", "expected all 4 ranks", "1-D mesh"]),
        ("part across nodes", ["sharded over ranks", "expected all 4 ranks", "1-D mesh"]),
        (
            "replicas of some units",
            ["unit (root) is replicated over ranks", "and other units over", "same mesh for all units"],
        ),
        (
            "replicas",
            [
                "over ranks [0, 2]",
                "once more over ranks [1, 3]",
                "replicas whose gradients are not averaged",
                "1-D mesh over all ranks",
            ],
        ),
        ("resharded to a part", ["unit blocks.1", "reshard_after_forward=<int>", "hpz_size"]),
        ("unknown setting", ["Unknown", "qwz_bit'", "Did you mean 'qwz_bits'"]),
        ("bad value", [f"qwz_bits (with qwz_mode 'values') must be one of {BITS_OF_MODE['values']}, got 3"]),
        ("contradiction", ["qgz_until=0.5", "both None", "leave qgz_until at 1.0"]),
        ("nodes do not divide", ["ranks_per_node=3 must divide the world of 4", "[1, 2, 4]"]),
        ("nodes too large", ["ranks_per_node=8 must divide the world of 4", "[1, 2, 4]"]),
        ("hpz does not divide", ["hpz_size=3 must divide the world of 4"]),
        ("other settings on one rank", ["rank 0 has ('qwz_bits', 8)", "rank 2 has ('qwz_bits', 4)", "same settings"]),
        ("other node size on one rank", ["rank 0 has ('ranks_per_node', 4)", "rank 1 has ('ranks_per_node', 2)"]),
        ("other model on one rank", ["units", "rank 3", "model"]),
        ("frozen on one rank", ["unit (root) with weight (29, 12) in torch.float32, rank 1", "torch.float32, frozen"]),
        ("bf16 on one rank", ["unit (root)", "torch.float32", "rank 2 has", "torch.bfloat16"]),
        ("another policy on one rank", ["param_dtype None", "rank 1 has", "param_dtype torch.bfloat16"]),
        (
            "transposed on one rank",
            ["unit blocks.1 with weight (27, 12)", "rank 3 has unit blocks.1 with weight (12, 27)"],
        ),
        ("another library on one rank", ["rank 1 says: MovedNameError: somelib 3.0 has no `gone`"]),
        ("mistake on one rank", ["rank 1", "qgz_bits must be one of (4, 8, 3, None), got 5"]),
        ("file on one rank", ["rank 3", "Cannot read the ZeRO++ config file", "missing.yaml", "Check the path"]),
        ("wrong type on one rank", ["rank 0", "mapping", "int"]),
    ],
)
def test_mistakes_raise_on_every_rank(mistakes, mistake, words):
    assert_all_say([told[mistake] for told in mistakes], "Error", *words)


def test_a_mistake_leaves_the_model_as_it_was(mistakes):
    for name in ("good in the end", "replicas within nodes"):
        assert_all_say([told[name] for told in mistakes], "no error", "qwz_bits=8")


def apply_with_env(rank: int, name: str | None, value: str) -> None:
    if name is not None:
        os.environ[name] = value
    else:
        del os.environ["LOCAL_WORLD_SIZE"]
    apply_zeropp(shard(make_lm()))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ZEROPP_QWZ_BIT", "8", ["Unknown environment variable ZEROPP_QWZ_BIT", "Did you mean 'ZEROPP_QWZ_BITS'"]),
        ("LOCAL_WORLD_SIZE", "3", ["LOCAL_WORLD_SIZE=3 must divide the world of 4"]),
        ("LOCAL_WORLD_SIZE", "0", ["LOCAL_WORLD_SIZE"]),
        ("LOCAL_WORLD_SIZE", "two", ["LOCAL_WORLD_SIZE"]),
        (None, "", ["LOCAL_WORLD_SIZE, which is not set", "accelerate launch", "torchrun"]),
    ],
)
def test_bad_environments_raise_on_every_rank(name, value, words):
    assert_all_say(errors_of(apply_with_env, name, value), *words)


def apply_with_nodes_of_different_sizes(rank: int) -> None:
    """As on a cluster of one node with two ranks and two with one: each rank sees its own launcher's number."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank < 2 else "1"
    apply_zeropp(shard(make_lm()))


def test_nodes_of_different_sizes_are_named():
    messages = errors_of(apply_with_nodes_of_different_sizes)
    assert_all_say(messages, "ranks_per_node", "rank 0 has 2", "rank 2 has 1")


def run_alone(rank: int) -> None:
    model = shard(make_lm())
    handle = apply_zeropp(model)
    backward(model, rank)
    assert not handle.is_active and handle.topology.num_nodes == 1
    assert handle.traffic.counts == handle.predict() == {}
    handle.traffic.print(handle.predict())


def test_one_process_has_nothing_to_send():
    run_ranks(run_alone, 1)


def apply_without_group(rank: int) -> None:
    apply_zeropp(make_lm(), NODES)


def test_a_process_group_is_needed_first():
    messages = expect_errors(apply_without_group, 2, init=False, limit_s=LIMIT_S)
    assert_all_say(messages, "RuntimeError", "needs a process group", "torchrun")


def run_other_gloo_world(rank: int) -> tuple[int, int]:
    """The process group is made anew in the same process: the topology of the old one must not be used."""
    backward_once(rank)
    first = id(dist.group.WORLD)
    dist.destroy_process_group()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 4, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    backward_once(rank)
    return first, id(dist.group.WORLD)


def backward_once(rank: int) -> None:
    model = shard(make_lm())
    apply_zeropp(model, NODES)
    backward(model, rank)
    del model
    gc.collect()


def test_a_new_process_group_gets_new_groups():
    for old, new in run_ranks(run_other_gloo_world, 4):
        assert old != new


def many_models(rank: int) -> list[int]:
    """Train ten models, one after the other. Return the number of threads after each."""
    counts = []
    for seed in range(10):
        model = shard(make_lm(seed))
        apply_zeropp(model, NODES)
        backward(model, rank)
        del model
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_threads_go_with_their_model():
    for counts in run_ranks(many_models, 4):
        assert len(set(counts[2:])) == 1, counts
