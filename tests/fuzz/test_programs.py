"""Programs without running them: their text form, what they do that is hard, and how they are made short."""

from __future__ import annotations

from pathlib import Path

import pytest
from differential.cases import MESHES, Case, Operation
from differential.generate import generate
from differential.hazards import HAZARDS, hazards
from differential.minimize import minimize

pytestmark = pytest.mark.one_rank

SEEDS = range(600)
REGRESSIONS = Path(__file__).parent / "regressions"
# Of each folder of regressions, the hazards that every program in it must have one of.
OF_FOLDER = {
    "micro_steps_left_open": {"pending at step", "pending at clip", "pending at read"},
    "models_in_one_container": {"models in one container"},
    "frozen_before_step": {"frozen before step"},
    "silent_writes": {"silent write", "step that raises"},
    "changed_while_unsharded": {"changed while unsharded"},
    "zeroed_while_micro_steps_wait": {"pending and zeroed", "pending and part dropped"},
    "refrozen_while_micro_steps_wait": {"pending and refrozen"},
    "one_rank": {"optimizer on one rank", "step skipped on one rank", "edit on one rank"},
    "skipped_on_one_rank": {"skipped on one rank"},
    "replaced_before_the_first_pass": {"replaced before the first pass"},
    "from_meta": {"from meta"},
    "thawed": {"thawed"},
    "reentrant": {"reentrant"},
    "extension": {"extension"},
    "one_loss_of_two_roots": {"one loss of two roots"},
    "right_from_the_start": set(),
}


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 1000, 123456789])
def test_a_seed_is_one_program(seed):
    assert generate(seed) == generate(seed)


def test_the_text_form_is_complete():
    for seed in SEEDS:
        case = generate(seed)
        assert Case.parse(case.script()) == case


def test_hazards_can_be_left_out():
    found = [hazards(generate(seed, without=())) for seed in range(5 * len(SEEDS))]  # the rarest is in one of 400
    assert frozenset().union(*found) == HAZARDS.keys(), "a hazard that no program has"
    assert all(not hazards(generate(seed, without=HAZARDS)) for seed in SEEDS)


@pytest.mark.parametrize("mesh", MESHES)
def test_programs_on_meshes(mesh):
    for seed in SEEDS[:100]:
        case = generate(seed, HAZARDS, mesh, groups=2)
        assert Case.parse(case.script()) == case
        assert not hazards(case)


@pytest.mark.parametrize("path", sorted(REGRESSIONS.rglob("*.txt")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_hazards_of_known_programs(path):
    found, expected = hazards(Case.parse(path.read_text())), OF_FOLDER[path.parent.name]
    assert bool(found) == bool(expected)
    assert bool(found & expected) == bool(expected)


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
