"""Show memory per rank and bytes per step: as a table, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from hf_zeropp.estimate.memory_and_bytes import IN_NODE, KEPT, KINDS, SYNCED, THIS_PACKAGE, Estimate
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.training_job import Setup

BYTE_UNITS = ("", "K", "M", "G", "T", "P")
COUNT_UNITS = ("", "K", "M", "B", "T")


def table(estimates: list[Estimate], model: ModelShape, setup: Setup) -> Table:
    """Return a rich table with one column per method: memory per rank by kind, and bytes per node and step.

    Methods are the columns because all of them fit 80 characters; the kinds of memory would not. Each number has a unit of
    its own for the same reason: a shard may be a millionth of the model. ZeRO-1 and ZeRO-2, which shard no weights, have no room.
    """
    estimates = [one for one in estimates if one.method not in ("ZeRO-1", "ZeRO-2")]
    # The papers' methods and FSDP2 do not pack frozen weights.
    packing = model.packing(setup.config)
    base = f", base in {16 if packing is None else packing.format.bits} bits" if model.frozen_units else ""
    title = (
        f"{model.name}: {shorten(model.num_params, COUNT_UNITS)} parameters, "
        f"{shorten(model.num_trainable, COUNT_UNITS)} trained{base}\n"
        f"{setup.num_nodes} nodes x {setup.ranks_per_node} ranks, {setup.optimizer}, "
        f"{setup.micro_steps} micro-step{'s' if setup.micro_steps > 1 else ''}"
    )
    synced = (
        f"{SYNCED}: gradients are reduced in every micro-step (sync_each_batch).\n" if setup.micro_steps > 1 else ""
    )
    caption = (
        "Memory is per rank. Gathered: full weights, held while layers compute.\n"
        "Traffic is what enters one node per optimizer step. Across nodes: the least for\n"
        "any algorithm; in rings: what NCCL's flat rings put on its link (gloo's: more).\n"
        f"{synced}{KEPT}: weights and gradients stay in full until the last micro-step.\n"
        f"{IN_NODE}: backward passes gather within the node (reshard_after_forward=N).\n"
        "M, G and T are 10^6, 10^9 and 10^12 bytes."
    )
    result = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    result.add_column(no_wrap=True)
    for one in estimates:
        # A number that does not fit continues on the next line: no digit may be lost.
        style = "bold" if one.method == THIS_PACKAGE else None
        result.add_column(one.method, style=style, justify="right", overflow="fold")

    # A dash for zero: most methods lack most kinds of memory, and the numbers that are there should stand out.
    def add_row(label: str, values: Iterable[float]) -> None:
        result.add_row(label, *(shorten(value, BYTE_UNITS) if value else "-" for value in values))

    result.add_row("Memory", style="italic")
    labels = {"frozen": "frozen base"} | ({"parameters": "adapters"} if model.frozen_units else {})
    for kind in KINDS:
        if any(one.memory[kind] for one in estimates):
            add_row(f" {labels.get(kind, kind)}", (one.memory[kind] for one in estimates))
    add_row(" total", (one.total for one in estimates))
    add_row(" + gathered", (one.gathered for one in estimates))
    result.add_section()
    result.add_row("Traffic", style="italic")
    add_row(" across nodes", (one.cross_node for one in estimates))
    add_row(" in rings", (one.in_rings for one in estimates))
    add_row(" within node", (one.intra_node for one in estimates))
    return result


def to_json(estimates: list[Estimate], model: ModelShape, setup: Setup) -> dict[str, Any]:
    """Return the model, the setup and all estimates in bytes, fit for JSON."""
    return {
        "model": {"name": model.name, "parameters": model.num_params, "trainable": model.num_trainable},
        "setup": dataclasses.asdict(setup),
        "estimates": [{**dataclasses.asdict(one), "total": one.total} for one in estimates],
    }


def shorten(number: float, units: Sequence[str]) -> str:
    """Return three significant digits of ``number`` and its unit: "1.75G" for 1_749_600_000. Each unit is 1000 of the last."""
    index = 0
    while number >= 999.5 and index < len(units) - 1:  # from there on, three digits round to 1000
        number, index = number / 1000, index + 1
    return f"{number:.3g}{units[index]}"
