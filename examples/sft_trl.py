"""Fine-tune with TRL's SFTTrainer under ZeRO++: one callback is added to a TRL script.

    hf-zeropp launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml examples/sft_trl.py \
        --fsdp --fsdp_config examples/configs/zeropp_trainer.json

By default it trains a new Llama of 6 M parameters on the docstrings of Python's standard library. ``--model`` and ``--dataset``
name any causal language model and any dataset in one of TRL's formats. All fields of SFTConfig are flags.
"""

import dataclasses

import torch
from datasets import Dataset, load_dataset
from standard_library import documented_functions, load_model, load_tokenizer
from transformers import HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer

from hf_zeropp import ZeroPPCallback


@dataclasses.dataclass
class ScriptArguments:
    """Model and data."""

    model: str | None = dataclasses.field(default=None, metadata={"help": "hub name or path; default: a new 6 M Llama"})
    dataset: str | None = dataclasses.field(default=None, metadata={"help": "hub name; default: docstrings"})


@dataclasses.dataclass
class Arguments(SFTConfig):
    """SFTConfig with defaults for a run of a minute."""

    output_dir: str = "runs/sft_trl"
    max_steps: int = 40
    per_device_train_batch_size: int = 4
    learning_rate: float = 1e-3
    max_length: int | None = 128
    logging_steps: float = 10
    save_strategy: str = "no"
    report_to: str = "none"
    use_cpu: bool = not torch.accelerator.is_available()


def load_data(script: ScriptArguments) -> Dataset:
    """Return a dataset of the hub, or the standard library's signatures as prompts and docstrings as completions."""
    if script.dataset:
        return load_dataset(script.dataset, split="train")
    return Dataset.from_list([{"prompt": prompt, "completion": text} for prompt, text in documented_functions()])


def main() -> None:
    """Train and save the model."""
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        data = load_data(script)
        texts = (row["completion"] for row in data)
        tokenizer = load_tokenizer(script.model, args.output_dir, texts, vocab_size=2048)
    trainer = SFTTrainer(
        model=load_model(script.model, tokenizer, hidden_size=256, intermediate_size=704, num_hidden_layers=6),
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[ZeroPPCallback()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
