"""A small model of Python lines for the RLHF examples, with prompts and a reward: does the line compile?

The model is a Llama of about 1 M parameters. It reads the lines of Python's standard library for about a minute, and then writes
lines of which some compile. The first process makes it once and keeps it in a folder.
"""

import glob
import os
import random
import sysconfig
import warnings

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPTS = (
    "return ",
    "if ",
    "self.",
    "x = ",
    "for ",
    "print(",
    "raise ",
    "assert ",
    "def ",
    "while ",
    "import ",
    "data[",
)
MAX_TOKENS = 24


def reward(prompt: str, completion: str) -> float:
    """Return 1 for a line that compiles and has four different characters, else 0."""
    line = (prompt + completion.partition("\n")[0]).strip()
    says_something = len(set(completion.strip())) >= 4
    return float(says_something and compiles(line))


def compiles(line: str) -> bool:
    """Return whether Python compiles the line. A line that opens a block gets a body, a return gets a function."""
    source = f"{line} pass" if line.endswith(":") else line
    if line.startswith("return"):
        source = f"def f(): {source}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "line", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def lines_of_the_standard_library() -> list[str]:
    """Return its distinct lines of 8 to 60 characters, stripped, without comments and strings."""
    lines = set()
    for file in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))):
        with open(file, encoding="utf-8", errors="ignore") as text:
            lines.update(line.strip() for line in text if 8 <= len(line.strip()) <= 60)
    return sorted(line for line in lines if line.isascii() and line[0] not in "#\"'")


def make_base(folder: str = "runs/python_lines", seed: int = 0, steps: int = 500) -> str:
    """Train tokenizer and model, unless ``folder`` holds them already, and return the folder."""
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder
    torch.manual_seed(seed)
    lines = lines_of_the_standard_library()
    tokenizer = make_tokenizer(lines)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    pretrain(model, tokenizer, lines, steps)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(lines: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of 768 tokens. It pads on the left, as generation needs it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<bos>", "<eos>"]
    bpe.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=768, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lines: list[str], steps: int) -> None:
    """Train the model on random batches of 64 lines."""
    texts = [f"{line}{tokenizer.eos_token}" for line in lines]
    tokenizer.padding_side = "right"
    order = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in (progress := tqdm(range(steps), desc="reading the standard library")):
        batch = tokenizer(order.sample(texts, 64), return_tensors="pt", padding=True, truncation=True, max_length=32)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.2f}")
    tokenizer.padding_side = "left"
