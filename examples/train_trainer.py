"""Pretrain a causal language model under ZeRO++ with transformers' Trainer, on CPU or GPUs, from the same script.

    hf-zeropp launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml examples/train_trainer.py \
        --fsdp --fsdp_config examples/configs/zeropp_trainer.json --max_steps 60

Or with the stock launcher (on CPU: export ACCELERATE_USE_CPU=true):

    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 examples/train_trainer.py --fsdp --fsdp_config ...

All fields of TrainingArguments are flags. ``"ranks_per_node": 2`` in the JSON treats one machine as nodes of two ranks; remove it
on a real cluster. ``"zeropp": false`` in it runs stock FSDP2 on the same data and seed.
"""

import dataclasses

import torch
from standard_library import MODULES, load_model, load_text, load_tokenizer, tokenize
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed

from hf_zeropp import Muon, ZeroPPCallback


@dataclasses.dataclass
class ScriptArguments:
    """Model and data."""

    model: str | None = dataclasses.field(default=None, metadata={"help": "hub name or path; default: a new Llama"})
    dataset: str | None = dataclasses.field(default=None, metadata={"help": "hub name, with a text column"})
    text_files: str = MODULES
    seq_len: int = 128
    vocab_size: int = 4096
    muon: bool = dataclasses.field(default=False, metadata={"help": "train the matrices of layers with Muon"})


@dataclasses.dataclass
class Arguments(TrainingArguments):
    """TrainingArguments with defaults for a run of a minute."""

    output_dir: str = "runs/train_trainer"
    max_steps: int = 60
    per_device_train_batch_size: int = 4
    per_device_eval_batch_size: int = 16
    learning_rate: float = 1e-3
    lr_scheduler_type: str = "cosine"
    logging_steps: float = 10
    eval_strategy: str = "steps"
    eval_steps: float | None = 30
    save_strategy: str = "no"
    report_to: str = "none"
    use_cpu: bool = not torch.accelerator.is_available()


def main() -> None:
    """Train, resume if asked to, and save the model."""
    callback = ZeroPPCallback()  # before the arguments, which make the process group
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        text = load_text(script.dataset, script.text_files)
        tokenizer = load_tokenizer(script.model, args.output_dir, text["text"], script.vocab_size)
        tokens = tokenize(text, tokenizer, script.seq_len).train_test_split(test_size=256, seed=args.seed)
    settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    trainer = Trainer(
        model=load_model(script.model, tokenizer),
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=[callback],
        optimizer_cls_and_kwargs=(lambda: Muon.of_model, settings) if script.muon else None,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    if args.process_index == 0:
        print(f"saved to {args.output_dir}; open it with AutoModelForCausalLM.from_pretrained")


if __name__ == "__main__":
    main()
