"""What do SFT, DPO and GRPO of the examples send across nodes with exact weights, and what do they learn, beside the presets?

    python scripts/benchmarks/bench_examples.py
    python scripts/benchmarks/bench_examples.py --tasks "SFT at 1e-05" --variants stock exact

The scripts in ``examples`` run as they are under ``hf-zeropp launch``, in four CPU processes as two nodes of two ranks at full
network speed. SFT and DPO go on from a checkpoint that the SFT example made. Nothing is timed. Losses, rewards and bytes are
those that the Trainer logs.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from library.launches import CONFIG, launch
from library.pages import Grid, report
from library.plots import panels, save
from library.study import ROOT, Study, make_parser, study_of
from library.variants import LOSS_VARIANTS, shown
from rich.progress import Progress

CROSS_NODE = "zeropp/cross_node_gb_per_step"
SETTINGS = {name: LOSS_VARIANTS[name] for name in ("stock", "balanced", "half_model", "min_traffic", "exact")}


class Task(NamedTuple):
    """An example with its flags, and the figure beside the loss by which its progress is told.

    Attributes:
        script: in ``examples``.
        flags: on its command line. ``{sft}`` and ``{lines}`` stand for the paths of the two checkpoints.
        progress: a key of the Trainer's logs.
    """

    script: str
    flags: str
    progress: str


TRL = "--fsdp --fsdp_config {fsdp} --lr_scheduler_type constant --model {sft} --max_steps 40 --logging_steps 5"
TASKS = {
    "SFT at 1e-05": Task("sft_trl.py", f"{TRL} --learning_rate 1e-5", "mean_token_accuracy"),
    "SFT at 0.0001": Task("sft_trl.py", f"{TRL} --learning_rate 1e-4", "mean_token_accuracy"),
    "DPO at 1e-06": Task("dpo_trl.py", f"{TRL} --learning_rate 1e-6", "rewards/accuracies"),
    "GRPO with LoRA at 0.003": Task("grpo_lora.py", "--base {lines} --max_steps 20 --logging_steps 4", "reward"),
}
FEWER_VARIANTS = {"GRPO with LoRA at 0.003": ("balanced", "exact")}
"""Stock FSDP2 cannot train adapters on a base packed in INT4, and the other presets are about weights that are trained whole."""
TITLE = "SFT, DPO and GRPO with exact weights"
INTRO = """The scripts in `examples` run as they are, with TRL's trainers, on 2 nodes x 2 gloo ranks, in bf16 over fp32 masters.
SFT (docstrings of the standard library) and DPO (full weights and a reference model) go on from a checkpoint that `sft_trl.py`
made in {pretraining} steps, at a constant learning rate; GRPO trains adapters on a base packed in INT4. M is a third of what
ZeRO-3 would send across nodes: the weights in 16 bits times (Y-1)/Y for Y nodes, and for GRPO the base as well. Bytes are the
package's own count, from the Trainer's logs: the first part of the run, which begins with whole weights, is not in the mean.
Stock FSDP2 sends at least 3 M; that figure is computed. Loss and progress (token accuracy for SFT, reward accuracy for DPO,
mean reward for GRPO) are those of the last part of the run."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "examples.json", has_model=False)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--variants", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--pretraining", type=int, default=150, help="steps of the SFT example before the checkpoint")
    return parser.parse_args(argv)


def run_example(script: str, flags: list[str], settings: dict[str, Any] | None, folder: Path) -> list[dict[str, Any]]:
    """Run an example, and return the Trainer's logs, and behind them the bytes of 3 M that its table shows."""
    config = "cpu_lora_2_nodes_x_2_ranks.yaml" if script == "grpo_lora.py" else CONFIG
    command = [str(ROOT / "examples" / script), *flags, "--disable_tqdm", "true"]
    lines = launch(command, settings, folder, config=config).splitlines()
    logs = [ast.literal_eval(line) for line in lines if line.startswith("{'") and "'grad_norm'" in line]
    whole = [line.split("│")[4] for line in lines if line.startswith("│ ZeRO-3")]
    return [
        {key: float(value) for key, value in log.items()} | {"whole_mb": float(whole[0]) if whole else 0}
        for log in logs
    ]


