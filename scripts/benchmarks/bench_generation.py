"""Tokens per second of a sharded model on the emulated cluster: stock FSDP2, HSDP, and this package.

    python scripts/benchmarks/bench_generation.py                              the whole study
    python scripts/benchmarks/bench_generation.py --rates 200mbit --variants stock balanced

Tokens are decoded greedily, with a key-value cache. Every rank generates for prompts of its own, so every token needs all
weights on every rank. Stock FSDP2 gathers them across nodes for each token; with hpZ they cross once for as long as they
do not change.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from library.cluster import Ranks
from library.links import Key, measure_cells
from library.network import rate_text, speed
from library.pages import Grid, report
from library.plots import cluster_text, log_ticks, over_rates, panels, save
from library.rounds import busiest_link_bytes, step_seconds
from library.study import Study, add_cluster_flags, crossing_bytes, make_parser, parse, require, shape_of, study_of
from library.variants import VARIANTS, shown

VARIANT_NAMES = ["compute", "stock", "hsdp", "hpz", "balanced", "lora-stock", "lora-16", "lora-8", "lora-4"]
QUICK = {
    "rates": ["100mbit"],
    "variants": ["stock", "balanced", "lora-stock", "lora-4"],
    "tokens": 4,
    "hidden_size": 256,
    "layers": 4,
}
TITLE = "Generation on an emulated cluster"
INTRO = """Greedy tokens from a Llama with random weights, sharded over all ranks, each with prompts of its own; nodes
are network namespaces of one machine. *Stock FSDP2* is Accelerate's, *HSDP* shards within the node, *hpZ alone* keeps a
16-bit secondary shard and *balanced* an 8-bit one; *no communication* runs without any collective. The *LoRA* variants put
adapters (rank 8, all linear layers) on a frozen bf16 base: under Accelerate's FSDP2, or with the base sharded within the node
and stored in 16, 8 or 4 bits. Seconds are medians per token; the prompt is not in them. Each ratio is to stock FSDP2 on the same
model. Bytes are those of the busiest node, by its interface's counters."""
FIXED = ("nodes", "ranks_per_node", "batch_size", "prompt_len", "model")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "generation.json")
    add_cluster_flags(parser, ["unlimited", "1gbit", "200mbit", "100mbit"], batch_size=1)
    parser.add_argument("--variants", nargs="+", default=VARIANT_NAMES, choices=VARIANT_NAMES)
    parser.add_argument("--tokens", type=int, default=16, help="generated per prompt, after one that is not timed")
    parser.add_argument("--prompt-len", type=int, default=32)
    return parse(parser, QUICK, argv)


def run_study(args: argparse.Namespace, study: Study) -> None:
    """Measure every rate and variant that the study lacks."""

    def arguments(name: str) -> tuple[Any, ...]:
        return VARIANTS[name], shape_of(args), args.batch_size, args.prompt_len

    def measure(ranks: Ranks, key: Key) -> dict[str, Any]:
        # The weights of a new model cross the network once in every variant, for the token that is not measured. The first of
        # the measured tokens includes the prompt, and is not in the median.
        ranks.call("generate", 1)
        measurements = ranks.call("generate", args.tokens)
        seconds = step_seconds(measurements)
        token_s = statistics.median(seconds[1:] or seconds)
        return {
            "token_s": token_s,
            "prompt_s": seconds[0],
            "tokens_per_s": args.batch_size * len(measurements) / token_s,
            "link_bytes_per_token": busiest_link_bytes([measurements], args.ranks_per_node) / len(seconds),
        }

    keys = [{"rate": rate, "variant": name} for rate in args.rates for name in args.variants]
    served = "library.generation_run:GenerationRun"
    measure_cells(study, keys, lambda key: key["variant"], served, arguments, measure)


def stock_of(variant: str) -> str:
    """Return the stock variant with the same kind of model."""
    return "lora-stock" if variant.startswith("lora") else "stock"


def token_grid(study: Study, rate: str) -> Grid:
    """Make the table of one rate, with a row per variant."""
    model_bytes = crossing_bytes(study.conditions)
    rows = []
    for cell in study.rows("cells", rate=rate):
        stock = study.find("cells", rate=rate, variant=stock_of(cell["variant"]))
        sent = cell["link_bytes_per_token"]
        row = {"variant": shown(cell["variant"]), "s per token": f"{cell['token_s']:.4f}"}
        row |= {"tokens/s, all ranks": f"{cell['tokens_per_s']:.2f}"}
        row |= {"x stock": f"{stock['token_s'] / cell['token_s']:.2f}" if stock else ""}
        rows.append(row | {"link MB per token": f"{sent / 1e6:.3f}", "in M": f"{sent / model_bytes:.3f}"})
    return Grid.of(f"generation, {rate_text(rate)}", rows)


def plot(study: Study, path: Path) -> None:
    """Draw tokens per second over the link's rate, one line per variant: whole models in one panel, LoRA in another."""
    batch, prompt = study.conditions["batch_size"], study.conditions["prompt_len"]
    prompts = f"{batch} prompt{'s' if batch > 1 else ''} of {prompt} tokens per rank"
    figure, axes = panels(2, f"Greedy generation, {prompts}\n{cluster_text(study.conditions)}", sharey=True)
    for axis, title, is_lora in zip(axes, ("without LoRA", "with LoRA"), (False, True), strict=True):
        cells = [cell for cell in study.rows("cells") if cell["variant"].startswith("lora") is is_lora]
        if cells:
            over_rates(axis, cells, lambda cell: cell["tokens_per_s"])
            axis.set_title(title, fontsize=9)
            log_ticks(axis, (1, 2, 5, 10, 20, 50, 100))
    axes[0].set_ylabel("tokens per second, all ranks")
    save(figure, path)


def check_direction(study: Study, args: argparse.Namespace) -> None:
    """End with an error where a result of the quick form has the wrong direction, at the lowest rate."""
    rate = min(args.rates, key=speed)
    claims = {}
    for name in ("balanced", "lora-4"):
        ours, stock = (study.find("cells", rate=rate, variant=variant) for variant in (name, stock_of(name)))
        sent, stock_sent = ours["link_bytes_per_token"], stock["link_bytes_per_token"]
        claims[f"{name} generates faster than stock at {rate}"] = ours["token_s"] < stock["token_s"]
        claims[f"no weights of {name} cross the network"] = sent < 0.01 * stock_sent
    require(claims)


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    study = study_of(args, __file__, FIXED, run_study)
    report(study, TITLE, INTRO, [token_grid(study, rate) for rate in args.rates], plot)
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
