"""Fine-tune with TRL's SFTTrainer under ZeRO++: one callback is added to a TRL script.

    hf-zeropp launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml examples/sft_trl.py \
        --fsdp --fsdp_config examples/configs/zeropp_trainer.json

By default it trains a new Llama of 6 M parameters on the docstrings of Python's standard library. ``--model`` and ``--dataset``
name any causal language model and any dataset in one of TRL's formats. All fields of SFTConfig are flags.
"""

import ast
import dataclasses
import glob
import os
import sysconfig

import torch
from datasets import Dataset, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
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
    pairs = []
    for path in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))):
        with open(path, encoding="utf-8", errors="replace") as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                signature = f"def {node.name}({ast.unparse(node.args)}):\n"
                pairs.append({"prompt": signature, "completion": f'"""{text}"""'})
    return Dataset.from_list(pairs)


def load_tokenizer(script: ScriptArguments, data: Dataset, output_dir: str) -> PreTrainedTokenizerFast:
    """Return the model's tokenizer, or one that the first process trains on the completions."""
    if script.model:
        return AutoTokenizer.from_pretrained(script.model)
    path = os.path.join(output_dir, "tokenizer")
    if not os.path.isdir(path):
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            data["completion"], vocab_size=2048, special_tokens=["<eos>", "<pad>"], show_progress=False
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
        tokenizer.save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def build_model(script: ScriptArguments, tokenizer: PreTrainedTokenizerFast):
    """Return the named model, or a new Llama of 6 M parameters."""
    if script.model:
        return AutoModelForCausalLM.from_pretrained(script.model)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train and save the model."""
    script, args = HfArgumentParser((ScriptArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        data = load_data(script)
        tokenizer = load_tokenizer(script, data, args.output_dir)
    trainer = SFTTrainer(
        model=build_model(script, tokenizer),
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[ZeroPPCallback()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
