"""``apply_zeropp``: installs once, goes with its model, and refuses on every rank what cannot work."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import weakref
from collections.abc import Callable, Iterator
from typing import cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import each_refusal, expect_errors, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from toy import EXACT, POLICIES, Block, backward, full_gradients, make_lm, shard, tokens_of
from two_nodes import on_four_ranks

from hf_zeropp import ZeroPPConfig, apply_zeropp, generation_mode, get_handle
from hf_zeropp import plan as plan_module
from hf_zeropp.compat import MovedNameError
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.micro_steps import STEPS_UNTIL_REMINDER
from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.fsdp.weights.gather import WeightGather

NODES = {"ranks_per_node": 2}
LIMIT_S = 60.0  # a hang would take gloo's timeout of 60 s: errors must come well before it


def scenario_applied_twice(rank: int) -> None:
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


def scenario_applied_again_with_a_block_more(rank: int) -> None:
    """A block that was sharded after the first call is named; FSDP2's gather would serve it without a word otherwise."""
    model = make_lm()
    shard(model)
    apply_zeropp(model, NODES)
    model.blocks.append(fully_shard(Block()))
    with pytest.raises(ValueError, match="Units blocks.2 were sharded after apply_zeropp"):
        apply_zeropp(model, NODES)


def scenario_applied_after_training_began(rank: int) -> None:
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


def scenario_models_are_freed(rank: int) -> None:
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


def scenario_two_models_of_which_one_dies_while_optimizers_step(rank: int) -> None:
    """Each has its own books. One is collected in the middle of a hook: the step of the other goes on."""
    models = [shard(make_lm(seed)) for seed in range(2)]
    handles = [apply_zeropp(model, NODES) for model in models]
    assert handles[0] is not handles[1]
    assert handles[0].topology is handles[1].topology
    traffic = [handle.traffic for handle in handles]
    backward(models[0], rank)
    assert traffic[0].cross_node_bytes > 0 and traffic[1].cross_node_bytes == 0
    backward(models[1], rank)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    after_step = Decisions.after_optimizer_step

    def collect(decisions, optimizer) -> None:
        models[1:] = handles[1:] = []
        gc.collect()
        after_step(decisions, optimizer)

    with mock.patch.object(Decisions, "after_optimizer_step", collect):
        optimizer.step()
    assert [one.steps for one in traffic] == [1, 0]


def scenario_nothing_to_quantize_nothing_to_keep(rank: int) -> None:
    """qgZ alone leaves the gathers to FSDP2, and counts their bytes."""
    handle = apply_zeropp(shard(make_lm()), NODES | EXACT | {"qgz_bits": 4})
    assert handle.gathers == []
    assert not any(cast(WeightGather, unit.all_gather).has_hops for unit in handle.units)


def scenario_a_refusal_leaves_the_model_as_it_was(rank: int) -> None:
    """The same model is tried again with settings that all ranks have."""
    model = shard(make_lm())
    for settings in ({"qwz_bit": 8}, {"ranks_per_node": 3}, NODES | {"qwz_bits": 8 if rank != 2 else 4}):
        with pytest.raises(ValueError):
            apply_zeropp(model, settings)
    assert apply_zeropp(model, NODES).config.qwz_bits == 8


def scenario_shardings_that_cannot_work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "place"))

    def replicas_of_one_block() -> nn.Module:
        model = make_lm()
        fully_shard(model.blocks[0], mesh=mesh)
        return fully_shard(model, mesh=mesh["place"])

    def one_block_resharded_to_a_part() -> nn.Module:
        model = make_lm()
        fully_shard(model.blocks[1], reshard_after_forward=2)
        return fully_shard(model)

    def within_another() -> nn.Module:
        model = shard(make_lm())
        apply_zeropp(model, NODES)
        return model.blocks[0]

    def apply(model: nn.Module, **settings: object) -> Callable[[], object]:
        return lambda: apply_zeropp(model, NODES | settings)

    across_nodes = mesh["node"]
    each_refusal(
        {
            "found none": apply(make_lm()),
            r"is sharded over ranks \[(0, 2|1, 3)\], expected all 4": apply(shard(make_lm(), mesh=across_nodes)),
            r"is sharded over ranks \[(0, 1|2, 3)\], expected all 4": apply(shard(make_lm(), mesh=mesh["place"])),
            "same mesh for all units": apply(replicas_of_one_block(), ranks_per_node=1),
            "replicas whose gradients are not averaged": lambda: apply_zeropp(
                shard(make_lm(), mesh=across_nodes), NODES, mesh=across_nodes
            ),
            r"unit blocks.1 .* reshard_after_forward=<int>": apply(one_block_resharded_to_a_part()),
            "Call it once": apply(within_another()),
        }
    )