def row_of(task: Task, logs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run sent and learned: ``share`` of M over its parts, the last loss, the last progress."""
    model_mb = logs[0]["whole_mb"] / 3
    shares = [1000 * log[CROSS_NODE] / model_mb for log in logs] if model_mb else []
    return {
        "loss": logs[-1]["loss"],
        "progress": logs[-1][task.progress],
        "began": logs[0][task.progress],
        "shares": [round(share, 4) for share in shares],
    }


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Make the checkpoints, and run every task and variant that the study lacks."""
    wanted = [
        (task, name)
        for task in args.tasks
        for name in args.variants
        if name in FEWER_VARIANTS.get(task, SETTINGS) and study.find("runs", task=task, variant=name) is None
    ]
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = {"sft": folder / "sft", "lines": folder / "lines", "fsdp": folder / "fsdp.json"}
        zeropp = {"reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT", "zeropp": True}
        paths["fsdp"].write_text(json.dumps(zeropp))
        bar = progress.add_task("making the checkpoint", total=len(wanted))
        if any(TASKS[task].script != "grpo_lora.py" for task, _ in wanted):
            flags = f"--fsdp --fsdp_config {paths['fsdp']} --max_steps {args.pretraining} --output_dir {paths['sft']}"
            run_example("sft_trl.py", flags.split(), None, folder)
        for task, name in wanted:
            progress.update(bar, description=f"{task}, {name}")
            flags = [*TASKS[task].flags.format(**paths).split(), "--output_dir", str(folder / "out")]
            logs = run_example(TASKS[task].script, flags, SETTINGS[name], folder)
            study.add("runs", {"task": task, "variant": name, **row_of(TASKS[task], logs)})
            progress.advance(bar)


def result_grid(study: Study) -> Grid:
    """Make the table of bytes, losses and progress by task and variant."""
    columns = ("task", "variant", "of M in a step", "first part → last", "loss", "progress", "in the first part")
    grid = Grid("Bytes across nodes, loss and progress", columns)
    for run in sorted(study.rows("runs"), key=lambda run: list(TASKS).index(run["task"])):
        shares = run["shares"]
        sent = (
            [f"{sum(shares[1:]) / len(shares[1:]):.3f}", f"{shares[1]:.3f} → {shares[-1]:.3f}"] if shares else ["3", ""]
        )
        grid.rows.append(
            [run["task"], shown(run["variant"]), *sent, *(f"{run[key]:.4f}" for key in ("loss", "progress", "began"))]
        )
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw the bytes of each task over the parts of its run, one line per variant."""
    tasks = list(dict.fromkeys(run["task"] for run in study.rows("runs")))
    title = "Bytes across nodes in a step, of M\nthe scripts in examples, 2 nodes x 2 ranks, one micro-step per step"
    figure, axes = panels(len(tasks), title, width=3, height=3, sharey=True)
    for axis, task in zip(axes, tasks, strict=True):
        for run in study.rows("runs"):
            if run["task"] == task and run["shares"]:
                parts, color = range(2, len(run["shares"]) + 1), f"C{list(SETTINGS).index(run['variant'])}"
                axis.plot(parts, run["shares"][1:], color=color, marker=".", label=shown(run["variant"]))
        axis.set_title(f"{task.replace(' at ', ', learning rate ')}", fontsize=9)
        axis.set_xlabel("part of the run")
    axes[0].set_ylabel("bytes across nodes in a step, of M")
    save(figure, path)


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    conditions = {"pretraining": args.pretraining}
    study = study_of(args, __file__, conditions, tuple(conditions), run_study, on_cluster=False)
    intro = INTRO.format(pretraining=study.conditions["pretraining"])
    report(study, TITLE, intro, [result_grid(study)], plot)


if __name__ == "__main__":
    main()
