"""How much less does a trained language model learn under each preset than with stock FSDP2, and on a LoRA base of few bits?

    bash scripts/real_model.sh
    python scripts/benchmarks/bench_real_model.py
    python scripts/benchmarks/bench_real_model.py --tasks fine-tuning --rates 1e-5 --seeds 0 --variants stock balanced

The model is fine-tuned to docstrings of PyTorch on 2 nodes x 2 ranks at full network speed, and nothing is timed. A seed sets the
order of the text, the same for every variant. Differences to stock are taken within a seed. The variant ``lora-nf4`` needs
bitsandbytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from library import real_model
from library.cluster import Cluster, Ranks
from library.losses import Interval, Task, bytes_over_rates, cells_of, keys_of, progress_over_rates, train
from library.pages import Grid, report
from library.plots import panels, save
from library.study import Key, Study, make_continued_parser, parse, rank_environment, require, study_of
from library.text import SERVED, write_tokens_of
from library.variants import ModelShape, Recipe, shown
from tqdm import tqdm

PRESETS = ("stock", "balanced", "exact", "half_model", "min_traffic", "paper")
LORA = ("lora-stock", "lora-8", "lora-4", "lora-nf4")
TASKS = {
    "fine-tuning": Task("Fine-tuning", (1e-6, 1e-5, 1e-4), PRESETS, {}),
    "longer": Task("Fine-tuning", (1e-5,), PRESETS[:3], {}, length=2.5),
    "lora": Task("LoRA of rank 16", (2e-4,), LORA, {"adapters": 16}, length=5),
}
ANSWERING = {"task": "longer", "seed": 0}
"""Runs whose models answer the prompts at the end."""
PROMPTS = [
    "What is a process group in PyTorch?",
    "What does torch.nn.Linear compute?",
    "Write a Python function that reverses a list.",
    "What is the capital of Norway?",
]
QUICK = {
    "tasks": ["fine-tuning"],
    "rates": [1e-5],
    "variants": ["stock", "balanced"],
    "seeds": [0],
    "steps": 2,
    "num_validation": 8,
}
TITLE = "The loss of a trained language model under each preset, beside stock FSDP2"
INTRO = """The model in {model} is trained on docstrings of the installed PyTorch (`torch.distributed`, `torch.nn`, `torch.optim`,
`torch.utils`); those of every tenth module are validation text. 2 nodes x 2 ranks, fp32 masters, bf16
compute, AdamW (betas 0.9 and 0.95, weight decay 0.1) at a constant rate without warm-up, steps of {tokens} tokens. LoRA trains
all linear layers, on a base in 16 (stock FSDP2), 8 or 4 bits, or in bitsandbytes' NF4 under DDP.

A seed sets the order of the text, the same for every variant. Differences are taken within a seed; brackets hold the mean's 95 %
interval by Student's t over the seeds, and **bold** says that it excludes stock. *Progress* is what a run takes off the
validation loss, over what stock takes off. It is measured twice: *as it trains*, with the weights as ranks gather them, and *as
saved*, with the weights that the user keeps, in bf16 on one process. Both count from stock's first loss. *Words that change* are
the bf16 weights that the last step changed, *zero blocks* the blocks of 128 gradients of that step that are all zero. Bytes are
counted by the package (scales, sizes and padding included), as means over all steps but the first, in M, the model in bf16
times (Y-1)/Y for Y nodes."""
FIXED = ("model", "recipe")
SHARED = ("steps", "batch_size", "seq_len", "num_validation")
"""The fields of the recipe that all runs share."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_continued_parser(__doc__, "real_model.json")
    parser.add_argument("--model", default=str(real_model.FOLDER), help="a folder in the clone, or a name on a hub")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="only these of each task's learning rates")
    parser.add_argument(
        "--variants", nargs="+", default=[], choices=[*PRESETS, *LORA], help="only these of each task's"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, default=40, help="of a run; longer ones have 2.5 times as many, those of LoRA 5"
    )
    parser.add_argument("--num-validation", type=int, default=64, help="sequences on which the loss is measured")
    return parse(parser, QUICK, argv)


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study) -> None:
    """Run every task, rate, variant and seed that the study lacks."""
    missing = study.missing("runs", keys_of(TASKS, args.tasks, args.seeds, args.rates, args.variants))
    if not missing:
        return
    recipe = recipe_of(args)
    with Cluster(2, 2, rank_environment(threads=1)) as cluster, tempfile.TemporaryDirectory(dir="/run") as folder:
        files = write_tokens_of(Path(folder), args.model)
        cluster.set_link()
        for key in (progress := tqdm(missing, desc="runs")):
            progress.set_postfix_str(", ".join(map(str, key.values())))
            task = TASKS[key["task"]]
            steps = round(args.steps * task.length)
            own = dataclasses.replace(recipe, **task.recipe, steps=steps, learning_rate=key["rate"])
            with cluster.start(SERVED, key["variant"], key["seed"], own, files) as ranks:
                study.add("runs", key | run_of(ranks, key, steps))


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings that all runs share."""
    return Recipe(
        ModelShape(),
        args.steps,
        batch_size=1,
        learning_rate=1e-5,
        warmup=None,
        num_validation=args.num_validation,
        model=args.model,
    )


def run_of(ranks: Ranks, key: Key, steps: int) -> dict[str, Any]:
    """Train one run to its end, and return its row."""
    row = train(ranks, steps)
    if key["task"] == "lora":
        return row
    prompts = PROMPTS if ANSWERING.items() <= key.items() else []
    return row | ranks.call("saved", prompts)[0]


# --------------------------------------------------------------------------------------------------------------- report


def title_of(study: Study, name: str) -> str:
    """Return the title of a task's table."""
    task = TASKS[name]
    return f"{task.title}: {round(study.conditions['recipe']['steps'] * task.length)} steps"


