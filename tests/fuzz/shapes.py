"""Random shapes for the operators and for the two-hop collectives. ``bash scripts/fuzz.sh --shapes 20000`` runs it.

Half of the cases are operators: every instruction set against the PyTorch reference, bit for bit. The other half are hops of
random worlds, node sizes, slices, widths and dtypes: gathers and reductions within the bound of the exact collective, deltas
bit for bit as the reference replays them. The checks are those of tests/ops and tests/comm.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / folder) for folder in ("helpers", "comm")]

from harness import RankError, each_case, run_ranks  # noqa: E402 - the folders come first
from op_cases import COMPILED, make_case  # noqa: E402
from op_checks import check_everything  # noqa: E402
from test_two_hops import check_accumulation, check_gather, check_reduce  # noqa: E402
from test_two_hops_with_state import check_deltas  # noqa: E402
from tqdm import tqdm  # noqa: E402
from two_hops import BITS, DTYPES, Case, node_sizes  # noqa: E402

from hf_zeropp import ops  # noqa: E402
from hf_zeropp.config import DELTA_BITS  # noqa: E402
from hf_zeropp.ops import native  # noqa: E402
from hf_zeropp.ops.reference_kernels import ReferenceKernels  # noqa: E402

WORLDS = (2, 3, 4, 5, 6, 7, 8)
HOPS_PER_START = 150  # cases that ranks run before others are started
LENGTHS = (0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 95, 127, 300)


def run_shapes(count: int, seed: int) -> int:
    """Run ``count`` cases from ``seed`` on, print what fails and a table, and return an exit code."""
    started, failures = time.monotonic(), []
    failures += _run_operators(range(seed, seed + count // 2))
    kinds: Counter[str] = Counter()
    failures += _run_hops(range(seed, seed + count - count // 2), kinds)
    print(f"{count // 2} operator cases ({len(COMPILED)} instruction sets), {dict(kinds)} in worlds of {WORLDS} ranks")
    print(f"first seed {seed}: {len(failures)} failures in {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def _run_operators(seeds: range) -> list[str]:
    kernels = [ops.CompiledKernels(native.cpu_library()[0], name) for name in COMPILED]
    failures = []
    for seed in tqdm(seeds, "operators", mininterval=10):
        try:
            check_everything(
                kernels, make_case(seed, max_numel=9000 if seed % 4 == 0 else 2100), expected=ReferenceKernels()
            )
        except AssertionError as error:
            failures.append(f"operators, seed {seed}: {error}")
            tqdm.write(failures[-1])  # now, since a run of hours may be stopped
    return failures


def _run_hops(seeds: range, kinds: Counter[str]) -> list[str]:
    failures = []
    for start in tqdm(
        range(seeds.start, seeds.stop, HOPS_PER_START), "hops", unit=f"x{HOPS_PER_START}", mininterval=10
    ):
        world = WORLDS[start // HOPS_PER_START % len(WORLDS)]
        chosen = range(start, min(start + HOPS_PER_START, seeds.stop))
        try:
            kinds.update(run_ranks(_hops_of_rank, world, chosen, limit_s=600.0)[0])
        except RankError as error:
            failures.append(f"hops, seeds {chosen.start} to {chosen.stop - 1} in a world of {world}: {error}")
            tqdm.write(failures[-1])
    return failures


def _hops_of_rank(rank: int, seeds: range) -> list[str]:
    """Run the hops of ``seeds`` and return the kind of each. Every rank draws the same cases."""
    import torch.distributed as dist

    cases = [(seed, *_draw_hop(seed, dist.get_world_size())) for seed in seeds]
    each_case(cases, lambda case: _check_hop(case[1], case[2], rank))
    return [kind for _, kind, _ in cases]


def _draw_hop(seed: int, world: int) -> tuple[str, tuple]:
    """Return a kind of hop, and the arguments of its check but for the rank."""
    choose = random.Random(seed)
    kind = choose.choice(list(_CHECKS))
    size = choose.choice(node_sizes(world))
    lengths = ",".join(map(str, _draw_lengths(choose)))
    dtype = choose.choice(DTYPES)
    if kind == "deltas":
        return kind, (Case(size, lengths, dtype, choose.choice(DELTA_BITS)), choose.choice((None, 8)))
    return kind, (Case(size, lengths, dtype, choose.choice(BITS), choose.choice(BITS)),)


def _draw_lengths(choose: random.Random) -> Iterator[int]:
    for _ in range(choose.choice((1, 1, 2, 3, 6))):
        length = choose.choice((*LENGTHS, choose.randrange(500)))
        yield -length if choose.random() < 0.2 else length


def _check_hop(kind: str, arguments: tuple, rank: int) -> None:
    _CHECKS[kind](*arguments, rank)


_CHECKS: dict[str, Callable[..., None]] = {
    "gather": lambda case, rank: check_gather(case, rank, {}),
    "reduce": lambda case, rank: check_reduce(case, rank, {}),
    "accumulation": check_accumulation,
    "deltas": check_deltas,
}
