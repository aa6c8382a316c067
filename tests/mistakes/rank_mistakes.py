"""Mistakes that show on ranks: wrong models, wrong plugins and callbacks, and ranks that differ. Every rank must say so."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers.trainer
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from catalogue import EVERY_RANK, Mistake, Outcome, outcome_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from toy import POLICIES, make_lm, shard, tokens_of
from trainer_runs import build_trainer, tiny_model, token_data, training_arguments
from transformers import Trainer

from hf_zeropp import ZeroPPCallback, ZeroPPPlugin, apply_zeropp, generation_mode
from hf_zeropp import plan as plan_module
from hf_zeropp.compat import MovedNameError
from hf_zeropp.integrations.launch.default_callback import serve_scripts
from hf_zeropp.integrations.launch.unmodified import FirstSteps

NODES = {"ranks_per_node": 2}


def on_ranks(name: str, make: Callable[[int], object], *words: str) -> Mistake:
    return Mistake(name, make, words, said_by=EVERY_RANK)


def differ(name: str, make: Callable[[int], object], *words: str) -> Mistake:
    """A mistake in which one rank differs: the message names it, on all ranks."""
    return on_ranks(f"ranks differ: {name}", make, "rank", *words)


def applied(model: torch.nn.Module, settings: Any = NODES) -> torch.nn.Module:
    apply_zeropp(model, settings)
    return model


def changed(change: Callable[[torch.nn.Module], object]) -> torch.nn.Module:
    model = make_lm()
    change(model)
    return shard(model)


def mesh_of_two() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "place"))


def in_new_state(make: Callable[[], object]) -> None:
    """Make a mistake as in a process in which no Accelerator was built."""
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        with mock.patch.dict("os.environ"):  # an Accelerator with a plugin exports that there is one
            make()
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)


def with_unknown_replicas() -> None:
    """Two nodes shard the model across them twice: ranks 0 and 2, and ranks 1 and 3."""
    mesh = mesh_of_two()["node"]
    apply_zeropp(shard(make_lm(), mesh=mesh), NODES, mesh=mesh)


def with_replicas_of_some_units() -> None:
    mesh, model = mesh_of_two(), make_lm()
    fully_shard(model.blocks[0], mesh=mesh)
    applied(fully_shard(model, mesh=mesh["place"]), {"ranks_per_node": 1})


def with_one_unit_resharded_to_a_part() -> None:
    model = make_lm()
    fully_shard(model.blocks[1], reshard_after_forward=2)
    fully_shard(model.blocks[0])
    applied(fully_shard(model))


def transpose(model: torch.nn.Module) -> None:
    weight = model.blocks[1].up.weight
    model.blocks[1].up.weight = torch.nn.Parameter(weight.detach().T.contiguous())


def with_variables(variables: dict[str, str | None], make: Callable[[], object]) -> None:
    """Make a mistake of a user's or a launcher's variables; None takes one away."""
    with mock.patch.dict("os.environ"):
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        make()


def with_local_world_size(value: str | None) -> None:
    with_variables({"LOCAL_WORLD_SIZE": value}, lambda: applied(shard(make_lm()), None))


def with_a_moved_name(rank: int) -> None:
    """Apply where the installed libraries are not those of the other ranks."""
    error = MovedNameError("somelib 3.0 has no `gone`") if rank == 1 else None
    with mock.patch.object(plan_module, "check_seams", side_effect=error):
        applied(shard(make_lm()))


def with_version(rank: int) -> None:
    version = "2.99" if rank == 1 else "2.13"
    with mock.patch.object(plan_module, "version_of", lambda library: version):
        applied(shard(make_lm()))


def second_accelerator() -> None:
    Accelerator(cpu=True)
    Accelerator(cpu=True, fsdp_plugin=ZeroPPPlugin(zeropp=NODES))


def frozen_on_some_ranks(rank: int) -> None:
    model = tiny_model()
    if rank > 1:
        model.model.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    Accelerator(cpu=True, fsdp_plugin=ZeroPPPlugin(zeropp=NODES)).prepare(model, optimizer)


def handle_on_one_rank(rank: int) -> None:
    model = tiny_model()
    accelerator = Accelerator(cpu=True, fsdp_plugin=ZeroPPPlugin(zeropp=NODES))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == 0:
        accelerator.state.fsdp_plugin.handle_of(model)
    model(input_ids=tokens_of(rank))


def step_while_generating(rank: int) -> None:
    model = applied(shard(make_lm()))
    model(tokens_of(rank)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with generation_mode(model):
        optimizer.step()


def first_step_of(model: torch.nn.Module, rank: int) -> None:
    """The only step of a script that ``hf_zeropp.run`` started, and in which no model was given ZeRO++."""
    gc.collect()  # models of other mistakes, which have ZeRO++
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = FirstSteps()
    optimizer.register_step_post_hook(steps)
    model(tokens_of(rank)).sum().backward()
    optimizer.step()
    steps.check_use()


def callback_beside_deepspeed() -> None:
    arguments = training_arguments("out")
    arguments.deepspeed = "zero3.json"
    Trainer(tiny_model(), arguments, train_dataset=token_data(), callbacks=[ZeroPPCallback()])


def trainer_without_callback() -> None:
    arguments = training_arguments("out", None, fsdp_config={"zero_pp": {"preset": "exact"}})
    with mock.patch.object(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS]):
        serve_scripts(None)  # as hf-zeropp launch does
        Trainer(tiny_model(), arguments, train_dataset=token_data())


def late_callback() -> None:
    trainer = Trainer(tiny_model(), training_arguments("out", None, fsdp=None, fsdp_config=None))
    trainer.add_callback(ZeroPPCallback())
    trainer.train_dataset = token_data()
    trainer.train()


RANKS = [
    on_ranks("a model that is not sharded", lambda rank: applied(make_lm()), "found none", "fully_shard"),
    on_ranks(
        "a model on a part of the world",
        lambda rank: applied(shard(make_lm(), mesh=mesh_of_two()["node"])),
        *("is sharded over ranks", "expected all 4 ranks", "Call fully_shard"),
    ),
    on_ranks(
        "a model on each node alone",
        lambda rank: applied(shard(make_lm(), mesh=mesh_of_two()["place"])),
        *("is sharded over ranks", "expected all 4 ranks", "1-D mesh"),
    ),
    on_ranks(
        "replicas of some units",
        lambda rank: with_replicas_of_some_units(),
        *("unit (root) is replicated over ranks", "and other units over", "same mesh for all units"),
    ),
    on_ranks(
        "replicas that nobody averages",
        lambda rank: with_unknown_replicas(),
        *("over ranks [0, 2]", "once more over ranks [1, 3]", "replicas whose gradients are not averaged"),
    ),
    on_ranks(
        "resharded to a part",
        lambda rank: with_one_unit_resharded_to_a_part(),
        *("unit blocks.1", "reshard_after_forward=<int>", "reshard_after_forward=True", "hpz_size"),
    ),
    on_ranks("applied to a part again", lambda rank: applied(applied(shard(make_lm())).blocks[0]), "Call it once"),
    on_ranks("other settings later", lambda rank: applied(applied(shard(make_lm())), {}), "cannot change", "anew"),
    on_ranks("nodes of three", lambda rank: applied(shard(make_lm()), {"ranks_per_node": 3}), "Divisors: [1, 2, 4]"),
    on_ranks(
        "copies of three",
        lambda rank: applied(shard(make_lm()), NODES | {"hpz_size": 3}),
        "hpz_size=3 must divide the world of 4",
    ),
    *(
        on_ranks(name, lambda rank, value=value: with_local_world_size(value), *words)
        for name, value, *words in (
            ("LOCAL_WORLD_SIZE=3", "3", "LOCAL_WORLD_SIZE=3 must divide the world of 4"),
            ("LOCAL_WORLD_SIZE=0", "0", "LOCAL_WORLD_SIZE=0"),
            ("LOCAL_WORLD_SIZE in words", "two", "LOCAL_WORLD_SIZE=two"),
            ("no LOCAL_WORLD_SIZE", None, "LOCAL_WORLD_SIZE, which is not set", "accelerate launch", "torchrun"),
        )
    ),
    on_ranks("misspelt setting", lambda rank: applied(shard(make_lm()), {"qwz_bit": 8}), "Did you mean 'qwz_bits'?"),
    on_ranks(
        "deltas of 16-bit masters",
        lambda rank: applied(shard(make_lm().bfloat16()), NODES | {"qwz_mode": "delta"}),
        *("needs fp32 master weights", "unit (root)", "torch.bfloat16", "qwz_mode='values'"),
    ),
    on_ranks(
        "deltas of offloaded masters",
        lambda rank: applied(
            shard(make_lm(), offload_policy=CPUOffloadPolicy(pin_memory=False)), NODES | {"qwz_mode": "delta"}
        ),
        *("offloaded to the CPU", "qwz_mode='values'"),
    ),
    on_ranks(
        "deltas of no copy",
        lambda rank: applied(shard(make_lm()), NODES | {"qwz_mode": "delta", "hpz_size": 4}),
        *("hpz_size=4 spreads one copy of the weights over all ranks", "hpz_size='node'"),
    ),
    on_ranks(
        "generation without ZeRO++",
        lambda rank: generation_mode(make_lm()).__enter__(),
        *("prepare it with Accelerate", "call apply_zeropp"),
    ),
    on_ranks("a step while generating", step_while_generating, "inside generation_mode", "Leave the"),
    on_ranks("FSDP1", lambda rank: ZeroPPPlugin(fsdp_version=1), "expected fsdp_version=2, got 1"),
    on_ranks(
        "FSDP1 of the launcher",
        lambda rank: with_variables({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, ZeroPPPlugin),
        *("configured for FSDP1", "fsdp_version: 2", "--fsdp_version 2"),
    ),
    on_ranks(
        "DeepSpeed of the launcher",
        lambda rank: with_variables({"ACCELERATE_USE_DEEPSPEED": "true"}, ZeroPPPlugin),
        *("DeepSpeed exclude each other", "distributed_type: FSDP"),
    ),
    on_ranks("true for settings", lambda rank: ZeroPPPlugin(zeropp=True), "mapping", "bool"),
    on_ranks(
        "the plugin of the second Accelerator",
        lambda rank: in_new_state(second_accelerator),
        *("An Accelerator was built before", "first Accelerator"),
    ),
    on_ranks(
        "FSDP1 in place of the plugin",
        lambda rank: ZeroPPPlugin.in_place_of(FullyShardedDataParallelPlugin(fsdp_version=1)),
        "expected fsdp_version=2, got 1",
    ),
    on_ranks(
        "nobody uses the settings",
        lambda rank: first_step_of(make_lm(), rank),
        *("no model runs under ZeRO++", "expected", "got", "ZEROPP_ENABLED=0"),
    ),
    on_ranks(
        "stock FSDP2 by hand",
        lambda rank: first_step_of(shard(make_lm()), rank),
        *("no model runs under ZeRO++", "call apply_zeropp(model)"),
    ),
    on_ranks(
        "replicas by hand",
        lambda rank: first_step_of(DistributedDataParallel(make_lm()), rank),
        *("no model runs under ZeRO++", "no sharded model", "ZEROPP_ENABLED=0"),
    ),
    on_ranks(
        "replicas behind torchrun",
        lambda rank: with_variables(
            {"ACCELERATE_MIXED_PRECISION": None}, lambda: first_step_of(DistributedDataParallel(make_lm()), rank)
        ),
        *("no model runs under ZeRO++", "export ACCELERATE_USE_FSDP=true and FSDP_VERSION=2", "ZEROPP_ENABLED=0"),
    ),
    on_ranks(
        "replicas behind Accelerate's launcher",
        lambda rank: with_variables(
            {"ACCELERATE_MIXED_PRECISION": "no"}, lambda: first_step_of(DistributedDataParallel(make_lm()), rank)
        ),
        *("no model runs under ZeRO++", "Set `distributed_type: FSDP` and `fsdp_version: 2` in the Accelerate config"),
    ),
    on_ranks(
        "a callback without FSDP",
        lambda rank: in_new_state(lambda: build_trainer("out", fsdp=None, fsdp_config=None)),
        *("needs a model sharded by FSDP2", "got fsdp=None", "hf-zeropp launch"),
    ),
    on_ranks(
        "a callback beside DeepSpeed",
        lambda rank: in_new_state(callback_beside_deepspeed),
        "ZeroPPCallback and DeepSpeed exclude each other",
    ),
    on_ranks(
        "FSDP1 of a Trainer",
        lambda rank: in_new_state(
            lambda: build_trainer("out", fsdp_config={"version": 1, "sync_module_states": False})
        ),
        "expected fsdp_version=2, got 1",
    ),
    on_ranks(
        "a misspelt setting of a Trainer",
        lambda rank: in_new_state(lambda: build_trainer("out", {"qwz_bit": 8})),
        *("Unknown ZeRO++ setting 'qwz_bit'", "Did you mean 'qwz_bits'?"),
    ),
    on_ranks(
        "settings of a Trainer under another key",
        lambda rank: in_new_state(lambda: build_trainer("out", fsdp_config={"zeropp_config": {"preset": "exact"}})),
        *("unknown key 'zeropp_config' in fsdp_config", 'stand under "zeropp"'),
    ),
    on_ranks(
        "settings beside those of a Trainer",
        lambda rank: in_new_state(lambda: build_trainer("out", fsdp_config={"qwz_bits": 4})),
        *("'qwz_bits' stands in fsdp_config", 'in it under "zeropp"'),
    ),
    on_ranks(
        "settings under another key, and no callback",
        lambda rank: in_new_state(trainer_without_callback),
        *("unknown key 'zero_pp' in fsdp_config", 'stand under "zeropp"'),
    ),
    on_ranks("a callback that comes late", lambda rank: in_new_state(late_callback), "Trainer(callbacks=[...])"),
    on_ranks(
        "a callback of another Trainer",
        lambda rank: in_new_state(lambda: ZeroPPCallback().attach(build_trainer("out"))),
        *("was not passed to that trainer", "Trainer(callbacks=[callback])"),
    ),
    differ(
        "settings",
        lambda rank: applied(shard(make_lm()), NODES | {"qwz_bits": 8 if rank != 2 else 4}),
        *("rank 0 has ('qwz_bits', 8)", "rank 2 has ('qwz_bits', 4)", "same settings"),
    ),
    differ(
        "a value",
        lambda rank: applied(shard(make_lm()), NODES if rank != 1 else {"qgz_bits": 5}),
        *("rank 1", "qgz_bits must be one of", "got 5"),
    ),
    differ("a type", lambda rank: applied(shard(make_lm()), NODES if rank != 0 else 7), "rank 0", "mapping", "int"),
    differ(
        "a file", lambda rank: applied(shard(make_lm()), NODES if rank != 3 else "gone.yaml"), "rank 3", "gone.yaml"
    ),
    differ(
        "nodes",
        lambda rank: applied(shard(make_lm()), {"ranks_per_node": 2 if rank else 4}),
        *("rank 0 has ('ranks_per_node', 4)", "rank 1 has ('ranks_per_node', 2)"),
    ),
    differ(
        "LOCAL_WORLD_SIZE, on nodes of two and of one",
        lambda rank: with_local_world_size("2" if rank < 2 else "1"),
        *("ranks_per_node", "rank 0 has 2", "rank 2 has 1"),
    ),
    differ(
        "depth", lambda rank: applied(shard(make_lm(depth=3 if rank == 3 else 2))), "units", "rank 3", "same", "model"
    ),
    differ("width", lambda rank: applied(shard(make_lm(hidden=24 if rank == 1 else 16))), "units", "rank 1"),
    differ(
        "shape",
        lambda rank: applied(changed(transpose if rank == 3 else lambda model: None)),
        *("unit blocks.1 with weight (27, 12)", "rank 3 has unit blocks.1 with weight (12, 27)"),
    ),
    differ(
        "dtype",
        lambda rank: applied(shard(make_lm().to(torch.bfloat16 if rank == 2 else torch.float32))),
        *("unit (root)", "torch.float32", "rank 2 has", "torch.bfloat16"),
    ),
    differ(
        "mixed precision",
        lambda rank: applied(shard(make_lm(), POLICIES["bf16" if rank == 1 else "fp32"])),
        *("param_dtype None", "rank 1 has", "param_dtype torch.bfloat16"),
    ),
    differ(
        "frozen",
        lambda rank: applied(changed(lambda model: model.head.requires_grad_(rank != 1))),
        *("unit (root) with weight (29, 12) in torch.float32, rank 1", "torch.float32, frozen"),
    ),
    differ(
        "frozen weights through Accelerate",
        lambda rank: in_new_state(lambda: frozen_on_some_ranks(rank)),
        *("frozen ones are on ranks [2, 3]", "none on ranks [0, 1]", "on all ranks"),
    ),
    differ(
        "a handle that rank 0 asks for before the first forward pass",
        lambda rank: in_new_state(lambda: handle_on_one_rank(rank)),
        *(
            "by a call (handle_of, apply_zeropp, generate) as rank 0",
            "first forward pass as ranks [1, 2, 3]",
            "on all ranks",
        ),
    ),
    differ("versions", with_version, "versions", "2.99", "rank 1"),
    differ(
        "ZEROPP_CHECK",
        lambda rank: with_variables({"ZEROPP_CHECK": str(int(rank == 0))}, lambda: applied(shard(make_lm()))),
        "checks_secondaries",
    ),
    differ("names of a library", with_a_moved_name, "rank 1 says: MovedNameError: somelib 3.0 has no `gone`"),
    differ(
        "the switch in apply_zeropp",
        lambda rank: with_variables({"ZEROPP_ENABLED": str(int(rank != 1))}, lambda: applied(shard(make_lm()))),
        "is_enabled",
    ),
    differ(
        "the switch in Accelerate",
        lambda rank: in_new_state(
            lambda: with_variables(
                {"ZEROPP_ENABLED": str(int(rank != 1))},
                lambda: Accelerator(cpu=True, fsdp_plugin=ZeroPPPlugin(zeropp=NODES)),
            )
        ),
        *("on for ranks [0, 2, 3] and off for rank 1", "ZEROPP_ENABLED"),
    ),
]


def make_all(rank: int) -> list[Outcome]:
    """Make all mistakes, one after the other. None may leave a rank in a collective, or the next would hang."""
    outcomes = []
    for mistake in RANKS:
        dist.barrier()  # the time of each begins together
        outcomes.append(outcome_of(functools.partial(mistake.make, rank)))
    return outcomes