def tuning_grid(study: Study, name: str) -> Grid:
    """Make the table of a task in which the whole model is trained, by learning rate and variant."""
    rows = []
    for cell in cells_of(study, name, TASKS[name]):
        is_stock = cell.variant == "stock"
        runs = [run for run, _ in cell.pairs]
        row = {"rate, variant": f"{cell.rate:g}, {shown(cell.variant)}", "seeds": str(len(runs))}
        row |= {"loss, saved": f"{statistics.mean(run['saved'] for run in runs):.4f}"}
        for title, loss in (("progress, as it trains", "final"), ("progress, as saved", "saved")):
            row |= {title: "" if is_stock else cell.progress(loss).text("{:.1%}".format, 1.0)}
        for title, figure in (("words that change", "changed"), ("zero blocks", "zero_blocks")):
            row |= {title: f"{statistics.mean(run[figure] for run in runs):.1%}"}
        rows.append(row | {"bytes, M": f"{cell.sent:.3f}" if cell.sent is not None else ""})
    return Grid.of(title_of(study, name), rows)


def lora_grid(study: Study) -> Grid:
    """Make the table of LoRA, by the base."""
    rows = []
    for cell in cells_of(study, "lora", TASKS["lora"]):
        start, final = (statistics.mean(run[name] for run, _ in cell.pairs) for name in ("start", "final"))
        falls = [(run["start"] - run["final"]) / (stock["start"] - stock["final"]) for run, stock in cell.pairs]
        is_stock = cell.variant == "lora-stock"
        row = {"base": shown(cell.variant), "seeds": str(len(cell.pairs))}
        row |= {"loss at start": f"{start:.4f}", "at end": f"{final:.4f}"}
        row |= {"progress": "" if is_stock else cell.progress().text("{:.1%}".format, 1.0)}
        row |= {"from its own start": "" if is_stock else Interval.of(falls).text("{:.1%}".format, 1.0)}
        rows.append(row | {"bytes, M": f"{cell.sent:.3f}" if cell.sent is not None else ""})
    return Grid.of(f"{title_of(study, 'lora')} at {TASKS['lora'].rates[0]:g}", rows)


def answers_grid(study: Study) -> Grid:
    """Make the table of what models answer, by prompt and variant."""
    rows = study.rows("runs", **ANSWERING)
    shown_rows = [
        {"prompt": prompt, "variant": shown(row["variant"]), "answer": " ".join(row["answers"][i].split())}
        for i, prompt in enumerate(PROMPTS)
        for row in rows
    ]
    return Grid.of("Answers, greedy, behind the longer runs", shown_rows)


def plot(study: Study, path: Path) -> None:
    """Draw the progress of fine-tuning, as it trains and as saved, and its bytes, over the learning rate."""
    conditions = f"{Path(study.conditions['model']).name}, 2 nodes x 2 ranks, one micro-step"
    title = (
        f"A trained model under each preset beside stock FSDP2: mean over seeds, and its 95 % interval\n{conditions}"
    )
    figure, (trains, saved, sent) = panels(3, title)
    name = "fine-tuning" if study.rows("runs", task="fine-tuning") else "longer"
    cells = [cell for cell in cells_of(study, name, TASKS[name]) if cell.variant != "stock"]
    progress_over_rates(trains, cells, "final")
    progress_over_rates(saved, cells, "saved")
    bytes_over_rates(sent, cells)
    trains.set_title("as it trains", fontsize=9)
    saved.set_title("as saved", fontsize=9)
    save(figure, path)


def check_direction(study: Study) -> None:
    """End with an error where a result of the quick form has the wrong direction."""
    claims = {}
    for cell in cells_of(study, "fine-tuning", TASKS["fine-tuning"]):
        run, _ = cell.pairs[0]
        claims[f"{cell.variant} learns"] = run["saved"] < run["start"]
        claims[f"{cell.variant} stays within 1 % of stock"] = abs(cell.change.mean) < 0.01
    require(claims)


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    recipe = {name: value for name, value in dataclasses.asdict(recipe_of(args)).items() if name in SHARED}
    study = study_of(args, __file__, FIXED, run_study, recipe=recipe)
    recipe = study.conditions["recipe"]
    intro = INTRO.format(model=study.conditions["model"], tokens=4 * recipe["batch_size"] * recipe["seq_len"])
    grids = [tuning_grid(study, "fine-tuning"), tuning_grid(study, "longer"), lora_grid(study), answers_grid(study)]
    report(study, TITLE, intro, grids, plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
