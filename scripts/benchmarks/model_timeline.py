"""How long is a step of a 7B model on two nodes of GPUs, and how long is the network idle in it, beside stock FSDP2?

    python scripts/benchmarks/model_timeline.py

Nothing is measured. The order of all operators and collectives is recorded from the code that runs, on the streams of the
happens-before checker (``tests/helpers/happens_before``), and simulated with given rates. One process and no GPU are needed.

``overlap: false`` leaves both hops on the streams on which FSDP2 calls them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from library.network import rate_text
from library.pages import Grid, write_page
from library.plots import panels, save
from library.recorded_step import Recording, Scale, Step, last_step, tasks_of
from library.study import command_line, make_page_parser, versions
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_zeropp import apply_zeropp
from hf_zeropp.estimate.cluster import find_gpu, gpu_cluster, parse_rate
from hf_zeropp.estimate.simulation import COMPUTE, KERNEL, NETWORK, WITHIN

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from happens_before import checked, fake_world  # noqa: E402  (only there)

NODES, RANKS_PER_NODE = 2, 8
HIDDEN, INNER, VOCABULARY, LAYERS = 4096, 11008, 32000, 32
SHRINK = 16
"""The recorded model's sizes are the true ones divided by this."""

RECORDED_TOKENS = 4
STEPS = 2
"""The first fills the secondary shards. The second is looked at; a third is the same."""

TOKENS = (2048, 4096, 8192)
NETWORKS = ("50gbit", "100gbit", "200gbit", "400gbit")
STOCK = "stock FSDP2"
# The streams are emulated on a CPU, where other bits within a node are the default.
NATIVE: dict[str, Any] = {"qwz_intra_bits": None, "qgz_intra_bits": None}
METHODS: dict[str, dict[str, Any]] = {
    "default": NATIVE,
    "delta": NATIVE | {"qwz_mode": "delta", "qwz_bits": 4},
    "INT8 within": {"qwz_intra_bits": 8, "qgz_intra_bits": 8},
}
ONE_STREAM, BESIDE = "one stream", "beside"
CODES = {ONE_STREAM: {"overlap": False}, BESIDE: {}}
"""Where cross hops run: behind node hops on the streams on which FSDP2 calls them, or on streams beside those."""

SHOWN_CODES = {
    STOCK: STOCK,
    ONE_STREAM: "balanced, cross hops on the streams of node hops",
    BESIDE: "balanced, cross hops on streams of their own (the default)",
}
"""Titles of the plot's panels."""

TITLE = "The modelled timeline of a 7B step"
INTRO = """Streams, events and collectives of one rank of 2 nodes of 8 H100, in a model of Llama-2-7B's shape (32 layers).
**Nothing was measured.** The order is recorded from the code that runs, on FSDP2's own streams under the happens-before checker,
and simulated with the rates of `hf-zeropp estimate`: half of a GPU's peak, 60 % of its memory rate, 85 % of the links' rates.
The host's time is left out. Collectives of one communicator run one after the other, and all start in the order of calls
(`NCCL_LAUNCH_ORDER_IMPLICIT=1`). One micro-step per step; gradients are reduced in bf16; no activation checkpointing.

Within the node the backend's own collectives move 16 bits (`default`, `delta`), or codes of 8 bits (`INT8 within`)."""


class Block(nn.Module):
    """The seven matrices of a Llama layer. What they compute does not matter; how much does."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, hidden] after the layer."""
        query, key, value, output = self.attention
        x = x + output(query(x) + key(x) + value(x))
        return x + self.down(self.gate(x) * self.up(x))


