"""What do ZeRO++ and its presets cost in loss, beside stock FSDP2: from scratch, in fine-tuning, with LoRA, in DPO?

    python scripts/benchmarks/bench_losses.py
    python scripts/benchmarks/bench_losses.py --tasks fine-tuning --seeds 0 --rates 1e-5

A model is trained from scratch, or goes on from a checkpoint that was trained on source code: to English documentation, to LoRA
adapters for it, or to a preference for it. A seed sets the order of the text, and from scratch the weights, the same for every
variant. Runs are on 2 nodes x 2 ranks at full network speed, and nothing is timed. Differences to stock are taken within a seed,
and intervals are those of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

from library.cluster import Cluster
from library.losses import Cell, Task, bytes_over_rates, cells_of, keys_of, loss_grid, progress_over_rates, train
from library.pages import report
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


_GOES_ON = {"warmup": None, "text": "documentation"}
_LORA = ("lora-stock", "lora-4", "lora-4, half_model", "lora-4, min_traffic", "lora-4, exact")
TASKS = {
    "scratch": Task("from scratch", (1e-3,), (*WHOLE_MODEL, "unblocked"), {}, checkpoint=False, length=2),
    "fine-tuning": Task("fine-tuning", (1e-6, 1e-5, 1e-4, 1e-3), WHOLE_MODEL, _GOES_ON),
    "lora": Task("LoRA", (1e-3,), _LORA, _GOES_ON | {"adapters": 8}),
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
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="only these of each task's learning rates")
    parser.add_argument(
        "--variants", nargs="+", default=[], choices=list(LOSS_VARIANTS), help="only these of each task's"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60, help="of a run; one from scratch has twice as many")
    parser.add_argument("--pretraining", type=int, default=400, help="steps before the checkpoint")
    return parse(parser, QUICK, argv)


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study) -> None:
    """Make the checkpoint, and run every task, rate, variant and seed that the study lacks."""
    wanted = keys_of(TASKS, args.tasks, args.seeds, args.rates, args.variants)
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
            steps = round(args.steps * task.length)
            own = dataclasses.replace(recipe, **task.recipe, steps=steps, learning_rate=key["rate"])
            # Behind a checkpoint seeds are others than the checkpoint's, so that no run sees its batches again.
            seed, weights = (key["seed"] + 1000, checkpoint) if task.checkpoint else (key["seed"], None)
            with cluster.start(SERVED, key["variant"], seed, own, files, weights) as ranks:
                study.add("runs", key | train(ranks, steps))


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings of the checkpoint, over which those of a task go."""
    return Recipe(shape_of(args), args.steps, batch_size=1, learning_rate=1e-3)


# --------------------------------------------------------------------------------------------------------------- report


def plot(study: Study, path: Path) -> None:
    """Draw the progress of fine-tuning and its bytes over the learning rate, and losses from scratch beside stock's."""
    conditions = f"{model_text(study.conditions['recipe']['shape'])}, 2 nodes x 2 ranks, one micro-step"
    title = f"Loss of each preset beside stock FSDP2: mean over seeds, and its 95 % interval\n{conditions}"
    figure, axes = panels(3, title)
    learned, bytes_sent, above = axes
    tuned = [cell for cell in cells_of(study, "fine-tuning", TASKS["fine-tuning"]) if cell.variant != "stock"]
    progress_over_rates(learned, tuned)
    bytes_over_rates(bytes_sent, tuned)
    for cell in cells_of(study, "scratch", TASKS["scratch"]):
        if cell.variant in WHOLE_MODEL[1:]:
            color = colors_of(WHOLE_MODEL[1:])[cell.variant]
            steps = cell.pairs[0][0]["curve"]["step"]
            above.plot(steps, curve_above_stock(cell), color=color, marker="o", label=shown(cell.variant))
    above.set(xlabel="step, from scratch", ylabel="loss, % above stock FSDP2, same seed")
    above.axhline(0, color="black", linewidth=1, label=shown("stock"))
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
        for cell in cells_of(study, name, TASKS[name]):
            run, _ = cell.pairs[0]
            claims[f"{cell.variant} learns, {name}"] = run["final"] < run["start"]
            claims[f"{cell.variant} stays within 3 % of stock, {name}"] = abs(cell.change.mean) < 0.03
    sent = {cell.variant: cell.sent for cell in cells_of(study, "scratch", TASKS["scratch"])}
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
    report(study, TITLE, intro, [loss_grid(study, name, task) for name, task in TASKS.items()], plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
