"""What do ZeRO++ and its presets cost in loss, beside stock FSDP2: from scratch, in fine-tuning, with LoRA, in DPO?

    python scripts/benchmarks/bench_losses.py
    python scripts/benchmarks/bench_losses.py --tasks fine-tuning --seeds 0 --rates 1e-5
    python scripts/benchmarks/bench_losses.py --model runs/smollm2 --tasks fine-tuning --output runs/real_model.json

A model is trained from scratch, or goes on from a checkpoint that was trained on source code: to English documentation, to LoRA
adapters for it, or to a preference for it. A seed sets the order of the text, and from scratch the weights, the same for every
variant. Runs are on 2 nodes x 2 ranks at full network speed, and nothing is timed. Differences to stock are taken within a seed,
and intervals are those of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from library.cluster import Cluster, Ranks
from library.pages import Grid, report
from library.plots import colors_of, model_text, panels, save
from library.study import Study, make_parser, parse, rank_environment, require, shape_of, study_of
from library.text import SERVED, checkpoint_of
from library.variants import LOSS_VARIANTS, Recipe, shown

WHOLE_MODEL = (
    "stock",
    "balanced",
    "half_model",
    "min_traffic",
    "exact",
    "exact, 3-bit gradients",
    "paper",
    "balanced, native node hops",
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A part of the study, in which models learn one thing.

    Attributes:
        title: in tables.
        rates: learning rates of AdamW.
        variants: the first is the one with which the others are compared.
        recipe: fields of ``Recipe`` that are its own.
        checkpoint: whether it goes on from the checkpoint.
        length: its steps, as a multiple of those on the command line.
    """

    title: str
    rates: tuple[float, ...]
    variants: tuple[str, ...]
    recipe: dict[str, Any]
    checkpoint: bool = True
    length: int = 1


_GOES_ON = {"warmup": None, "text": "documentation"}
_LORA = ("lora-stock", "lora-4", "lora-4, half_model", "lora-4, min_traffic", "lora-4, exact")
TASKS = {
    "scratch": Task("from scratch", (1e-3,), (*WHOLE_MODEL, "unblocked"), {}, checkpoint=False, length=2),
    "fine-tuning": Task("fine-tuning", (1e-6, 1e-5, 1e-4, 1e-3), WHOLE_MODEL, _GOES_ON),
    "lora": Task("LoRA", (1e-3,), _LORA, _GOES_ON | {"adapters": True}),
    "dpo": Task("DPO", (1e-5,), WHOLE_MODEL[:5], _GOES_ON | {"preferences": True, "batch_size": 2}),
}
QUICK = {
    "tasks": ["scratch", "fine-tuning"],
    "rates": [1e-3],
    "variants": ["stock", "balanced", "half_model", "min_traffic", "exact"],
    "seeds": [0],
    "steps": 10,
    "pretraining": 20,
    "hidden_size": 128,
    "layers": 2,
}
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5 % point of Student's t by the number of seeds."""