def scenario_settings_that_the_model_cannot_have(rank: int) -> None:
    offloaded = shard(make_lm(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model = shard(make_lm())
    apply_zeropp(model, NODES)
    deltas = NODES | {"qwz_mode": "delta"}
    each_refusal(
        {
            "cannot change": lambda: apply_zeropp(model, {}),
            "offloaded to the CPU": lambda: apply_zeropp(offloaded, deltas),
            "hpz_size=4 spreads one copy": lambda: apply_zeropp(shard(make_lm()), deltas | {"hpz_size": 4}),
        }
    )


def scenario_generation_without_zeropp_and_steps_inside_it(rank: int) -> None:
    model = shard(make_lm())
    with pytest.raises(ValueError, match="need a model under ZeRO"):
        generation_mode(model).__enter__()
    apply_zeropp(model, NODES)
    backward(model, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with generation_mode(model), pytest.raises(RuntimeError, match="inside generation_mode"):
        optimizer.step()


def scenario_every_rank_names_the_one_that_differs(rank: int) -> None:
    """In its settings, its variables, its libraries or its model. Without that, ranks would wait or mix up bytes."""
    odd = rank == 2

    def transposed() -> nn.Module:
        model = make_lm()
        if odd:
            model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach().T.contiguous())
        return model

    def frozen() -> nn.Module:
        model = make_lm()
        model.head.requires_grad_(not odd)
        return model

    def apply(model: nn.Module, settings: object = NODES, policy: str = "fp32") -> Callable[[], object]:
        return lambda: apply_zeropp(shard(model, POLICIES[policy]), settings)

    def with_variable(name: str) -> None:
        with mock.patch.dict(os.environ, {name: "0" if odd else "1"}):
            apply(make_lm())()

    def with_libraries(name: str, replacement: Callable[..., object]) -> None:
        with mock.patch.object(plan_module, name, replacement):
            apply(make_lm())()

    def moved() -> None:
        if odd:
            raise MovedNameError("somelib has no such name")

    each_refusal(
        {
            r"\('qwz_bits', 8\), rank 2 has \('qwz_bits', 4\)": apply(make_lm(), NODES | {"qwz_bits": 4 if odd else 8}),
            "rank 2 says: .*gone.yaml": apply(make_lm(), "gone.yaml" if odd else NODES),
            "rank 2 says: MovedNameError": lambda: with_libraries("check_seams", moved),
            "versions: .* rank 2 has .*2.99": lambda: with_libraries("version_of", lambda _: "2.99" if odd else "2.13"),
            "is_enabled: .* rank 2 has False": lambda: with_variable("ZEROPP_ENABLED"),
            "checks_secondaries: .* rank 2 has False": lambda: with_variable("ZEROPP_CHECK"),
            "units: rank 0 has nothing, rank 2 has .*blocks.2": apply(make_lm(depth=3 if odd else 2)),
            r"rank 2 has unit blocks.1 with weight \(12, 27\)": apply(transposed()),
            "rank 2 has .* torch.bfloat16": apply(make_lm().to(torch.bfloat16 if odd else torch.float32)),
            "rank 2 has .* param_dtype torch.bfloat16": apply(make_lm(), policy="bf16" if odd else "fp32"),
            "rank 2 has .* frozen": apply(frozen()),
        }
    )


def scenario_switched_off_any_settings_do(rank: int) -> None:
    """FSDP2's own collectives have no use for them, and the model gets no hook."""
    model = shard(make_lm().bfloat16())
    num_hooks = len(model._forward_pre_hooks)
    with pytest.raises(ValueError, match="needs fp32 master weights"):
        apply_zeropp(model, {"qwz_mode": "delta"})
    with mock.patch.dict(os.environ, {"ZEROPP_ENABLED": "0"}):
        handle = apply_zeropp(model, {"qwz_mode": "delta"})
    backward(model, rank)
    assert not handle.is_active and len(model._forward_pre_hooks) == num_hooks


def scenario_settings_from_the_environment(rank: int) -> None:
    """None means the environment; each rank reads its own."""
    handle = apply_zeropp(shard(make_lm()))
    assert (handle.config.qwz_bits, handle.topology.ranks_per_node) == (4, 2)


def logged_by(action: Callable[[], object]) -> str:
    """Return what ``action`` prints to the user of a script that configures no logging."""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        action()
    return shown.getvalue()


@contextlib.contextmanager
def only_variables(variables: dict[str, str]) -> Iterator[None]:
    """Take the settings of ``test_apply`` out of the environment, and put others there."""
    with mock.patch.dict(os.environ, variables):
        for name in {"ZEROPP_QWZ_BITS", "ZEROPP_RANKS_PER_NODE"} - variables.keys():
            del os.environ[name]
        yield


@only_variables({})
def scenario_says_that_it_is_on(rank: int) -> None:
    """Rank 0 says so in one line, with the bytes that a step then takes, as they are counted."""
    kinds = {
        "preset 'balanced'": {},
        "preset 'half_model'": {"preset": "half_model"},
        "no preset": {"hpz_size": None, "qgz_bits": 8},
    }
    for words, settings in kinds.items():
        model = shard(make_lm())
        line = logged_by(lambda model=model, settings=settings: apply_zeropp(model, NODES | settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, rank)
        optimizer.step()
        if rank:
            assert line == ""
            continue
        assert line.startswith("ZeRO++ is on: 2 nodes x 2 ranks, ")
        assert f"{words}, 3 units" in line and line.count("\n") == 1
        traffic = get_handle(model).traffic
        assert f"take {traffic.zero3_bytes(1) / 1e6:.3g} MB or more" in line
        if "preset" not in settings:  # with deltas whole weights cross in the first step
            counted = f"expected to receive {traffic.cross_node_bytes / 1e6:.3g} MB from other nodes"
            assert counted in line, (counted, line)
    said = logged_by(lambda: apply_zeropp(shard(make_lm()), NODES | {"preset": "exact"}))
    assert said.count("at most") == (rank == 0)


def scenario_says_that_the_environment_is_not_read(rank: int) -> None:
    """Settings of the script are used alone. That they are others than the environment's is said once, by rank 0."""
    own = NODES | {"preset": "half_model"}
    for variables, is_said in (
        ({"ZEROPP_PRESET": "exact", "ZEROPP_RANKS_PER_NODE": "2"}, True),
        ({"ZEROPP_QWZ_BITZ": "8"}, True),  # a misspelt one has no effect either
        ({"ZEROPP_PRESET": "half_model", "ZEROPP_RANKS_PER_NODE": "2"}, False),
        ({"ZEROPP_CHECK": "1"}, False),
    ):
        with only_variables(variables):
            said = logged_by(lambda: apply_zeropp(shard(make_lm()), own))
        assert (f"are not read: {', '.join(variables)} " in said) == (is_said and rank == 0), (variables, said)


def scenario_gradients_stay_quantized_to_the_end(rank: int) -> None:
    """By default training never stops to quantize gradients, not in its last step and not in one behind it."""
    for until in (1.0, 0.5):
        model = shard(make_lm())
        handle = apply_zeropp(model, NODES | {"qgz_until": until})
        handle.set_progress(0.0)
        before = handle.predict()
        handle.set_progress(1.0)
        assert (handle.predict() == before) == (until == 1)


def scenario_a_loop_without_progress_is_reminded(rank: int) -> None:
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


test_apply = on_four_ranks(__name__, env={"ZEROPP_QWZ_BITS": "4", "ZEROPP_RANKS_PER_NODE": "2"})


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
    for message in expect_errors(apply_without_group, 2, init=False, limit_s=LIMIT_S):
        assert all(words in message for words in ("RuntimeError", "needs a process group", "torchrun"))


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


@pytest.mark.thorough
def test_a_new_process_group_gets_new_groups():
    for old, new in run_ranks(run_other_gloo_world, 4):
        assert old != new
