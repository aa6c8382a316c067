"""DPO with TRL over a base packed in INT4: a small model learns to prefer Python lines that compile.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml examples/dpo_lora.py

DPOTrainer is used as it is, with LoRA: the reference is the packed base with the adapter switched off. With ``--adapter FOLDER``
an adapter goes on, such as that of ``examples/sft_trl.py``, and TRL makes a copy of it the reference. A pair is a line of the
standard library and the same line broken in one place, so that it does not compile. What is printed at the end is measured on
pairs which were held out.
"""

import dataclasses
import random

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from python_lines import compiles, lines_of_the_standard_library, make_base
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer

from hf_zeropp import ZeroPPCallback, ZeroPPQuantConfig


@dataclasses.dataclass
class Arguments(DPOConfig):
    """DPOConfig with defaults for a run of a few minutes."""

    output_dir: str = "runs/dpo_lora"
    model: str | None = dataclasses.field(
        default=None, metadata={"help": "hub name or path; default: runs/python_lines"}
    )
    frozen_bits: int = dataclasses.field(default=4, metadata={"help": "of the base: 8 or 4"})
    adapter: str | None = dataclasses.field(default=None, metadata={"help": "go on from this one; default: a new one"})
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
    activation_checkpointing: bool | None = False
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
        prompt = line.partition(" ")[0]  # a token ends there, whatever the tokenizer
        places = [i for i, character in enumerate(line) if i > len(prompt) and character in "()[]{}'\",.=:+-"]
        for place in chance.sample(places, min(3, len(places))):
            broken = line[:place] + chance.choice(("", line[place] * 2)) + line[place + 1 :]
            if not compiles(broken):
                pairs.append({"prompt": prompt, "chosen": line[len(prompt) :], "rejected": broken[len(prompt) :]})
                break
        if len(pairs) == num_pairs:
            break
    return Dataset.from_list(pairs)


def main() -> None:
    """Train, and print the accuracy on held-out pairs before and after."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        base = args.model or make_base()
        pairs = make_pairs(args.seed).train_test_split(test_size=256, seed=args.seed)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=ZeroPPQuantConfig(bits=args.frozen_bits)
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if args.adapter:
        model, lora = PeftModel.from_pretrained(model, args.adapter, is_trainable=True), None
    trainer = DPOTrainer(
        model=model,
        args=args,
        train_dataset=pairs["train"],
        eval_dataset=pairs["test"],
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=lora,
        callbacks=[ZeroPPCallback()],
    )
    trainer.train()
    trainer.save_model()
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    if trainer.is_world_process_zero():
        for name, figure in (("accuracy", "accuracies"), ("reward margin", "margins")):
            before, after = (evaluations[i][f"eval_rewards/{figure}"] for i in (0, -1))
            print(f"{name} on held-out pairs {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()
