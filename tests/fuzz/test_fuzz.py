"""Two minutes of the fuzz: half of them the same programs in every run, half others. ``bash scripts/fuzz.sh`` runs longer."""

from __future__ import annotations

import random

import pytest
from differential.campaign import Campaign
from differential.generate import NEVER
from differential.hazards import STOCK_IS_WRONG

# Hazards that the package does not stand yet, as test_regressions.py says. They come back here as their marks go there.
LEFT_OUT = (
    "pending at step",
    "pending at clip",
    "pending and zeroed",
    "pending and part dropped",
    "pending and refrozen",
    "frozen before step",
    "silent write",
    "step that raises",
    "changed while unsharded",
    "optimizer on one rank",
    "step skipped on one rank",
    "edit on one rank",
    "models in one container",
)
SLICE_S = 60.0


@pytest.mark.parametrize(
    ("first_seed", "worlds"),
    [(0, (2, 4, 6)), (random.SystemRandom().randrange(1, 10**6) * 1000, (2, 3, 4, 8))],
    ids=["fixed", "random"],
)
def test_slice(first_seed, worlds):
    print(f"first seed {first_seed}")
    without = (*LEFT_OUT, *STOCK_IS_WRONG, *NEVER)
    campaign = Campaign(first_seed, without=without, limit_s=SLICE_S, shorten_s=30.0, worlds=worlds).start()
    campaign.wait()
    print(campaign.summary())
    assert campaign.num_cases > 0
    failures = campaign.broken_promises
    assert not failures, f"first seed {first_seed}\n{campaign.summary()}\n\n" + "\n".join(map(str, failures[:5]))
