"""Programs without running them: their text form, what they do that is hard, and how they are made short."""

from __future__ import annotations

import pytest
from differential.cases import MESHES, Case, Operation
from differential.generate import NEVER, generate
from differential.hazards import HAZARDS, hazards
from differential.minimize import minimize

pytestmark = pytest.mark.one_rank

SEEDS = range(600)


@pytest.mark.parametrize("mesh", ["", *MESHES])
def test_a_seed_is_one_program_and_its_text_form_is_complete(mesh):
    for seed in SEEDS if not mesh else SEEDS[:100]:
        case = generate(seed, HAZARDS if mesh else NEVER, mesh)
        assert case == generate(seed, HAZARDS if mesh else NEVER, mesh)
        assert Case.parse(case.script()) == case


def test_hazards_can_be_left_out():
    found = [hazards(generate(seed, without=())) for seed in range(5 * len(SEEDS))]  # the rarest is in one of 400
    assert frozenset().union(*found) == HAZARDS.keys(), "a hazard that no program has"
    for mesh in ("", *MESHES):
        assert all(not hazards(generate(seed, HAZARDS, mesh)) for seed in (SEEDS[:100] if mesh else SEEDS))


@pytest.mark.parametrize("line", ["train(1)", "train(wrong=1)", "x = 1", "fly()"])
def test_unknown_lines_are_refused(line):
    with pytest.raises((ValueError, KeyError)):
        Case.parse(f"world(size=2, ranks_per_node=1)\nmodel()\n{line}")


def test_programs_are_made_short():
    """A failure that takes a clip behind two micro-steps, and nothing else."""

    def fails(case: Case) -> bool:
        names = [operation.name for operation in case.operations]
        return "clip" in names and names[: names.index("clip")].count("train") >= 2

    case = next(case for case in map(generate, range(10_000)) if fails(case) and len(case.operations) > 15)
    short = minimize(case, fails, limit_s=30.0)
    assert sorted(short.operations, key=lambda operation: operation.name) == [
        Operation.of("clip"),
        Operation.of("train"),
        Operation.of("train"),
    ]
    assert (short.world, short.ranks_per_node, len(short.models), short.settings) == (2, 1, 1, ())
