"""Show predicted step times: as a table, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from hf_zeropp.estimate.comparison import Row, fastest
from hf_zeropp.estimate.memory_report import COUNT_UNITS, shorten
from hf_zeropp.estimate.training_job import Job


def time_table(job: Job, rows: Sequence[Row]) -> Table:
    """Return a rich table with one row per method. It fits 80 columns."""
    cluster, device = job.cluster, job.cluster.device
    title = (
        f"{job.model.name}: {cluster.num_nodes} nodes x {cluster.ranks_per_node} {device.name}\n"
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


def to_json(job: Job, rows: Sequence[Row]) -> dict[str, Any]:
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
