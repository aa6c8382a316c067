"""The text of all studies of training, the source code of Python's standard library, and a checkpoint that was trained on it."""

from __future__ import annotations

import contextlib
import dataclasses
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from library.cluster import Cluster
from library.variants import Recipe

SERVED = "library.text_run:TextRun"
"""The class that ranks run, behind which come variant, seed, recipe, and the files of ``checkpoint_of``."""


class TokenFiles(NamedTuple):
    """Paths of token files, as text."""

    train: str
    validation: str


def write_tokens(folder: Path, vocab_size: int) -> TokenFiles:
    """Write the text as tokens; every tenth module is validation text.

    Args:
        folder: for the files.
        vocab_size: of the tokenizer, which is trained on the same text.
    """
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab_size, show_progress=False)

    def write(name: str, chosen: list[str]) -> str:
        path = folder / f"{name}.npy"
        np.save(path, np.array([token for text in chosen for token in tokenizer.encode(text).ids], dtype=np.uint16))
        return str(path)

    training = [text for i, text in enumerate(texts) if i % 10]
    return TokenFiles(write("train", training), write("validation", texts[::10]))


@contextlib.contextmanager
def checkpoint_of(cluster: Cluster, recipe: Recipe, steps: int) -> Iterator[tuple[TokenFiles, str | None]]:
    """Train from scratch under stock FSDP2 with the recipe's schedule, at full network speed.

    Args:
        cluster: on which it is trained.
        recipe: settings, but for the number of steps.
        steps: of the training; 0 trains nothing.

    Yields:
        The token files, and the path of the weights, None where nothing was trained. They exist while the context lasts.
    """
    with tempfile.TemporaryDirectory(dir="/run") as folder:  # the sandbox's own
        files = write_tokens(Path(folder), recipe.shape.vocab_size)
        weights = str(Path(folder) / "checkpoint.pt")
        cluster.set_link()
        if steps:
            with cluster.start(SERVED, "stock", 0, dataclasses.replace(recipe, steps=steps), files) as ranks:
                ranks.call("train", steps)
                ranks.call("save", weights)
        yield files, weights if steps else None
