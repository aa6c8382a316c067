"""DPO with TRL over a base packed in INT4: a small model learns to prefer Python lines that compile.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml examples/dpo_lora.py

DPOTrainer is used as it is, with LoRA: the reference is the packed base with the adapter switched off. A pair is a line of the
standard library and the same line broken in one place, so that it does not compile. The printed accuracy is that on pairs which
were held out.
"""

import dataclasses
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from python_lines import compiles, lines_of_the_standard_library, make_base
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer

from hf_zeropp import ZeroPPCallback, ZeroPPQuantConfig


@dataclasses.dataclass
class Arguments(DPOConfig):
    """DPOConfig with defaults for a run of a few minutes."""

    output_dir: str = "runs/dpo_lora"
    base: str = dataclasses.field(default="runs/python_lines", metadata={"help": "made there if it does not exist"})
    frozen_bits: int = dataclasses.field(default=4, metadata={"help": "of the base: 8 or 4"})
    max_steps: int = 180
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 32
    learning_rate: float = 2e-3
    warmup_steps: float = 10
    beta: float = 0.1
    max_length: int | None = 48
    logging_steps: float = 10
    eval_strategy: str = "steps"
    eval_steps: float | None = 60
    eval_on_start: bool = True
    save_strategy: str = "no"
    report_to: str = "none"
    bf16: bool | None = False
    use_cpu: bool = not torch.accelerator.is_available()
    fsdp: bool = True

    def __post_init__(self) -> None:
        self.fsdp_config = self.fsdp_config or {"zeropp": True}  # True: the settings of the launch config
        super().__post_init__()


def make_pairs(seed: int, num_pairs: int = 6000) -> Dataset:
    """Return lines that compile, each with a copy in which a dropped or doubled character prevents it."""
    chance = random.Random(seed)
    lines = [line for line in lines_of_the_standard_library() if compiles(line)]
    pairs = []
    for line in chance.sample(lines, len(lines)):
        places = [i for i, character in enumerate(line) if i > 3 and character in "()[]{}'\",.=:+-"]
        for place in chance.sample(places, min(3, len(places))):
            broken = line[:place] + chance.choice(("", line[place] * 2)) + line[place + 1 :]
            if not compiles(broken):
                pairs.append({"prompt": line[:2], "chosen": line[2:], "rejected": broken[2:]})
                break
        if len(pairs) == num_pairs:
            break
    return Dataset.from_list(pairs)


def main() -> None:
    """Train, and print the accuracy on held-out pairs before and after."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        base = make_base(args.base)
        pairs = make_pairs(args.seed).train_test_split(test_size=256, seed=args.seed)
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, quantization_config=ZeroPPQuantConfig(bits=args.frozen_bits)
        ),
        args=args,
        train_dataset=pairs["train"],
        eval_dataset=pairs["test"],
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[ZeroPPCallback()],
    )
    trainer.train()
    trainer.save_model()
    accuracies = [
        log["eval_rewards/accuracies"] for log in trainer.state.log_history if "eval_rewards/accuracies" in log
    ]
    if trainer.is_world_process_zero():
        print(f"accuracy on held-out pairs {accuracies[0]:.2f} -> {accuracies[-1]:.2f}")


if __name__ == "__main__":
    main()