TITLE = "The loss of each preset beside stock FSDP2"
INTRO = """A Llama is trained on the source code of Python's standard library from scratch, with a schedule. Another such model,
trained for {pretraining} steps, is the checkpoint from which the other tasks go on, at a constant learning rate
without warm-up: *fine-tuning* to the English of Python's language reference, *LoRA* of rank 8 for the same text, on a
base in bf16 (stock FSDP2) or in 4 bits, and *DPO* (beta 0.1), which is to prefer the text's own continuations to
those of other places. Every tenth module or topic is held out for validation.

2 nodes x 2 ranks, fp32 masters, bf16 compute, AdamW (betas 0.9 and 0.95, weight decay 0.1), steps of {tokens} tokens
(DPO: {pairs} pairs). A seed sets the order of the text, and from scratch the weights, the same for every variant.
Differences are taken within a seed; brackets hold the mean's 95 % interval by Student's t over the seeds. **Bold**:
the interval excludes stock, so the difference is real. *Progress* is what a run takes off the validation loss, over
what stock takes off. `paper` is ZeRO++ as published (INT8 weights, INT4 gradients in both hops); *native node hops*
leave 16 bits within the node, the default on accelerators; *one scale per shard* is the paper's negative control.
Bytes are counted by the package (scales, sizes and padding included), as means over all steps but the first, in M,
the model in bf16 times (Y-1)/Y for Y nodes."""
FIXED = ("recipe", "pretraining")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "losses.json")
    parser.set_defaults(hidden_size=384, layers=2)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rates", nargs="+", type=float, help="only these of each task's learning rates")
    parser.add_argument("--variants", nargs="+", choices=list(LOSS_VARIANTS), help="only these of each task's")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60, help="of a run; one from scratch has twice as many")
    parser.add_argument(
        "--model", help="fine-tune this pretrained model, such as runs/smollm2, to docstrings of PyTorch"
    )
    parser.add_argument("--pretraining", type=int, default=400, help="steps before the checkpoint")
    return parse(parser, QUICK, argv)


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study) -> None:
    """Make the checkpoint, and run every task, rate, variant and seed that the study lacks.

    Seeds are the outer loop, so that a study that is stopped has complete comparisons for some seeds.
    """
    wanted = [
        {"task": name, "rate": rate, "variant": variant, "seed": seed}
        for seed in args.seeds
        for name in args.tasks
        for rate in TASKS[name].rates
        for variant in TASKS[name].variants
        if (not args.rates or rate in args.rates) and (not args.variants or variant in args.variants)
    ]
    if not (missing := study.missing("runs", wanted)):
        return
    recipe = recipe_of(args)
    pretraining = args.pretraining if any(TASKS[key["task"]].checkpoint for key in missing) else 0
    with (
        Cluster(2, 2, rank_environment(threads=1)) as cluster,
        checkpoint_of(cluster, dataclasses.replace(recipe, batch_size=4), pretraining) as (files, checkpoint),
    ):
        for key in missing:
            print(*key.values(), sep=", ", flush=True)
            task = TASKS[key["task"]]
            steps = args.steps * task.length
            own = dataclasses.replace(recipe, **task.recipe, steps=steps, learning_rate=key["rate"])
            # Behind a checkpoint seeds are others than the checkpoint's, so that no run sees its batches again.
            seed, weights = (key["seed"] + 1000, checkpoint) if task.checkpoint else (key["seed"], None)
            with cluster.start(SERVED, key["variant"], seed, own, files, weights) as ranks:
                study.add("runs", key | train(ranks, steps))


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings of the checkpoint, over which those of a task go."""
    return Recipe(shape_of(args), args.steps, batch_size=1, learning_rate=1e-3, model=args.model)


def train(ranks: Ranks, steps: int) -> dict[str, Any]:
    """Train one run to its end, and return its row: losses at the start, in the middle and at the end, and bytes."""
    curve: dict[str, list[float]] = {"step": [0], "validation": [ranks.call("evaluate")[0]]}
    for upto in (round(steps / 2), steps):
        sent, *_ = ranks.call("train", upto - curve["step"][-1])
        curve["step"].append(upto)
        curve["validation"].append(ranks.call("evaluate")[0])
    return {"start": curve["validation"][0], "final": curve["validation"][-1], **sent, "curve": curve}


# --------------------------------------------------------------------------------------------------------------- report


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over seeds with the bounds of its 95 % interval. With one seed they are infinite."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of the mean of normally distributed values."""
        mean = statistics.mean(values)
        num = len(values)
        half = STUDENT_T[num] * statistics.stdev(values) / math.sqrt(num) if num in STUDENT_T else math.inf
        return cls(mean, mean - half, mean + half)

    def text(self, form: Callable[[float], str], exact: float) -> str:
        """Return mean and bounds; bold where they exclude ``exact``."""
        if math.isinf(self.low):
            return form(self.mean)
        shown = f"{form(self.mean)} [{form(self.low)}, {form(self.high)}]"
        return shown if self.low <= exact <= self.high else f"**{shown}**"


@dataclasses.dataclass(frozen=True)
class Cell:
    """The runs of a task with one variant at one learning rate.

    Attributes:
        rate: of learning.
        variant: how ranks communicate.
        pairs: one run per seed, each with stock's of the same seed.
    """

    rate: float
    variant: str
    pairs: list[tuple[dict[str, Any], dict[str, Any]]]

    @property
    def change(self) -> Interval:
        """By how much the final losses exceed stock's, relative."""
        return Interval.of([run["final"] / stock["final"] - 1 for run, stock in self.pairs])

    @property
    def progress(self) -> Interval:
        """The fall of the loss in these runs, as a part of the fall in stock's.

        Both start at stock's first loss, so a loss that is higher at once, as with packed weights, counts against the runs.
        """
        return Interval.of(
            [(stock["start"] - run["final"]) / (stock["start"] - stock["final"]) for run, stock in self.pairs]
        )

    @property
    def finals(self) -> list[float]:
        """The losses at the end."""
        return [run["final"] for run, _ in self.pairs]

    @property
    def sent(self) -> float | None:
        """The bytes of weights and gradients across nodes in a step, of M; None for FSDP2's own, which were not counted."""
        run, _ = self.pairs[0]
        return None if run["weights"] is None else run["weights"] + run["gradients"]


def cells_of(study: Study, name: str) -> list[Cell]:
    """Return the cells of a task that were measured, in the order of learning rates and variants."""
    task, cells = TASKS[name], []
    for rate, variant in itertools.product(task.rates, task.variants):
        runs = study.rows("runs", task=name, rate=rate, variant=variant)
        stock = {run["seed"]: run for run in study.rows("runs", task=name, rate=rate, variant=task.variants[0])}
        if pairs := [(run, stock[run["seed"]]) for run in runs if run["seed"] in stock]:
            cells.append(Cell(rate, variant, pairs))
    return cells


