"""The checkpoint from which the studies of fine-tuning go on: the same text and model, trained from scratch."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from library.cluster import Cluster
from library.loss_study import write_tokens
from library.variants import Recipe

SERVED = "library.fine_tuning_run:FineTuningRun"
"""The class that ranks run, behind which come variant, seed, recipe, and what ``checkpoint_of`` returns."""


@contextlib.contextmanager
def checkpoint_of(cluster: Cluster, recipe: Recipe, steps: int) -> Iterator[tuple[str, str, str]]:
    """Train from scratch under stock FSDP2 with the recipe's schedule, at full network speed.

    Args:
        cluster: on which it is trained.
        recipe: settings, but for the number of steps.
        steps: of the training.

    Yields:
        The paths of the training text, of the validation text, and of the weights. They exist while the context lasts.
    """
    with tempfile.TemporaryDirectory(dir="/run") as folder:  # the sandbox's own
        files = write_tokens(Path(folder), recipe.shape.vocab_size)
        weights = str(Path(folder) / "checkpoint.pt")
        cluster.set_link()
        with cluster.start(SERVED, "stock", 0, dataclasses.replace(recipe, steps=steps), *files) as ranks:
            ranks.call("train", steps)
            ranks.call("save", weights)
        yield (*files, weights)
