"""Preference tuning with TRL's DPOTrainer under ZeRO++: full weights with a separate reference model.

    hf-zeropp launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml examples/dpo_trl.py \
        --fsdp --fsdp_config examples/configs/zeropp_trainer.json

By default the model is the one that ``examples/sft_trl.py`` left in ``runs/sft_trl``. Pairs are made from the docstrings of the
standard library: the function's own is chosen, another function's is rejected. ``attach`` applies ZeRO++ to the reference model
as well. ``examples/dpo_lora.py`` needs none: there the base without the adapter is the reference.
"""

import dataclasses
import random

import torch
from datasets import Dataset, load_dataset
from standard_library import documented_functions
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer

from hf_zeropp import ZeroPPCallback


@dataclasses.dataclass
class ScriptArguments:
    """Model and data."""

    model: str = dataclasses.field(default="runs/sft_trl", metadata={"help": "hub name or path"})
    dataset: str | None = dataclasses.field(default=None, metadata={"help": "hub name of preference pairs"})


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
    functions = documented_functions()
    others = [text for _, text in functions]
    random.Random(seed).shuffle(others)
    pairs = zip(functions, others, strict=True)
    return Dataset.from_list([{"prompt": prompt, "chosen": own, "rejected": other} for (prompt, own), other in pairs])


def main() -> None:
    """Train and save the model."""
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        pairs = load_pairs(script, args.seed)
    callback = ZeroPPCallback()
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(script.model),
        ref_model=AutoModelForCausalLM.from_pretrained(script.model),
        args=args,
        train_dataset=pairs,
        processing_class=AutoTokenizer.from_pretrained(script.model),
        callbacks=[callback],
    )
    callback.attach(trainer)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
