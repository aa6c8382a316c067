"""Mistakes that show on ranks: wrong models, wrong plugins and callbacks, and ranks that differ. Every rank must say so."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from catalogue import EVERY_RANK, Mistake
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from toy import make_lm, shard, tokens_of
from trainer_runs import build_trainer, tiny_model, token_data, training_arguments
from transformers import Trainer

from hf_zeropp import ZeroPPCallback, ZeroPPPlugin, apply_zeropp, generation_mode
from hf_zeropp import plan as plan_module
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


def launched_by(launcher: str, make: Callable[[], object]) -> None:
    """Make a mistake as a script that this launcher has started: Accelerate's exports its precision, torchrun nothing."""
    with mock.patch.dict("os.environ"):
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        if launcher == "accelerate":
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        make()


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
        "resharded to a part",
        lambda rank: applied(shard(make_lm(), reshard_after_forward=2)),
        *("reshard_after_forward=<int>", "reshard_after_forward=True"),
    ),
    on_ranks("applied to a part again", lambda rank: applied(applied(shard(make_lm())).blocks[0]), "Call it once"),
    on_ranks("other settings later", lambda rank: applied(applied(shard(make_lm())), {}), "cannot change", "anew"),
    on_ranks("nodes of three", lambda rank: applied(shard(make_lm()), {"ranks_per_node": 3}), "Divisors: [1, 2, 4]"),
    on_ranks("misspelt setting", lambda rank: applied(shard(make_lm()), {"qwz_bit": 8}), "Did you mean 'qwz_bits'?"),
    on_ranks(
        "deltas of 16-bit masters",
        lambda rank: applied(shard(make_lm().bfloat16()), NODES | {"qwz_mode": "delta"}),
        *("needs fp32 master weights", "torch.bfloat16", "qwz_mode='values'"),
    ),
    on_ranks("generation without ZeRO++", lambda rank: generation_mode(make_lm()).__enter__(), "call apply_zeropp"),
    on_ranks("a step while generating", step_while_generating, "inside generation_mode", "Leave the"),
    on_ranks("FSDP1", lambda rank: ZeroPPPlugin(fsdp_version=1), "expected fsdp_version=2, got 1"),
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
        *("no model runs under ZeRO++", "DistributedDataParallel", "ZEROPP_ENABLED=0"),
    ),
    on_ranks(
        "replicas behind torchrun",
        lambda rank: launched_by("torchrun", lambda: first_step_of(DistributedDataParallel(make_lm()), rank)),
        *("no model runs under ZeRO++", "export ACCELERATE_USE_FSDP=true and FSDP_VERSION=2", "ZEROPP_ENABLED=0"),
    ),
    on_ranks(
        "replicas behind Accelerate's launcher",
        lambda rank: launched_by("accelerate", lambda: first_step_of(DistributedDataParallel(make_lm()), rank)),
        *("no model runs under ZeRO++", "Set `distributed_type: FSDP` and `fsdp_version: 2` in the Accelerate config"),
    ),
    on_ranks(
        "a callback without FSDP",
        lambda rank: in_new_state(lambda: build_trainer("out", fsdp=None, fsdp_config=None)),
        *("needs a model sharded by FSDP2", "got fsdp=None", "hf-zeropp launch"),
    ),
    on_ranks("a callback that comes late", lambda rank: in_new_state(late_callback), "Trainer(callbacks=[...])"),
    on_ranks(
        "a callback of another Trainer",
        lambda rank: in_new_state(lambda: ZeroPPCallback().attach(build_trainer("out"))),
        *("was not passed to that trainer", "Trainer(callbacks=[callback])"),
    ),
    differ("settings", lambda rank: applied(shard(make_lm()), NODES | {"qwz_bits": 8 if rank != 2 else 4}), "qwz_bits"),
    differ(
        "a file", lambda rank: applied(shard(make_lm()), NODES if rank != 3 else "gone.yaml"), "rank 3", "gone.yaml"
    ),
    differ("nodes", lambda rank: applied(shard(make_lm()), {"ranks_per_node": 2 if rank else 4}), "ranks_per_node"),
    differ("depth", lambda rank: applied(shard(make_lm(depth=3 if rank == 3 else 2))), "units", "rank 3", "same"),
    differ("width", lambda rank: applied(shard(make_lm(hidden=24 if rank == 1 else 16))), "units", "rank 1"),
    differ(
        "dtype", lambda rank: applied(shard(make_lm().to(torch.bfloat16 if rank == 2 else torch.float32))), "rank 2"
    ),
    differ("frozen", lambda rank: applied(changed(lambda model: model.head.requires_grad_(rank != 1))), "frozen"),
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
    differ("the switch in apply_zeropp", lambda rank: switched(rank, lambda: applied(shard(make_lm()))), "is_enabled"),
    differ(
        "the switch in Accelerate",
        lambda rank: in_new_state(
            lambda: switched(rank, lambda: Accelerator(cpu=True, fsdp_plugin=ZeroPPPlugin(zeropp=NODES)))
        ),
        *("on for ranks [0, 2, 3] and off for rank 1", "ZEROPP_ENABLED"),
    ),
]


def switched(rank: int, make: Callable[[], object]) -> None:
    """Turn ZeRO++ off on rank 1 alone."""
    with mock.patch.dict("os.environ", {"ZEROPP_ENABLED": "0" if rank == 1 else "1"}):
        make()


def make_all(rank: int) -> list[tuple[str, float]]:
    """Make all mistakes, one after the other. None may leave a rank in a collective, or the next would hang."""
    from catalogue import outcome_of

    outcomes = []
    for mistake in RANKS:
        dist.barrier()  # the time of each begins together
        outcomes.append(tuple(outcome_of(lambda mistake=mistake: mistake.make(rank))))
    return outcomes
