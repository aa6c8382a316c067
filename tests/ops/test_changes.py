"""The wire of changed words: kernels against the reference bit for bit, damaged wires, sizes, and errors."""

from __future__ import annotations

import pytest
import torch
from changes_cases import ChangesCase, as_bytes, check_case, check_damage, make_changes_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import COMPILED, needs_compiled
from torch._subclasses import FakeTensorMode

from hf_zeropp import ops
from hf_zeropp.ops import changes_format, changes_reference, native
from hf_zeropp.ops.changes_reference import BLOCK_WORDS, ENTRY_BYTES, WHOLE
from hf_zeropp.ops.reference_kernels import ReferenceKernels

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.one_rank]
SEEDS = st.integers(0, 2**32 - 1)
KERNELS = [ops.CompiledKernels(native.cpu_library()[0], name) for name in COMPILED]
MANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(SEEDS)
def test_kernels_equal_the_reference_bit_for_bit_and_give_back_every_bit(seed):
    case = make_changes_case(seed, max_words=12_000)
    for kernels in (*KERNELS, ReferenceKernels()):
        check_case(kernels, ReferenceKernels(), case)


@needs_compiled
@MANY
@given(SEEDS)
def test_damage_is_noticed_alike_or_does_no_harm(seed):
    """Bit flips, cuts and wrong sizes. The wire ends where memory ends, so a read behind it would end this process."""
    case = make_changes_case(seed, max_words=12_000)
    for kernels in KERNELS:
        check_damage(kernels, ReferenceKernels(), case, seed)


@needs_compiled
def test_every_step_between_special_words():
    """Each of the 65536 words becomes its neighbours, its negative, and each special word."""
    words = torch.arange(1 << 16)
    for target in (
        (words + 1) % 0x10000,
        words ^ 0x8000,
        words ^ 0xFFFF,
        *(torch.full_like(words, s) for s in (0, 0x7FC1)),
    ):
        case = ChangesCase(as_bytes(target), as_bytes(words), 1, 0, f"to {target[:3]}")
        for kernels in KERNELS:
            check_case(kernels, ReferenceKernels(), case)


@needs_compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads, restore_kernels):
    """More blocks than one thread takes, over the boundary of slices; the payloads of all are joined."""
    before = torch.get_num_threads()
    old = torch.randn(3, 70_001).bfloat16()
    new = torch.where(torch.rand(old.shape) < 0.05, old * 1.01, old)
    new[1] = torch.randn(70_001).bfloat16()
    case = ChangesCase(bytes_of(new), bytes_of(old), 3, 0, "three slices")
    try:
        torch.set_num_threads(threads)
        check_case(KERNELS[0], ReferenceKernels(), case)
    finally:
        torch.set_num_threads(before)


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    return words.flatten().view(torch.uint8)


# ---- Sizes.


@pytest.mark.parametrize("words", [0, 1, BLOCK_WORDS, BLOCK_WORDS + 1, 50_001])
def test_no_wire_is_larger_than_its_capacity(words):
    """Random words in place of others: every block is stored whole."""
    new, old = (torch.randint(-(2**15), 2**15, (words,)).to(torch.int16) for _ in range(2))
    sizes, wire = ops.encode_changes(new, old)
    blocks = changes_reference.num_blocks(2 * words)
    assert int(sizes[0]) <= wire.shape[1] == changes_format.capacity(2 * words) <= 2 * words + 2 + ENTRY_BYTES * blocks
    if words >= 1000:
        assert int(sizes[0]) <= 1.01 * 2 * words
        assert (changes_reference.read_table(wire[0], blocks)[:-1] == WHOLE).all()
    assert torch.equal(updated(wire, sizes, old), new)


