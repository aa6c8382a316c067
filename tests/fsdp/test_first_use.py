"""``on_first_use``: an action runs once, before the first forward pass of a model or of a part of it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn as nn

from hf_zeropp.fsdp.weights.first_use import on_first_use


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("call", ["model", "submodule", "compiled"])
def test_first_use_of_a_model_or_of_a_part_of_it(call):
    model, other, calls = Outer(), Outer(), []
    on_first_use(model, lambda: calls.append("used"))
    other(torch.ones(1, 2))
    assert calls == []
    model.register_forward_pre_hook(lambda module, args: calls.append("the model's own hook"), prepend=True)
    used = {"model": model, "submodule": model.inner, "compiled": torch.compile(model, backend="eager")}[call]
    for _ in range(2):
        used(torch.ones(1, 2))
    assert calls[0] == "used", "runs ahead of the model's own hooks"
    assert calls.count("used") == 1


def test_a_model_that_was_used_goes_without_the_garbage_collector():
    model = Outer()
    kept = weakref.ref(model)
    on_first_use(model, lambda model=model: model.train())
    model(torch.ones(1, 2))
    gc.disable()
    try:
        del model
        assert kept() is None
    finally:
        gc.enable()
