"""A write that moves no version counter, and that nobody tells of, ends in an error on all ranks. See fingerprint.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from happens_before.clocks import Event
from staleness import CONFIG, forward
from test_beside import as_on_a_gpu
from toy import make_lm, shard, train
from two_nodes import on_four_ranks

from hf_zeropp import ZeroPPHandle, apply_zeropp, generation_mode
from hf_zeropp.fsdp.weights import fingerprint
from hf_zeropp.fsdp.weights.fingerprint import MAX_LATE, sum_of_bits

QUANTIZED = CONFIG | {"qwz_bits": 8}
DELTA = CONFIG | {"qwz_mode": "delta", "qwz_bits": 4}
KEPT_NOWHERE = CONFIG | {"hpz_size": None, "qwz_bits": 8}


def model_of(config: dict) -> tuple[torch.nn.Module, ZeroPPHandle]:
    model = shard(make_lm())
    return model, apply_zeropp(model, config)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def write(model: torch.nn.Module) -> None:
    model.blocks[1].up.weight.data.mul_(2)


def refusal(model: torch.nn.Module, rank: int) -> str:
    """Return the error that the next forward pass must raise."""
    with pytest.raises(RuntimeError, match="no version counter tells of it") as error:
        forward(model, rank)
    return str(error.value)


def scenario_a_write_is_refused_on_all_ranks(rank: int) -> None:
    """Behind a gather, behind a pass that compared, and behind steps. The error says where, and ``invalidate`` helps."""
    for config in (CONFIG, QUANTIZED, DELTA):
        for num_forwards, num_steps in ((1, 0), (2, 0), (1, 2)):
            model, handle = model_of(config)
            train(model, sgd(model), rank, range(num_steps), micro_steps=2)
            for _ in range(num_forwards):
                before = forward(model, rank)
            if rank in (1, 2):
                write(model)
            for _ in range(2):  # it is not forgotten
                said = refusal(model, rank)
                assert "unit blocks.1 on ranks [1, 2]" in said and "handle.invalidate()" in said, said
            if rank == 2:  # of any rank
                handle.invalidate()
            assert not torch.equal(forward(model, rank), before), (config, num_forwards, num_steps)
            crossed = handle.traffic.cross_node_bytes
            forward(model, rank)
            assert handle.traffic.cross_node_bytes == crossed


def scenario_where_no_copies_are_kept_nothing_is_refused(rank: int) -> None:
    """Each gather takes the weights as they are, as in stock FSDP2."""
    model, _ = model_of(KEPT_NOWHERE)
    before = forward(model, rank)
    write(model)
    assert not torch.equal(forward(model, rank), before)


def scenario_a_write_before_generation_is_refused(rank: int) -> None:
    model, _ = model_of(QUANTIZED)
    forward(model, rank)
    write(model)
    with pytest.raises(RuntimeError, match="on ranks .0, 1, 2, 3"), generation_mode(model):
        pass


def scenario_a_write_while_the_gather_is_under_way(rank: int) -> None:
    """The first forward pass starts the second block's gather and skips the block; what is written then must be found."""
    for config in (CONFIG, QUANTIZED):
        model, _ = model_of(config)
        model.path = [0]
        forward(model, rank)
        model.path = [0, 1]
        forward(model, rank)  # nothing is found where nothing was written
        model, _ = model_of(config)
        model.path = [0]
        forward(model, rank)
        model.path = [0, 1]
        write(model)
        refusal(model, rank)


def scenario_a_step_covers_what_was_written(rank: int) -> None:
    """Behind an optimizer's step weights cross anyway, and nothing has computed with old ones: clipping weights is allowed."""
    for config in (CONFIG, QUANTIZED):
        model, _ = model_of(config)
        optimizer = sgd(model)
        for step in range(2):
            train(model, optimizer, rank, [step])
            write(model)
        forward(model, rank)


def scenario_an_accelerator_tells_one_pass_later(rank: int) -> None:
    """The host does not wait for the answer. A pass has computed with old copies, also where a step follows it."""
    for config in (CONFIG, QUANTIZED):
        for has_step in (False, True):
            with as_on_a_gpu():
                model, handle = model_of(config)
                forward(model, rank)
                write(model)
                with mock.patch.object(Event, "query", lambda event: False):
                    train(model, sgd(model), rank, range(1)) if has_step else forward(model, rank)
                refusal(model, rank)
                handle.invalidate()
                forward(model, rank)


def scenario_an_accelerator_that_lags_behind_is_waited_for(rank: int) -> None:
    """The host may be two passes ahead, or none with ``ZEROPP_CHECK=1``."""
    for num_passes, env in ((MAX_LATE, {}), (0, {"ZEROPP_CHECK": "1"})):
        with (
            as_on_a_gpu(),
            mock.patch.dict(os.environ, env),
            mock.patch.object(Event, "query", lambda event: False),
        ):
            model, _ = model_of(QUANTIZED)
            forward(model, rank)
            write(model)
            for _ in range(num_passes):
                forward(model, rank)
            refusal(model, rank)


@contextlib.contextmanager
def counted() -> Iterator[mock.Mock]:
    """The number of sums inside, of all units."""
    with mock.patch.object(fingerprint, "_sum_of_words", mock.Mock(side_effect=fingerprint._sum_of_words)) as sums:
        yield sums


def scenario_each_micro_step_reads_the_shards_once(rank: int) -> None:
    """The mark of the optimizer answers in the first one of a step, and no question reads the shards again."""
    for config, micro_steps in ((CONFIG, 1), (QUANTIZED, 1), (QUANTIZED, 3)):
        model, handle = model_of(config)
        with counted() as sums:
            train(model, sgd(model), rank, range(2), micro_steps=micro_steps)
        assert sums.call_count == 2 * micro_steps * len(handle.units)


test_writes_that_move_no_counter = on_four_ranks(__name__)


def sum_of_python(tensors: list[torch.Tensor]) -> int:
    """The same sum, of Python's integers."""
    total = 0
    for tensor in tensors:
        data = tensor.view(torch.uint8).numpy().tobytes()
        first = min(-tensor.storage_offset() * tensor.itemsize % 8, len(data))
        starts = range(first, len(data) - 7, 8)
        total += sum(int.from_bytes(data[start : start + 8], "little", signed=True) for start in starts)
        total += sum(data[:first]) + sum(data[first + 8 * len(starts) :])
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_sum_of_bits_is_exact(dtype: torch.dtype) -> None:
    """Sums of tensors of many sizes, empty ones among them, which begin at any byte of an 8-byte word."""
    data = (torch.randn(300, generator=torch.Generator().manual_seed(0)) * 40).abs().to(dtype)
    for start in range(9):
        for numel in (0, 1, 7, 8, 9, 64, 101):
            tensors = [data[start : start + numel], data[:5]]
            assert sum_of_bits(tensors).item() == sum_of_python(tensors), (start, numel)