def loss_grid(study: Study, name: str) -> Grid:
    """Make the table of a task: losses, differences to stock, progress and bytes, by learning rate and variant."""
    rows = []
    for cell in cells_of(study, name):
        is_stock, several = cell.variant == TASKS[name].variants[0], len(cell.pairs) > 1
        row = {"rate, variant": f"{cell.rate:g}, {shown(cell.variant)}", "seeds": str(len(cell.pairs))}
        row |= {"loss": f"{statistics.mean(cell.finals):.4f}"}
        row |= {"std over seeds": f"{statistics.stdev(cell.finals):.4f}" if several else ""}
        row |= {"loss to stock": "" if is_stock else cell.change.text("{:+.3%}".format, 0.0)}
        row |= {"progress": "" if is_stock else cell.progress.text("{:.1%}".format, 1.0)}
        rows.append(row | {"bytes, M": f"{cell.sent:.3f}" if cell.sent is not None else ""})
    return Grid.of(f"{TASKS[name].title}: validation loss at the end", rows)


def plot(study: Study, path: Path) -> None:
    """Draw the progress of fine-tuning and its bytes over the learning rate, and losses from scratch beside stock's."""
    conditions = f"{model_text(study.conditions['recipe']['shape'])}, 2 nodes x 2 ranks, one micro-step"
    title = f"Loss of each preset beside stock FSDP2: mean over seeds, and its 95 % interval\n{conditions}"
    figure, axes = panels(3, title)
    learned, bytes_sent, above = axes
    for variant, color in colors_of(WHOLE_MODEL[1:]).items():
        style = {"color": color, "marker": "o", "label": shown(variant)}
        tuned = [cell for cell in cells_of(study, "fine-tuning") if cell.variant == variant]
        rates, shares = [cell.rate for cell in tuned], [cell.progress for cell in tuned]
        half = [100 * (share.high - share.mean) if math.isfinite(share.high) else 0.0 for share in shares]
        learned.errorbar(rates, [100 * share.mean for share in shares], half, capsize=3, **style)
        bytes_sent.plot(rates, [cell.sent for cell in tuned], **style)
        for cell in (cell for cell in cells_of(study, "scratch") if cell.variant == variant):
            above.plot(cell.pairs[0][0]["curve"]["step"], curve_above_stock(cell), **style)
    learned.set(xlabel="learning rate of fine-tuning", ylabel="% of stock's progress", xscale="log")
    bytes_sent.set(
        xlabel="learning rate of fine-tuning", ylabel="bytes across nodes in a step, of M (stock: 3)", xscale="log"
    )
    bytes_sent.set_ylim(bottom=0)
    above.set(xlabel="step, from scratch", ylabel="loss, % above stock FSDP2, same seed")
    for axis, exact in ((learned, 100), (above, 0)):
        axis.axhline(exact, color="black", linewidth=1, label=shown("stock"))
    save(figure, path)


def curve_above_stock(cell: Cell) -> list[float]:
    """Return by how many per cent the loss exceeds stock's at each point of the curves, as means over seeds."""
    curves = [[one["curve"]["validation"] for one in pair] for pair in cell.pairs]
    points = [[100 * (ours / its - 1) for ours, its in zip(*pair, strict=True)] for pair in curves]
    return [statistics.mean(point) for point in zip(*points, strict=True)]


def check_direction(study: Study) -> None:
    """End with an error where a result of the quick form has the wrong direction."""
    claims = {}
    for name in ("scratch", "fine-tuning"):
        for cell in cells_of(study, name):
            run, _ = cell.pairs[0]
            claims[f"{cell.variant} learns, {name}"] = run["final"] < run["start"]
            claims[f"{cell.variant} stays within 3 % of stock, {name}"] = abs(cell.change.mean) < 0.03
    sent = {cell.variant: cell.sent for cell in cells_of(study, "scratch")}
    claims["half a model crosses"] = 0.5 < sent["half_model"] < 0.56
    claims["three eighths of a model cross"] = 0.375 < sent["min_traffic"] < 0.44
    claims["words that changed are fewer bytes than the model"] = 0.25 < sent["exact"] < 1.3
    require(claims)


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    study = study_of(args, __file__, FIXED, run_study, recipe=dataclasses.asdict(recipe_of(args)))
    found = study.conditions["recipe"]
    intro = INTRO.format(
        pretraining=study.conditions["pretraining"],
        tokens=4 * found["batch_size"] * found["seq_len"],
        pairs=4 * TASKS["dpo"].recipe["batch_size"],
    )
    report(study, TITLE, intro, [loss_grid(study, name) for name in TASKS], plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