class Model(nn.Module):
    """Embedding, layers and head, with all sizes divided by ``SHRINK``."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        hidden, inner, vocabulary = (size // SHRINK for size in (HIDDEN, INNER, VOCABULARY))
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, inner) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Row(NamedTuple):
    """One simulated step.

    Attributes:
        code: ``STOCK``, or one of ``CODES``.
        method: of ``METHODS``.
        network: rate of a node.
        tokens: of a rank.
        step_ms: the whole step.
        forward_ms: its forward pass.
        idle_share: the share of the step in which nothing crosses nodes.
    """

    code: str
    method: str
    network: str
    tokens: int
    step_ms: float
    forward_ms: float
    idle_share: float


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_page_parser(__doc__, "timeline.json")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model")
    return parser.parse_args(argv)


def record(
    settings: dict[str, Any] | None, layers: int = LAYERS, micro_steps: int = 1, learning_rate: float = 1e-3
) -> Recording:
    """Return the streams of some optimizer steps under settings; of stock FSDP2 with None.

    Args:
        settings: of this package.
        layers: of the model.
        micro_steps: of each step. Gradients are reduced as Accelerate has them reduced: by stock FSDP2 in the last one alone.
        learning_rate: of AdamW, on which it depends how many words ``exact`` sends.

    Raises:
        RuntimeError: two streams touched the same memory unordered.
    """
    recording = Recording(RANKS_PER_NODE)
    with fake_world(NODES * RANKS_PER_NODE) as host_groups:
        model = Model(layers)
        for module in (*model.layers, model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        assert isinstance(model, FSDPModule)
        with checked(host_groups, recording.observe) as checker:
            set_last = model.set_requires_gradient_sync
            if settings is not None:
                set_last = apply_zeropp(model, {"ranks_per_node": RANKS_PER_NODE} | settings).set_last_micro_step
            _train(model, recording, micro_steps, learning_rate, set_last)
    if checker.races:
        raise RuntimeError("\n".join(map(str, checker.races)))
    return recording


def _train(
    model: nn.Module, recording: Recording, micro_steps: int, learning_rate: float, set_last: Callable[[bool], None]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    for _ in range(STEPS):
        for micro_step in range(micro_steps):
            set_last(micro_step == micro_steps - 1)
            # The loss is not read: the host would wait for the GPU.
            model(torch.arange(RECORDED_TOKENS)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        recording.end_step()


def step_of(recording: Recording, network: str, tokens: int) -> Step:
    """Return a recorded step at the true sizes."""
    cluster = gpu_cluster(find_gpu("h100"), NODES * RANKS_PER_NODE, RANKS_PER_NODE, parse_rate(network))
    scale = Scale(SHRINK**2, tokens / RECORDED_TOKENS)
    return last_step(recording, tasks_of(recording, cluster, scale))


def rows_of(code: str, method: str, recording: Recording) -> list[Row]:
    """Return the steps of a recording for all networks and batches."""
    rows = []
    for network in NETWORKS:
        for tokens in TOKENS:
            step = step_of(recording, network, tokens)
            times = (step.seconds, step.forward_end - step.start)
            step_ms, forward_ms = (round(1e3 * seconds, 1) for seconds in times)
            rows.append(Row(code, method, network, tokens, step_ms, forward_ms, round(step.idle_share, 4)))
    return rows


def grid_of(rows: list[Row], network: str) -> Grid:
    """Return the table of a network: a row for each batch and method, with cross hops beside and behind node hops."""
    columns = ["tokens per GPU, settings", STOCK, *CODES, "ratio", *(f"idle, {code}" for code in CODES)]
    grid = Grid(f"step at {rate_text(network)} per node, ms; share of it in which the network is idle", columns)
    found = {(row.code, row.method, row.tokens): row for row in rows if row.network == network}
    for tokens in TOKENS:
        for method in METHODS:
            one, beside = (found[code, method, tokens] for code in CODES)
            times = [f"{row.step_ms:.0f}" for row in (found[STOCK, STOCK, tokens], one, beside)]
            idle = [f"{row.idle_share:.0%}" for row in (one, beside)]
            grid.rows.append([f"{tokens}, {method}", *times, f"{beside.step_ms / one.step_ms:.3f}", *idle])
    return grid


DRAWN_NETWORK, DRAWN_TOKENS = "100gbit", 4096
LANES = {
    "between nodes": lambda task: NETWORK in dict(task.demands),
    "within a node": lambda task: WITHIN in dict(task.demands) and NETWORK not in dict(task.demands),
    "encode, decode, copy": lambda task: task.kind == KERNEL,
    "model": lambda task: task.kind == COMPUTE,
}


def drawing_of(step: Step) -> dict[str, list[list[float]]]:
    """Return when each lane of the plot is busy, in milliseconds from the start of the step."""
    lanes: dict[str, list[list[float]]] = {name: [] for name in LANES}
    for task, span in step.spans:
        for name, belongs in LANES.items():
            if belongs(task):
                times = (max(span.start, step.start), min(span.end, step.end))
                lanes[name].append([round(1e3 * (time - step.start), 2) for time in times])
    return lanes


def plot(drawings: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Draw the lanes of each step. All steps have the same axis of time."""
    title = (
        "Modelled, not measured: what one GPU's streams do in a step of a 7B model\n"
        f"{NODES} nodes of {RANKS_PER_NODE} H100, {rate_text(DRAWN_NETWORK)} per node, "
        f"{DRAWN_TOKENS} tokens per GPU, one micro-step"
    )
    figure, axes = panels(1, title, rows=len(drawings), width=9, height=1.7, sharex=True)
    for axis, (code, lanes) in zip(axes, drawings.items(), strict=True):
        for height, (name, spans) in zip(range(len(lanes) - 1, -1, -1), lanes.items(), strict=True):  # as in the legend
            bars = [(start, end - start) for start, end in spans]
            axis.broken_barh(bars, (height + 0.1, 0.8), color=f"C{height}", label=name)
        axis.set_yticks([])
        axis.set_title(SHOWN_CODES[code], fontsize=9)
    axes[-1].set_xlabel("ms")
    axes[-1].set_xlim(left=0)
    save(figure, path)


def main() -> None:
    """Record and simulate, or read what was, and write the JSON file, the plot and the page."""
    args = parse_args(sys.argv[1:])
    if args.from_file:
        content = json.loads(args.output.read_text())
    else:
        content = {"conditions": {"command": command_line(__file__), "versions": versions()}, **model(args.layers)}
        args.output.write_text(json.dumps(content) + "\n")
    picture = args.output.with_suffix(".png")
    plot(content["drawings"], picture)
    rows = [Row(**row) for row in content["rows"]]
    grids = [grid_of(rows, network) for network in NETWORKS]
    write_page(args.output.with_suffix(".md"), TITLE, content["conditions"], INTRO, grids, picture)
    for row in rows:
        print(*row)


def model(layers: int) -> dict[str, Any]:
    """Return the rows and the plot's drawings of all codes and methods, fit for JSON."""
    stock = record(None, layers)
    rows = rows_of(STOCK, STOCK, stock)
    drawings = {STOCK: drawing_of(step_of(stock, DRAWN_NETWORK, DRAWN_TOKENS))}
    for code, setting in CODES.items():
        for method, settings in METHODS.items():
            recording = record(settings | setting, layers)
            rows += rows_of(code, method, recording)
            if method == "default":
                drawings[code] = drawing_of(step_of(recording, DRAWN_NETWORK, DRAWN_TOKENS))
    return {"rows": [row._asdict() for row in rows], "drawings": drawings}


if __name__ == "__main__":
    main()
