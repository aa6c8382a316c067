"""Do training programs that do not know this package follow stock FSDP2, and send what was predicted?

    python scripts/benchmarks/run_programs.py                          # TRL's sft, dpo, grpo, kto and reward
    python scripts/benchmarks/run_programs.py --script run_clm.py      # and a script of Transformers' examples

Every program runs three times under ``hf-zeropp launch``, in four CPU processes as two emulated nodes of two ranks, with a tiny
model and data that are made here: with ``ZEROPP_ENABLED=0`` (stock FSDP2), without quantization, and with the default settings.
Not a line of a program is changed. Losses are those of its ``trainer_state.json``, bytes those of the table that the callback
prints at the end.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from library.pages import Grid, show
from library.study import ROOT, parse, rank_environment
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

STEPS = 4
UNQUANTIZED = {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None}
VARIANTS = {"stock": None, "unquantized": UNQUANTIZED, "default": {}}
WORDS = [f"w{i}" for i in range(250)]
LORA = ["--use_peft", "--lora_target_modules", "all-linear"]
WITH_LORA = ("dpo", "kto")
"""Without LoRA both make a second model for reference, which stays with FSDP2."""
PROGRAMS: dict[str, list[str]] = {
    "sft": [],
    **dict.fromkeys(WITH_LORA, LORA),
    "reward": [],
    "grpo": ["--reward_funcs", "rewards.num_even", "--num_generations", "4", "--max_completion_length", "8"],
}
"""TRL's scripts, and the flags that each needs."""
COMMON = f"""--max_steps {STEPS} --save_steps {STEPS} --save_strategy steps --save_only_model true --logging_steps 1
--per_device_train_batch_size 4 --learning_rate 1e-3 --lr_scheduler_type constant --report_to none --use_cpu true --bf16 false
--gradient_checkpointing false --seed 0 --disable_tqdm true""".split()


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), help="of TRL")
    parser.add_argument("--script", type=Path, nargs="*", default=[], help="with the flags of Transformers' run_clm.py")
    return parse(parser, {"programs": ["sft"]}, argv)


def make_inputs(folder: Path) -> None:
    """Write a model, a tokenizer, and data for each program."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names).save_pretrained(folder / "model")
    set_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"vocab_size": 256, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder / "model")
    draw = random.Random(0)
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in ("sft", "dpo", "kto", "reward", "grpo")}
    for i in range(64):
        prompt, chosen, rejected = (" ".join(draw.choices(WORDS, k=10)) for _ in range(3))
        rows["sft"].append({"text": f"{prompt} {chosen}"})
        rows["dpo"].append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
        rows["kto"].append({"prompt": prompt, "completion": f" {chosen}", "label": i % 2 == 0})
        rows["reward"].append({"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"})
        rows["grpo"].append({"prompt": prompt})
    for name, lines in rows.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "texts.txt").write_text("\n".join(str(row["text"]) for row in rows["sft"]))
    (folder / "rewards.py").write_text(
        "def num_even(completions, **kwargs):\n"
        "    return [sum(word[-1] in '02468' for word in completion.split()) for completion in completions]\n"
    )


def command_of(program: str | Path, folder: Path) -> list[str]:
    """Return the program and its flags."""
    model = ["--model_name_or_path", str(folder / "model")]
    if isinstance(program, Path):
        flags = [*model, "--train_file", str(folder / "texts.txt"), "--do_train", "--block_size", "32"]
        return [str(program.resolve()), *flags, *COMMON]
    flags = [*model, "--dataset_name", str(folder / program), "--dtype", "float32", *PROGRAMS[program], *COMMON]
    return ["trl", program, *flags]


def run_program(program: str | Path, settings: dict[str, object] | None, folder: Path) -> tuple[list[float], str]:
    """Run a program, and return its losses and all that it printed."""
    out = Path(tempfile.mkdtemp(dir=folder))
    printed = launch([*command_of(program, folder), "--output_dir", str(out)], settings, folder)
    state = json.loads((out / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry], printed


def launch(command: list[str], settings: dict[str, object] | None, folder: Path) -> str:
    """Run a program under ``hf-zeropp launch`` to its end, and return all that it printed.

    Args:
        command: the program and its flags.
        settings: of this package; None for stock FSDP2.
        folder: where the program runs, and the config file lies.

    Raises:
        RuntimeError: the program failed; the message holds the end of its output.
    """
    accelerate = yaml.safe_load((ROOT / "examples/configs/cpu_2_nodes_x_2_ranks.yaml").read_text())
    accelerate["mixed_precision"] = "no"
    accelerate["fsdp_config"]["fsdp_state_dict_type"] = "FULL_STATE_DICT"  # for ``save_only_model``
    accelerate["zeropp_config"] = {"ranks_per_node": 2, **(settings or {})}
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(accelerate))
    variables = os.environ | rank_environment(threads=1) | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    variables |= {"HF_HOME": str(folder), "PYTHONPATH": str(folder)}
    ended = subprocess.run(
        [sys.executable, "-m", "hf_zeropp.cli", "launch", "--config_file", str(path), *command],
        env=variables | ({"ZEROPP_ENABLED": "0"} if settings is None else {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = ended.stdout + ended.stderr
    if ended.returncode:
        raise RuntimeError(f"{command} with {settings} ended with {ended.returncode}:\n{printed[-6000:]}")
    return printed


def bytes_of(printed: str) -> tuple[str, str]:
    """Return the total of the callback's table: megabytes across nodes, and what was predicted."""
    totals = re.findall(r"total\W+([\d.]+)\W+([\d.]+)\W+([\d.]+)", printed)
    return (totals[-1][1], totals[-1][2]) if totals else ("", "")


def row_of(program: str | Path, folder: Path) -> dict[str, str]:
    """Run a program in all variants, and return its row of the table."""
    losses, printed = {}, ""
    for name, settings in VARIANTS.items():
        losses[name], printed = run_program(program, settings, folder)
        print(program, name, losses[name], *bytes_of(printed), flush=True)

    def gap(name: str) -> str:
        return f"{max(abs(ours - theirs) for ours, theirs in zip(losses[name], losses['stock'], strict=True)):.1e}"

    lora = " (LoRA)" if program in WITH_LORA else ""
    counted, predicted = bytes_of(printed)
    return {
        "program": program.name if isinstance(program, Path) else f"trl {program}{lora}",
        "largest loss": f"{max(map(abs, losses['stock'])):.4f}",
        "unquantized: largest difference to stock": gap("unquantized"),
        "default: largest difference": gap("default"),
        "default: MB across nodes per step": counted,
        "predicted": predicted,
    }


def main() -> None:
    """Run all programs, and print the table for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name))
        rows = [row_of(program, Path(name)) for program in [*args.script, *args.programs]]
    show([Grid.of(f"{STEPS} steps, 2 nodes of 2 ranks", rows)], markdown=True)


if __name__ == "__main__":
    main()
