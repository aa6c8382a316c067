"""A warm model, ways to change its weights, and the guards that notice: for tests of secondary shards.

A test changes the weights in one way and asks `check`: with all guards the next forward pass sees the change, and without the
named ones it does not. The second half proves that the first can fail.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from differential.optimizers import WritesData, WritesPointers
from toy import EXACT, backward, full_weights, make_lm, shard, tokens_of

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights import fingerprint, freshness
from hf_zeropp.fsdp.weights.weight_decisions import WeightDecisions
from hf_zeropp.fsdp.weights.weight_stamp import WeightStamp

__all__ = ["WritesData", "WritesPointers"]

CONFIG = EXACT | {"hpz_size": "node", "ranks_per_node": 2}


def warm_model(rank: int) -> tuple[torch.nn.Module, ZeroPPHandle]:
    """Secondary shards filled, and the root left unsharded by a forward without backward."""
    model = shard(make_lm())
    handle = apply_zeropp(model, CONFIG)
    forward(model, rank)
    return model, handle


def forward(model: torch.nn.Module, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens_of(rank))


def sees_the_weights(model: torch.nn.Module, rank: int) -> bool:
    """Whether the next forward computes with the weights as they are (two forwards: the second uses the new copies)."""
    logits = [forward(model, rank) for _ in range(2)]
    model.reshard()
    weights = full_weights(model)
    reference = make_lm()
    reference.load_state_dict(weights)
    before = make_lm()
    assert any(not torch.equal(weights[name], param) for name, param in before.named_parameters()), "nothing changed"
    expected = forward(reference, rank)
    return all(torch.equal(one, expected) for one in logits)


# The guards, and how to take them away.


def without_fingerprints() -> contextlib.AbstractContextManager:
    return mock.patch.object(fingerprint.Fingerprint, "has_found", lambda self: False)


@contextlib.contextmanager
def without_versions():
    """Neither stamps nor fingerprints: a change of weights that is not reported is not seen."""
    with mock.patch.object(WeightStamp, "matches", lambda self, params: True), without_fingerprints():
        yield


def without_optimizer_hook() -> contextlib.AbstractContextManager:
    nothing = {"before_step": lambda self, has_closure: None, "after_step": lambda self: None}
    return mock.patch.multiple(freshness.Freshness, **nothing)


def without_invalidation() -> contextlib.AbstractContextManager:
    return mock.patch.object(WeightDecisions, "invalidate", lambda self: None)


def without_resharding() -> contextlib.AbstractContextManager:
    return mock.patch.object(Unit, "reshard", lambda self: None)


def check(rank: int, change, *guards) -> None:
    """With all guards the change shows; without these it does not."""
    model, handle = warm_model(rank)
    change(model, handle)
    assert sees_the_weights(model, rank), "stale weights"
    with contextlib.ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard())
        model, handle = warm_model(rank)
        change(model, handle)
        assert not sees_the_weights(model, rank), "the change shows even without its guard: the test cannot fail"


def step(model, optimizer_class, rank: int = 0, **kwargs) -> None:
    """Backward, a forward in between (the trap: it refills the copies with weights about to change), then the step."""
    model.reshard()  # so that the optimizer gets the root's shards
    optimizer = optimizer_class(model.parameters(), lr=0.1, **kwargs)
    backward(model, rank)
    forward(model, rank)
    optimizer.step()
