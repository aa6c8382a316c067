"""Calls of operators pass PyTorch's dispatcher by, and only where nothing stands between a call and its kernel."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zeropp import ops
from hf_zeropp.ops import register
from hf_zeropp.ops.format import Segment, WireLayout

pytestmark = pytest.mark.one_rank

LAYOUT = WireLayout([Segment(64, 8), Segment(5, None)], 32, torch.float32)
OPERATOR = torch.ops.zeropp.quantize_out


def values() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * LAYOUT.numel)


def wire() -> torch.Tensor:
    return torch.zeros(2 * LAYOUT.nbytes, dtype=torch.uint8)


def encode(input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return ops.quantize(input, LAYOUT, out=out)


@pytest.fixture
def direct_calls(monkeypatch) -> list[bool]:
    """Whether each call of an operator with ``out`` was answered by "it runs directly"."""
    answers: list[bool] = []
    ask = register.runs_directly

    def asked(*arguments):
        answers.append(ask(*arguments))
        return answers[-1]

    monkeypatch.setattr(register, "runs_directly", asked)
    return answers


def through_the_dispatcher(input: torch.Tensor) -> torch.Tensor:
    out = wire()
    OPERATOR(input, LAYOUT.spec, 1, out)
    return out


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_plain_call_runs_directly_to_the_same_bits(direct_calls, context):
    with context():
        out = wire()
        assert encode(values(), out) is out
        assert direct_calls == [True]
        assert out.any() and torch.equal(out, through_the_dispatcher(values()))


def test_a_call_for_a_new_tensor_goes_through_the_dispatcher(direct_calls):
    assert torch.equal(ops.quantize(values(), LAYOUT), encode(values(), wire()))
    assert direct_calls == [True]  # of the one with ``out``


def watching(base: type) -> tuple[type, list]:
    """Return a kind of mode that notes what is called under it, and its notes."""
    seen: list = []

    def note(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **(kwargs or {}))

    return type("Watch", (base,), {"__torch_dispatch__": note, "__torch_function__": note}), seen


@pytest.mark.parametrize("base", [TorchDispatchMode, TorchFunctionMode])
def test_a_mode_sees_the_call(direct_calls, base):
    watch, seen = watching(base)
    input, out = values(), wire()
    with watch():
        encode(input, out)
    assert {OPERATOR, OPERATOR.default} & {*seen} and direct_calls == [False]
    assert torch.equal(out, through_the_dispatcher(input))


def under_fake_tensors() -> None:
    """They are checked, and not computed."""
    with FakeTensorMode():
        with pytest.raises(ValueError, match="whole slices"):
            encode(values()[1:], wire())
        encode(values(), wire())


def behind_fake_tensors() -> None:
    with FakeTensorMode():
        input, out = values(), wire()
    encode(input, out)


def in_a_profile() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        encode(values(), wire())
    assert "zeropp::quantize_out" in {event.key for event in profile.key_averages()}


def on_a_negative_view() -> None:
    """It is resolved."""
    assert torch.equal(encode(torch._neg_view(values()), wire()), through_the_dispatcher(-values()))


def on_a_subclass() -> None:
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    encode(values().as_subclass(Watched), wire())
    assert {OPERATOR, OPERATOR.default} & {*seen}


WAYS = {
    "under fake tensors": under_fake_tensors,
    "behind fake tensors": behind_fake_tensors,
    "in a profile": in_a_profile,
    "on a negative view": on_a_negative_view,
    "on a subclass": on_a_subclass,
    "with autograd": lambda: encode(values().requires_grad_(), wire()),
    "on meta": lambda: encode(values().to("meta"), wire().to("meta")),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_stands_between_sees_the_call(direct_calls, way):
    WAYS[way]()
    assert direct_calls and not any(direct_calls)


def test_a_compiler_sees_the_call():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    input, out = values(), wire()
    torch.compile(encode, fullgraph=True, backend=backend)(input, out)
    assert [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"] == [OPERATOR]
    assert torch.equal(out, through_the_dispatcher(input))
