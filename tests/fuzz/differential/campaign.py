"""Many programs, several worlds at a time, and what they found.

Every lane is a thread with a world of its own size, and takes the seeds that belong to it. A failure is grouped by what is
wrong and by the hazards of its program; the first of each group is made short.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator

from differential.cases import Case
from differential.generate import WORLDS, generate
from differential.hazards import BETTER_THAN_STOCK, hazards
from differential.minimize import minimize
from differential.pool import VALUES, Outcome, Symptom, Worlds
from differential.rank import SIDES, Job

OURS, SHARED, STOCK, ORACLE = "ours", "ours and stock's", "stock's", "the oracle's"
MAX_LEAD = 400  # seeds by which one lane may be ahead of another
STOCK_EVERY = 3  # programs of which one runs under stock FSDP2 as well; a program that fails always runs there
NO_HAZARD = "(no hazard)"


def blame(outcome: Outcome) -> str | None:
    """Return whose failure an outcome is; None where nothing failed."""
    if outcome.oracle is not None:
        return ORACLE
    if outcome.ours is None:
        return None if outcome.stock is None else STOCK
    return OURS if outcome.stock is None else SHARED


def kind_of(symptom: Symptom) -> str:
    """Return one kind for symptoms that may have one cause: ranks that run different collectives hang, or gloo aborts."""
    return {**dict.fromkeys(VALUES, "wrong numbers"), "dies": "hang"}.get(symptom.kind, symptom.kind)


@dataclasses.dataclass
class Failure:
    """One failing program. ``case`` is the short one once it was made short."""

    seed: int
    case: Case
    whose: str
    symptom: Symptom
    is_short: bool = False

    @property
    def group(self) -> tuple[str, str, str]:
        return self.whose, kind_of(self.symptom), ", ".join(sorted(hazards(self.case))) or NO_HAZARD

    @property
    def breaks_a_promise(self) -> bool:
        """Whether this package, or the fuzz itself, must be repaired.

        Programs that FSDP2 gets wrong as well are its own affair, but for the hazards that the package promises to stand all
        the same. With one node FSDP2's own collectives stay, and so does what is wrong with them.
        """
        has_nodes = self.case.ranks_per_node < self.case.world
        is_promised = has_nodes and bool(hazards(self.case) & BETTER_THAN_STOCK)
        return self.whose in (OURS, ORACLE) or (self.whose == SHARED and is_promised)

    def __str__(self) -> str:
        head = f"# seed {self.seed}: {self.whose}: {kind_of(self.symptom)}: {', '.join(sorted(hazards(self.case)))}"
        detail = "\n".join(f"# {line}" for line in self.symptom.detail.splitlines()[:40])
        return f"{head}\n{detail}\n{self.case.script()}\n"


def failure_of(seed: int, case: Case, outcome: Outcome) -> Failure | None:
    """Return the failure of a program that ended so; None where nothing failed."""
    whose, symptom = blame(outcome), outcome.oracle or outcome.ours or outcome.stock
    return None if whose is None or symptom is None else Failure(seed, case, whose, symptom)


@dataclasses.dataclass(eq=False)
class Campaign:
    """Runs seeds until the time is over.

    Args:
        first_seed: the seeds run are this one and those behind it.
        without: hazards that programs leave out.
        limit_s: seconds in all.
        shorten_s: seconds for making one failure short.
        worlds: sizes of the worlds that run, or of a group of the mesh; seeds of other sizes are left out.
        mesh: one of ``MESHES`` for every program, or "".
    """

    first_seed: int
    _: dataclasses.KW_ONLY
    without: Collection[str]
    limit_s: float
    shorten_s: float
    worlds: Collection[int]
    mesh: str = ""

    def __post_init__(self) -> None:
        self.num_cases = 0
        self.failures: list[Failure] = []
        self.errors: list[BaseException] = []
        self._reached = dict.fromkeys(self.worlds, self.first_seed)
        # More programs at the same time than there are processors would only add switches between them.
        self._turn = threading.Semaphore(os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._shortened: Counter[tuple[str, str, str]] = Counter()
        self._started = time.monotonic()
        self._deadline = self._started + self.limit_s
        self._threads = [threading.Thread(target=self._guarded, args=(world,), daemon=True) for world in self.worlds]

    def start(self) -> Campaign:
        for thread in self._threads:
            thread.start()
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, or so long; whether it has ended."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        if self.errors:
            raise self.errors[0]
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def broken_promises(self) -> list[Failure]:
        return [failure for failure in self.failures if failure.breaks_a_promise]

    def summary(self) -> str:
        """A table: whose failure, what is wrong, the hazards, how many, and the first seed."""
        groups: dict[tuple[str, str, str], list[Failure]] = {}
        for failure in self.failures:
            groups.setdefault(failure.group, []).append(failure)
        rate = self.num_cases / (time.monotonic() - self._started)
        lines = [f"{self.num_cases} programs, {rate:.1f} per second, {len(self.failures)} failures"]
        for (whose, kind, names), found in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
            shortest = min(found, key=lambda failure: len(failure.case.operations))
            size = len(shortest.case.operations)
            lines.append(f"{whose:17} {kind:20} {len(found):5}  seed {shortest.seed} ({size} operations)  {names}")
        return "\n".join(lines)

    def _guarded(self, size: int) -> None:
        try:
            self._lane(size)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the thread that asks for the result
            self.errors.append(error)
        finally:
            del self._reached[size]

    def _lane(self, size: int) -> None:
        with Worlds() as worlds:
            for seed in self._seeds(size):
                self._keep_pace(size, seed)
                case = generate(seed, self.without, self.mesh)
                sides = SIDES if seed % STOCK_EVERY == 0 else ("ours", "plain")
                with self._turn:
                    outcome = worlds[case.num_ranks].run(Job(case, sides))
                with self._lock:
                    self.num_cases += 1
                if (failure := failure_of(seed, case, outcome)) is not None:
                    self._take(failure, worlds)
                if self._is_over():
                    return

    def _seeds(self, size: int) -> Iterator[int]:
        return (seed for seed in itertools.count(self.first_seed) if WORLDS[seed % len(WORLDS)] == size)

    def _keep_pace(self, size: int, seed: int) -> None:
        """Wait while another lane is far behind, so that the worlds keep their shares."""
        self._reached[size] = seed
        while seed > min(list(self._reached.values())) + MAX_LEAD and not self._is_over():
            time.sleep(0.05)

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def _take(self, failure: Failure, worlds: Worlds) -> None:
        with self._lock:
            is_new = self._shortened[failure.group] == 0
            self._shortened[failure.group] += 1
        if is_new:
            failure = shorten(failure, worlds, self.shorten_s)
        with self._lock:
            self.failures.append(failure)


def shorten(failure: Failure, worlds: Worlds, limit_s: float) -> Failure:
    """Make the program of a failure short, by runs on some of the worlds."""
    latest = failure.symptom

    def fails(case: Case) -> bool:
        nonlocal latest
        if not hazards(case) <= hazards(failure.case):
            return False  # it would be another failure
        found = failure_of(failure.seed, case, worlds[case.num_ranks].run(Job(case)))
        if found is None or found.whose != failure.whose or kind_of(found.symptom) != kind_of(failure.symptom):
            return False
        latest = found.symptom
        return True

    case = minimize(failure.case, fails, limit_s)
    return Failure(failure.seed, case, failure.whose, latest, is_short=True)
