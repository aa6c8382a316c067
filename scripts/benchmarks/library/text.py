"""The texts of all studies of training, code and documentation of Python's standard library, and a checkpoint on them."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from library.cluster import Cluster
from library.study import ROOT
from library.variants import Recipe

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PARTS = ("torch.distributed", "torch.nn", "torch.optim", "torch.utils")
SERVED = "library.text_run:TextRun"
"""The class that ranks run, behind which come variant, seed, recipe, and the files of ``checkpoint_of``."""


class Tokens(NamedTuple):
    """Paths of the token files of a text."""

    train: str
    validation: str


class TokenFiles(NamedTuple):
    """The texts: source code of the standard library's modules, and the topics of its language reference, which are English.

    For a pretrained model both are docstrings of PyTorch, of a version that is newer than the model.
    """

    code: Tokens
    documentation: Tokens


def write_tokens_of(folder: Path, model: str) -> TokenFiles:
    """Write PyTorch's docstrings as tokens of a pretrained model; those of every tenth module are validation text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place_of(model))

    def write(name: str, texts: list[str]) -> str:
        path = folder / f"{name}.npy"
        ids = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        np.save(path, np.array([token for text in ids for token in text], dtype=np.uint16))
        return str(path)

    texts = [text for part in _PARTS for text in docstrings(part)]
    train = [text for i, text in enumerate(texts) if i % 10]
    tokens = Tokens(write("train", train), write("validation", texts[::10]))
    return TokenFiles(tokens, tokens)


def place_of(model: str) -> str:
    """Return the path of a model's folder in the clone; another name is that of a model elsewhere."""
    folder = ROOT / model
    return str(folder) if folder.exists() else model


def docstrings(package: str) -> list[str]:
    """Return the docstrings of each module of a package, by the module's path, without the short ones."""
    found, known = [], set[str]()
    for file in sorted(Path(str(files(package))).rglob("*.py")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the package's strings
            tree = ast.parse(file.read_text())
        owners = (node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
        own = [text for owner in owners if (text := ast.get_docstring(owner)) and len(text) > 200 and text not in known]
        known |= {*own}
        if own:
            found.append("\n\n".join(own))
    return found


def write_tokens(folder: Path, vocab_size: int) -> TokenFiles:
    """Write the texts as tokens; every tenth module, and every tenth topic, is validation text.

    Args:
        folder: for the files.
        vocab_size: of the tokenizer, which is trained on the code.
    """
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in modules]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab_size, show_progress=False)

    def write(name: str, chosen: list[str]) -> str:
        path = folder / f"{name}.npy"
        np.save(path, np.array([token for text in chosen for token in tokenizer.encode(text).ids], dtype=np.uint16))
        return str(path)

    def split(name: str, parts: list[str]) -> Tokens:
        training = [text for i, text in enumerate(parts) if i % 10]
        return Tokens(write(f"{name}_train", training), write(f"{name}_validation", parts[::10]))

    return TokenFiles(split("code", texts), split("documentation", [topics[name] for name in sorted(topics)]))


@contextlib.contextmanager
def checkpoint_of(cluster: Cluster, recipe: Recipe, steps: int) -> Iterator[tuple[TokenFiles, str | None]]:
    """Train from scratch under stock FSDP2 with the recipe's schedule, at full network speed.

    The weights stay in ``runs``, so that a study that is continued goes on from the same ones.

    Args:
        cluster: on which it is trained.
        recipe: settings, but for the number of steps.
        steps: of the training; 0 trains nothing.

    Yields:
        The token files, which exist while the context lasts, and the path of the weights, None where nothing was trained.
    """
    recipe = dataclasses.replace(recipe, steps=steps)
    weights = ROOT / "runs" / f"checkpoint_{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}.pt"
    with tempfile.TemporaryDirectory(dir="/run") as folder:  # the sandbox's own
        token_files = write_tokens(Path(folder), recipe.shape.vocab_size)
        cluster.set_link()
        if steps and not weights.exists():
            weights.parent.mkdir(exist_ok=True)
            with cluster.start(SERVED, "stock", 0, recipe, token_files) as ranks:
                ranks.call("train", steps)
                ranks.call("save", str(weights))
        yield token_files, str(weights) if steps else None
