"""Preference tuning with TRL's DPOTrainer under ZeRO++: LoRA, or full weights with a separate reference model.

    hf-zeropp launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml examples/dpo_trl.py \
        --fsdp --fsdp_config examples/configs/zeropp_trainer.json
    ... examples/dpo_trl.py --lora ...

By default the model is the one that ``examples/sft_trl.py`` left in ``runs/sft_trl``. Pairs are made from the docstrings of the
standard library: the function's own is chosen, another function's is rejected. With ``--lora`` no reference model is needed,
because the base without the adapter is the reference. Without it, ``attach`` applies ZeRO++ to the reference model as well.
"""

import ast
import dataclasses
import glob
import os
import random
import sysconfig

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer

from hf_zeropp import ZeroPPCallback


@dataclasses.dataclass
class ScriptArguments:
    """Model, data and method."""

    model: str = dataclasses.field(default="runs/sft_trl", metadata={"help": "hub name or path"})
    dataset: str | None = dataclasses.field(default=None, metadata={"help": "hub name of preference pairs"})
    lora: bool = dataclasses.field(default=False, metadata={"help": "train a LoRA adapter, without reference model"})


@dataclasses.dataclass
class Arguments(DPOConfig):
    """DPOConfig with defaults for a run of a minute."""

    output_dir: str = "runs/dpo_trl"
    max_steps: int = 30
    per_device_train_batch_size: int = 4
    learning_rate: float = 1e-4
    max_length: int | None = 128
    logging_steps: float = 5
    save_strategy: str = "no"
    report_to: str = "none"
    use_cpu: bool = not torch.accelerator.is_available()


def load_pairs(script: ScriptArguments, seed: int) -> Dataset:
    """Return a dataset of the hub, or the standard library's functions with their own and another docstring."""
    if script.dataset:
        return load_dataset(script.dataset, split="train")
    functions = []
    for path in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))):
        with open(path, encoding="utf-8", errors="replace") as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                functions.append((f"def {node.name}({ast.unparse(node.args)}):\n", f'"""{text}"""'))
    others = [text for _, text in functions]
    random.Random(seed).shuffle(others)
    pairs = zip(functions, others, strict=True)
    return Dataset.from_list([{"prompt": prompt, "chosen": own, "rejected": other} for (prompt, own), other in pairs])


def main() -> None:
    """Train and save the model or the adapter."""
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        pairs = load_pairs(script, args.seed)
    callback = ZeroPPCallback()
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(script.model),
        ref_model=None if script.lora else AutoModelForCausalLM.from_pretrained(script.model),
        args=args,
        train_dataset=pairs,
        processing_class=AutoTokenizer.from_pretrained(script.model),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear") if script.lora else None,
        callbacks=[callback],
    )
    callback.attach(trainer)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
