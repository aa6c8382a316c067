"""Show memory, bytes and predicted step times: as tables, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from hf_zeropp.estimate.comparison import Row, fastest
from hf_zeropp.estimate.memory_and_bytes import IN_NODE, KEPT, KINDS, SYNCED, THIS_PACKAGE, Estimate
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.training_job import Job, Setup
from hf_zeropp.sizes import COUNT_UNITS, PREFIXES, shorten


def memory_table(estimates: list[Estimate], model: ModelShape, setup: Setup) -> Table:
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
        result.add_row(label, *(shorten(value, PREFIXES) if value else "-" for value in values))

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


def memory_to_json(estimates: list[Estimate], model: ModelShape, setup: Setup) -> dict[str, Any]:
    """Return the model, the setup and all estimates in bytes, fit for JSON."""
    return {
        "model": {"name": model.name, "parameters": model.num_params, "trainable": model.num_trainable},
        "setup": dataclasses.asdict(setup),
        "estimates": [{**dataclasses.asdict(one), "total": one.total} for one in estimates],
    }


def time_table(job: Job, rows: Sequence[Row]) -> Table:
    """Return a rich table with one row per method. It fits 80 columns."""
    cluster, device = job.cluster, job.cluster.device
    title = (
        f"{job.model.name}: {job.setup.num_nodes} nodes x {cluster.ranks_per_node} {device.name}\n"
        f"{cluster.network.rate * 8 / 1e9:.3g} Gbit/s attainable per node, {cluster.within.rate / 1e9:.3g} GB/s within, "
        f"{job.tokens} tokens x {job.setup.micro_steps}"
    )
    share = f" ({device.flops / device.peak_flops:.0%} of the peak)" if device.flops != device.peak_flops else ""
    limit = f"it fits if at most {device.memory / 1e9:.3g} GB"
    caption = (
        f"Simulated, not measured. Attainable: {device.flops / 1e12:.3g} TFLOP/s{share}.\n"
        "Exposed: the share of a step in which a rank does not compute.\n"
        f"GB/rank is without activations; {'its memory is unknown' if math.isinf(device.memory) else limit}."
    )
    result = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    result.add_column("predicted", no_wrap=True)
    for name in ("step s", "tokens/s", "MFU", "exposed", "GB/rank", "fits"):
        result.add_column(name, justify="right", no_wrap=True)
    best = fastest(rows)
    for row in rows:
        cells = (
            f"{row.time.step_s:.4g}",
            shorten(row.time.tokens_per_s(job), COUNT_UNITS),
            f"{row.time.mfu(job):.1%}",
            f"{row.time.exposed:.0%}",
            f"{row.memory / 1e9:.3g}",
            "yes" if row.fits else "no",
        )
        result.add_row(row.method, *cells, style="bold" if row is best else None)
    return result


def times_to_json(job: Job, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the cluster and the predictions, fit for JSON."""
    times = [
        {
            "method": row.method,
            "step_s": row.time.step_s,
            "tokens_per_s": row.time.tokens_per_s(job),
            "mfu": row.time.mfu(job),
            "exposed": row.time.exposed,
            "memory": row.memory,
            "fits": row.fits,
        }
        for row in rows
    ]
    return {"simulated": True, "cluster": dataclasses.asdict(job.cluster), "tokens": job.tokens, "times": times}
