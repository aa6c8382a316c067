"""Python's standard library as training data for the examples, with a tokenizer and a new Llama for it."""

import ast
import glob
import os
import sysconfig
from collections.abc import Iterable

from datasets import Dataset, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODULES = os.path.join(sysconfig.get_path("stdlib"), "*.py")


def load_text(dataset: str | None, text_files: str = MODULES) -> Dataset:
    """Return a dataset with one column, ``text``: one of the hub, or the files of a glob."""
    if dataset:
        return load_dataset(dataset, split="train").select_columns("text")
    files = sorted(glob.glob(text_files, recursive=True))
    return load_dataset("text", data_files=files, sample_by="document", split="train")


def documented_functions() -> list[tuple[str, str]]:
    """Return the signatures of the library's functions with their docstrings."""
    functions = []
    for path in sorted(glob.glob(MODULES)):
        with open(path, encoding="utf-8", errors="replace") as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                functions.append((f"def {node.name}({ast.unparse(node.args)}):\n", f'"""{text}"""'))
    return functions


def load_tokenizer(
    model: str | None, folder: str, texts: Iterable[str], vocab_size: int = 4096
) -> PreTrainedTokenizerFast:
    """Return the model's tokenizer, or one that the first process trains on the texts and keeps in the folder."""
    if model:
        return AutoTokenizer.from_pretrained(model)
    path = os.path.join(folder, "tokenizer")
    if not os.path.isdir(path):
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=["<eos>"], show_progress=False)
        PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>").save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def tokenize(text: Dataset, tokenizer: PreTrainedTokenizerFast, seq_len: int) -> Dataset:
    """Join documents by end-of-text tokens and cut them into sequences of ``seq_len`` tokens."""

    def pack(batch: dict) -> dict:
        documents = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        tokens = [token for document in documents for token in (*document, tokenizer.eos_token_id)]
        whole = len(tokens) // seq_len * seq_len
        ids = [tokens[i : i + seq_len] for i in range(0, whole, seq_len)]
        return {"input_ids": ids, "labels": ids}

    return text.map(pack, batched=True, batch_size=64, remove_columns=text.column_names).with_format("torch")


def load_model(model: str | None, tokenizer: PreTrainedTokenizerFast, **size: int):
    """Return the named model, or a new Llama, by default of 20 M parameters."""
    if model:
        return AutoModelForCausalLM.from_pretrained(model)
    size = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=5, num_attention_heads=8) | size
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **size))
