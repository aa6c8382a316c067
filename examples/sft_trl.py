"""Fine-tune with TRL's SFTTrainer under ZeRO++: one callback is added to a TRL script.

    hf-zeropp launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml examples/sft_trl.py \
        --fsdp --fsdp_config examples/configs/zeropp_trainer.json

By default it trains a new Llama of 6 M parameters on the docstrings of Python's standard library. ``--model`` and ``--dataset``
name any causal language model and any dataset in one of TRL's formats. All fields of SFTConfig are flags. With LoRA, on the
weights of a trained model in 4 bits:

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml examples/sft_trl.py \
        --model runs/smollm2 --frozen_bits 4 --learning_rate 2e-4 --output_dir runs/sft_lora

The printed loss is that on functions which were held out.
"""

import dataclasses

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from standard_library import documented_functions, load_model, load_tokenizer
from transformers import AutoModelForCausalLM, HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer

from hf_zeropp import ZeroPPCallback, ZeroPPQuantConfig


@dataclasses.dataclass
class ScriptArguments:
    """Model and data."""

    model: str | None = dataclasses.field(default=None, metadata={"help": "hub name or path; default: a new 6 M Llama"})
    dataset: str | None = dataclasses.field(default=None, metadata={"help": "hub name; default: docstrings"})
    frozen_bits: int | None = dataclasses.field(
        default=None, metadata={"help": "train LoRA adapters on the model packed in 8 or 4 bits; default: all weights"}
    )

    def __post_init__(self) -> None:
        if self.frozen_bits and not self.model:
            raise SystemExit("--frozen_bits packs the weights of a trained model: name one by --model.")


@dataclasses.dataclass
class Arguments(SFTConfig):
    """SFTConfig with defaults for a run of a minute."""

    output_dir: str = "runs/sft_trl"
    max_steps: int = 40
    per_device_train_batch_size: int = 4
    per_device_eval_batch_size: int = 16
    learning_rate: float = 1e-3
    max_length: int | None = 128
    logging_steps: float = 10
    eval_strategy: str = "steps"
    eval_steps: float | None = 20
    eval_on_start: bool = True
    activation_checkpointing: bool | None = False
    save_strategy: str = "no"
    report_to: str = "none"
    use_cpu: bool = not torch.accelerator.is_available()
    fsdp: bool = True

    def __post_init__(self) -> None:
        self.fsdp_config = self.fsdp_config or {"zeropp": True}  # True: the settings of the launch config
        super().__post_init__()


def load_data(script: ScriptArguments) -> Dataset:
    """Return a dataset of the hub, or the standard library's signatures as prompts and docstrings as completions."""
    if script.dataset:
        return load_dataset(script.dataset, split="train")
    return Dataset.from_list([{"prompt": prompt, "completion": text} for prompt, text in documented_functions()])


def main() -> None:
    """Train and save the model or the adapter, and print the loss on held-out functions before and after."""
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        data = load_data(script)
        texts = (row["completion"] for row in data)
        tokenizer = load_tokenizer(script.model, args.output_dir, texts, vocab_size=2048)
        data = data.train_test_split(test_size=64, seed=args.seed)
    if script.frozen_bits:
        model = AutoModelForCausalLM.from_pretrained(
            script.model, dtype=torch.float32, quantization_config=ZeroPPQuantConfig(bits=script.frozen_bits)
        )
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    else:
        model = load_model(script.model, tokenizer, hidden_size=256, intermediate_size=704, num_hidden_layers=6)
        lora = None
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[ZeroPPCallback()],
    )
    trainer.train()
    trainer.save_model()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    if trainer.is_world_process_zero():
        print(f"loss on held-out functions {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
