"""Stochastic rounding: what it promises, and every kind of kernels against the reference, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from op_cases import COMPILED, SPECIALS, needs_compiled
from op_checks import Guarded, placed, same_bits

from hf_zeropp import ops
from hf_zeropp.ops import native, rounding
from hf_zeropp.ops.register import OPERATORS
from hf_zeropp.ops.rounding import random_word

pytestmark = pytest.mark.usefixtures("restore_kernels")
OPERATOR = OPERATORS["round_stochastic"]
# The first words of SplitMix64 for the seed 1234567, as they stand in the tests of other implementations.
PUBLISHED = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)


@pytest.fixture(params=[*COMPILED, "reference"])
def kernels(request) -> str:
    ops.set_kernels(request.param)
    return request.param


def awkward_values(numel: int) -> torch.Tensor:
    """Random bits, among them NaNs of all kinds."""
    values = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int32).view(torch.float32)
    values[: len(SPECIALS)] = torch.tensor(SPECIALS)[:numel]
    return values


def test_words_are_those_of_splitmix64():
    assert [random_word(1234567, index) % 2**64 for index in range(5)] == list(PUBLISHED)
    words = rounding._random_words(-5, 7, 100, torch.device("cpu"))
    assert words.tolist() == [random_word(-5, index) for index in range(7, 107)]


def test_it_is_right_on_average(kernels):
    """Over elements with one seed, and over seeds with one element: 5 standard deviations of a binomial distribution."""
    below, above = 1.0, 1.0 + 2.0**-7
    for share in (0.0, 1 / 65536, 0.1, 0.5, 0.9, 65535 / 65536):
        value = -(below + share * (above - below))
        many = ops.round_stochastic(torch.full((400_000,), value), seed=3)
        one = torch.cat([ops.round_stochastic(torch.full((9,), value), seed)[8:] for seed in range(4000)])
        for rounded in (many, one):
            assert set(rounded.tolist()) <= {-below, -above}
            ups = (rounded == -above).double().mean().item()
            exact = (-value - below) / (above - below)
            assert abs(ups - exact) <= 5 * math.sqrt(exact * (1 - exact) / len(rounded)) + 1e-9, (share, ups)


def test_values_of_bf16_stay(kernels):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = values[~values.isnan()]
    assert same_bits(ops.round_stochastic(finite.float(), 11), finite)
    not_a_number = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert not_a_number.isnan().all()
    assert (ops.round_stochastic(not_a_number, 11).view(torch.int16) == 0x7FC0).all()


def test_beyond_the_largest_value_it_may_become_infinite(kernels):
    largest = torch.finfo(torch.bfloat16).max
    values = torch.full((1000,), torch.finfo(torch.float32).max)
    assert set(ops.round_stochastic(values, 0).tolist()) <= {largest, math.inf}
    assert set(ops.round_stochastic(-values, 0).tolist()) <= {-largest, -math.inf}


def test_the_users_random_numbers_are_left_alone(kernels):
    before = torch.get_rng_state()
    values = torch.linspace(-1, 1, 1000)
    assert same_bits(ops.round_stochastic(values, 5), ops.round_stochastic(values, 5))
    assert not same_bits(ops.round_stochastic(values, 5), ops.round_stochastic(values, 6))
    assert torch.equal(torch.get_rng_state(), before)


def test_many_roundings_of_a_sum_do_not_stop_it(kernels):
    """What rounding to nearest cannot do: 512 additions of 2^-9 to 1 leave that at 1, and this near 2."""
    sums = torch.ones(20_000, dtype=torch.bfloat16)
    nearest = sums.clone()
    for step in range(512):
        ops.round_stochastic(sums.float() + 2.0**-9, step, out=sums)
        nearest = (nearest.float() + 2.0**-9).bfloat16()
    assert nearest.mean() == 1
    assert sums.float().mean().item() == pytest.approx(2, abs=0.005)


@needs_compiled
@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 1023, 1024, 1025, 40_001])
@pytest.mark.parametrize("offset", [0, 1])
def test_compiled_kernels_equal_the_reference(numel, offset):
    values = awkward_values(numel)
    expected = rounding.reference(values, -(2**63) + numel)
    for name in COMPILED:
        out = Guarded(numel, torch.bfloat16, offset)
        one = ops.CompiledKernels(native.cpu_library()[0], name)
        one.run(OPERATOR, [placed(values, offset), -(2**63) + numel], (numel,), [out.tensor])
        assert same_bits(out.tensor, expected), name
        assert out.is_intact()


def test_the_reference_in_pieces_equals_the_whole(monkeypatch):
    values = awkward_values(10_001)
    whole = rounding.reference(values, 9)
    monkeypatch.setattr(rounding, "PIECE", 1 << 8)
    assert same_bits(rounding.reference(values, 9), whole)


def test_errors_and_fakes():
    values = torch.randn(3, 5)
    assert ops.round_stochastic(values, 0).shape == (3, 5)
    assert ops.round_stochastic(torch.empty(0), 0).shape == (0,)
    with pytest.raises(TypeError, match="round_stochastic: expected values of dtype torch.float32"):
        ops.round_stochastic(values.bfloat16(), 0)
    with pytest.raises(TypeError, match="expected out of dtype torch.bfloat16"):
        ops.round_stochastic(values, 0, out=values.clone())
    with pytest.raises(ValueError, match="expected out with 15 elements"):
        ops.round_stochastic(values, 0, out=values[:2].bfloat16())
    with pytest.raises(ValueError, match="contiguous"):
        ops.round_stochastic(values.t(), 0)
    torch.library.opcheck(torch.ops.zeropp.round_stochastic.default, (values, 1))
