"""A fault: what strikes which rank, at which call of which part of the program. All of it is drawn from a seed."""

from __future__ import annotations

import dataclasses
import random

WORLD_SIZE = 4
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
TRAINING = ("values", "deltas", "packed")
"""Jobs of four ranks; ``jobs.py`` says what each trains."""

BLOWS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, for ever",
    "pause": "SIGSTOP, and SIGCONT after two seconds",
    "full disk": "no space is left on the disk of the checkpoints",
    "few descriptors": "the rank may open 0 to 5 more files (RLIMIT_NOFILE)",
    "full /dev/shm": "no space is left in /dev/shm",
}
HARMLESS = ("pause", "full /dev/shm")
"""Blows after which every rank must go on."""

HOP_1, HOP_2 = "node hop", "cross hop"
POINTS = {
    "installing": "apply_zeropp, which makes process groups and looks at the model",
    "sharing memory": "the making of memory that the ranks of a node share",
    HOP_1: "a collective within a node",
    HOP_2: "a collective across nodes",
    "full save": "a checkpoint with FULL_STATE_DICT",
    "sharded save": "a checkpoint with SHARDED_STATE_DICT",
    "rotation": "the deletion of an older checkpoint, on the first rank",
    "packed loading": "from_pretrained into packed weights",
}
_SAVES = ("full save", "sharded save")
CELLS = (
    *((blow, point) for blow in ("kill", "stop") for point in POINTS),
    *(("pause", point) for point in (HOP_1, HOP_2, *_SAVES)),
    *(("full disk", point) for point in _SAVES),
    *(("few descriptors", point) for point in ("sharing memory", HOP_2, *_SAVES, "packed loading")),
    ("full /dev/shm", "installing"),
)
"""Pairs of a blow and a point, one after the other in a campaign."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        seed: which everything is drawn from.
        blow: a key of ``BLOWS``.
        point: a key of ``POINTS``.
        job: what is struck: one of ``TRAINING``.
        kind: of the checkpoints.
        keep: how many checkpoints are kept (``save_total_limit``).
        rank: the struck rank.
        fraction: which call of the point is struck: 0 the first of the whole run, almost 1 the last.
        spare: descriptors that the rank has left.
    """

    seed: int
    blow: str
    point: str
    job: str
    kind: str
    keep: int
    rank: int
    fraction: float
    spare: int

    def __str__(self) -> str:
        struck = f"rank {self.rank} of {self.job}, {self.kind}, keeps {self.keep}"
        return f"seed {self.seed}: {self.blow} at {self.fraction:.0%} of {self.point}, {struck}"


def draw(seed: int) -> Fault:
    """Draw a fault. Consecutive seeds go through all of ``CELLS``."""
    chance = random.Random(seed)
    blow, point = CELLS[seed % len(CELLS)]
    job = "packed" if point == "packed loading" else chance.choice(TRAINING)
    kind = {"full save": FULL, "sharded save": SHARDED}.get(point) or chance.choice((FULL, SHARDED))
    keep = 1 if point == "rotation" else chance.choice((1, 2))
    rank = 0 if point == "rotation" else chance.randrange(WORLD_SIZE)
    return Fault(
        seed=seed,
        blow=blow,
        point=point,
        job=job,
        kind=kind,
        keep=keep,
        rank=rank,
        fraction=chance.random(),
        spare=chance.randrange(6),
    )