def updated(wire: torch.Tensor, sizes: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    base = old.clone()
    ops.apply_changes(wire, sizes, base)
    return base


def test_nothing_changed_takes_a_table():
    words = torch.randn(100_000).bfloat16()
    sizes, wire = ops.encode_changes(words, words.clone())
    assert int(sizes[0]) == 13 * ENTRY_BYTES and not wire[0, : int(sizes[0])].any()


@pytest.fixture(scope="module")
def trained():
    """A small Llama and its optimizer, trained for some steps; and a function that takes one more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = torch.frombuffer(bytearray(changes_format.__doc__.encode()), dtype=torch.uint8).long()

    def step(rate: float) -> None:
        tokens = torch.stack([text[at : at + 32] for at in torch.randint(0, len(text) - 32, (4,)).tolist()])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    for _ in range(30):
        step(2e-3)
    return model, step


def flat_words(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).bfloat16()


@pytest.mark.parametrize(
    ("rate", "densities", "limit"), [(1e-6, (0.001, 0.02), 2.0), (1e-5, (0.01, 0.1), 1.6), (1e-4, (0.1, 0.5), 1.3)]
)
def test_steps_of_adamw_take_few_bytes(trained, rate, densities, limit):
    """The bf16 values of fp32 masters before and after a step, at the rates of fine-tuning."""
    model, step = trained
    for _ in range(2):
        step(rate)
    old = flat_words(model)
    step(rate)
    new = flat_words(model)
    changed = int((new != old).sum())
    assert densities[0] < changed / new.numel() < densities[1], changed / new.numel()
    sizes, wire = ops.encode_changes(new, old)
    print(f"rate {rate}: density {changed / new.numel():.4f}, {int(sizes[0]) / changed:.3f} bytes a change")
    assert int(sizes[0]) <= limit * changed
    assert torch.equal(updated(wire, sizes, old), new)


# ---- Errors.

OLD = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(1)).bfloat16()
NEW = torch.where(torch.arange(10_000) % 20 == 0, OLD * 1.01, OLD)


@pytest.mark.parametrize("kernels", ops.kernel_info().available)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda wire, sizes: sizes[1].sub_(4), "apply_changes: slice 1 of 2 is damaged in its table or size"),
        (lambda wire, sizes: sizes[0].fill_(4), "slice 0 of 2 is damaged in its table or size"),
        (lambda wire, sizes: sizes[0].fill_(1 << 40), "slice 0 of 2 is damaged in its table or size"),
        (lambda wire, sizes: wire[1, 3].fill_(0x40), "slice 1 of 2 is damaged in its table or size"),
        (lambda wire, sizes: wire[1, 8].bitwise_xor_(1), "slice 1 of 2 is damaged in its block 0"),
    ],
)
def test_damage_is_explained(restore_kernels, kernels, change, match):
    ops.set_kernels(kernels)
    sizes, wire = ops.encode_changes(NEW, OLD, 2)
    change(wire, sizes)
    with pytest.raises(ValueError, match=match):
        ops.apply_changes(wire, sizes, OLD.clone())


@pytest.mark.parametrize("kernels", ops.kernel_info().available)
def test_positions_must_rise(restore_kernels, kernels):
    """Words 0 and 1 change, and have the same high part. The low part of word 1 is one bit, in byte 8."""
    ops.set_kernels(kernels)
    old = torch.zeros(BLOCK_WORDS, dtype=torch.int16)
    new = old.clone()
    new[:2] = 1
    sizes, wire = ops.encode_changes(new, old)
    assert wire[0, 8] == 0x10 and torch.equal(updated(wire, sizes, old), new)
    wire[0, 8] = 0
    with pytest.raises(ValueError, match="slice 0 of 1 is damaged in its block 0"):
        updated(wire, sizes, old)


def test_blocks_beside_a_damaged_one_are_applied():
    sizes, wire = ops.encode_changes(NEW, OLD, 2)
    wire[0, 8] ^= 1
    base = OLD.clone()
    with pytest.raises(ValueError, match="slice 0 of 2 is damaged in its block 0"):
        ops.apply_changes(wire, sizes, base)
    assert torch.equal(base[0, :BLOCK_WORDS], OLD[0, :BLOCK_WORDS]) and torch.equal(base[1], NEW[1])
    assert torch.equal(base[0, BLOCK_WORDS:], NEW[0, BLOCK_WORDS:])


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "^encode_changes: expected num_slices >= 1 .* got 0", lambda: ops.encode_changes(NEW, OLD, 0)),
        (ValueError, "whole 16-bit words, got 3 for 40000 bytes", lambda: ops.encode_changes(NEW, OLD, 3)),
        (ValueError, "base with 40000 elements, got 20000", lambda: ops.encode_changes(NEW, OLD[0])),
        (ValueError, "input contiguous, got shape .10000, 2.", lambda: ops.encode_changes(NEW.t(), OLD)),
        (ValueError, "offsets with 2 elements, got 1", lambda: apply_two(torch.zeros(1, dtype=torch.int64))),
        (TypeError, "offsets of dtype torch.int64, got torch.int32", lambda: apply_two(torch.zeros(2).int())),
        (TypeError, "wire of dtype torch.uint8", lambda: ops.apply_changes(NEW, torch.zeros(2).long(), OLD)),
    ],
)
def test_errors_say_expected_and_got(error, match, call):
    with pytest.raises(error, match=match):
        call()


def apply_two(offsets: torch.Tensor) -> None:
    sizes, wire = ops.encode_changes(NEW, OLD, 2)
    ops.apply_changes(wire, sizes, OLD.clone(), offsets)


# ---- Within PyTorch.


def test_buffers_are_used_again():
    buffers = changes_format.changes_buffers(OLD.nbytes // 2, 2, OLD.device)
    for new in (NEW, OLD, NEW):
        sizes, wire = ops.encode_changes(new, OLD, 2, out=buffers)
        assert sizes.data_ptr() == buffers[0].data_ptr() and wire.data_ptr() == buffers[1].data_ptr()
        assert torch.equal(updated(wire, sizes, OLD), new)


def test_operators_trace():
    """Fakes give what the kernels give. Bytes behind a wire differ from call to call, so only schemas and fakes are checked."""
    sizes, wire = ops.encode_changes(NEW, OLD, 2)
    offsets = torch.arange(2) * wire.shape[1]
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.zeropp.apply_changes.default, (wire, offsets, sizes, bytes_of(OLD).clone()), test_utils=utilities
    )
    torch.library.opcheck(
        torch.ops.zeropp.encode_changes.default, (bytes_of(NEW), bytes_of(OLD), 2), test_utils=utilities
    )
    with FakeTensorMode():
        words = torch.empty(4, 9000, dtype=torch.bfloat16)
        sizes, wire = ops.encode_changes(words, torch.empty_like(words), 4)
        assert sizes.shape == (4,) and wire.shape == (4, changes_format.capacity(18_000))
