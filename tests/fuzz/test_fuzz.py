"""Some seconds of the fuzz on the same programs in every run, and more with ``--all`` or ``-m long``. scripts/fuzz.sh runs it."""

from __future__ import annotations

import random

import pytest
from differential.campaign import Campaign
from differential.generate import NEVER
from differential.hazards import STOCK_IS_WRONG

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("first_seed", "worlds", "seconds"),
    [
        pytest.param(0, (2, 4, 6), 20.0, id="fixed"),
        pytest.param(
            random.SystemRandom().randrange(1, 10**6) * 1000, (2, 3, 4, 8), 20.0, id="random", marks=pytest.mark.long
        ),
    ],
)
def test_slice(first_seed, worlds, seconds):
    print(f"first seed {first_seed}")
    without = (*STOCK_IS_WRONG, *NEVER)
    campaign = Campaign(first_seed, without=without, limit_s=seconds, shorten_s=30.0, worlds=worlds).start()
    campaign.wait()
    print(campaign.summary())
    assert campaign.num_cases > 0
    failures = campaign.broken_promises
    assert not failures, f"first seed {first_seed}\n{campaign.summary()}\n\n" + "\n".join(map(str, failures[:5]))
