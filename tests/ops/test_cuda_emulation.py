"""The sources of ops/cuda, run on a CPU by tests/ops/cuda_emulation and compared with the CPU kernels, bit for bit.

What it shows: arithmetic, indexing, and that lanes meet where they must. What it does not: anything of the hardware, of
ptxas, or of speed. ZEROPP_EMULATED_CASES raises the number of cases (default: some four thousand comparisons, some 15 seconds).
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_emulation
import pytest
import torch
from changes_cases import check_case, check_damage, make_changes_case
from op_cases import OTHER_BLOCKS, ROW_BLOCKS, SPECIALS, Call, Case, boundary_values, make_case, scale_significands
from op_checks import Guarded, check_call, check_everything, same_bits

from hf_zeropp import ops
from hf_zeropp.ops import frozen_format, frozen_reference, native
from hf_zeropp.ops.format import FLOAT_DTYPES, LARGEST_LEVEL, QMAX, Segment, WireLayout
from hf_zeropp.ops.frozen_format import FrozenFormat
from hf_zeropp.ops.kernels import kernels_of
from hf_zeropp.ops.register import OPERATORS

CASES = int(os.environ.get("ZEROPP_EMULATED_CASES", 720))  # with six operators each
GROUPS = 12

pytestmark = [
    pytest.mark.skipif(cuda_emulation.compiler() is None, reason="no C++ compiler for the emulation"),
    pytest.mark.skipif(ops.kernel_info().cpu == "reference", reason="no compiled CPU kernels to compare with"),
    pytest.mark.one_rank,
]


@pytest.fixture(scope="module")
def emulated() -> ops.CompiledKernels:
    return ops.CompiledKernels(cuda_emulation.library(), "cuda")


def check(emulated: ops.CompiledKernels, case: Case) -> None:
    check_everything([emulated], case)


def check_quantize(emulated: ops.CompiledKernels, values: torch.Tensor, layout: WireLayout) -> None:
    num_slices = values.numel() // layout.numel
    case = Case(layout, layout, 1, num_slices, values, None, torch.float32, 1.0, 0)
    call = Call((values, layout, 1), layout)
    check_call(OPERATORS["quantize"], call, case, [emulated], "cpu", kernels_of("cpu"))


@pytest.mark.thorough("[4-9]", "1?")
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_cases(emulated, group):
    blocks = OTHER_BLOCKS if group % 4 == 3 else ROW_BLOCKS
    for seed in range(group * CASES // GROUPS, (group + 1) * CASES // GROUPS):
        check(emulated, make_case(seed, blocks))


@pytest.mark.parametrize("bits", QMAX)
def test_every_scale_and_every_boundary(emulated, bits):
    """[Note: division by reciprocal]: every significand of a scale, every boundary of codes, and the floats beside it."""
    values = boundary_values(bits)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % 31))
    # In each block of 32 first the value that gives the block its scale.
    largest = (scale_significands() * LARGEST_LEVEL[bits])[:, None, None]
    blocks = values.view(128, -1, 31)
    blocks = torch.cat([largest.expand(-1, blocks.shape[1], -1), blocks], dim=2).flatten()
    # Up to blocks with infinities, and scales whose reciprocal is a denormal.
    for exponent in (0, -90, 100, 121, 122, 125, 126, 127):
        check_quantize(emulated, blocks * 2.0**exponent, WireLayout([Segment(blocks.numel(), bits)], 32))


def test_every_16_bit_float(emulated):
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for raw_dtype in FLOAT_DTYPES:
        segments = [Segment(1 << 14, 8), Segment(1 << 14, 4), Segment(1 << 15, None)]
        layout = WireLayout(segments, 64, raw_dtype)
        for dtype in (torch.bfloat16, torch.float16):
            for values in (patterns.view(dtype), patterns.flip(0).view(dtype)):
                check(emulated, Case(layout, layout, 1, 1, values, None, dtype, 1.0, 0))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_distance_from_an_aligned_address(emulated, dtype):
    """A small parameter shifts those behind it: whole tiles of them are moved as the aligned vectors around them."""
    for elements in range(1, 16 // dtype.itemsize):
        layout = WireLayout([Segment(elements, None), Segment(3000, 8), Segment(1025, None), Segment(2048, 4)], 64)
        values, initial = torch.randn(2, layout.numel).to(dtype), torch.randn(1, layout.numel)
        case = Case(layout, layout, 2, 1, values, initial, dtype, 0.5, 0)
        # Elements behind the last one lie in the same 16 bytes, and must stay as they are: ``check`` guards them.
        check(emulated, case)
        check(emulated, dataclasses.replace(case, offset=elements))


@pytest.mark.parametrize("bits", QMAX)
def test_sums_of_products_that_overflow(emulated, bits):
    """The product of a code and a scale is infinite there, which a fused multiply-add of the other sign would hide."""
    torch.manual_seed(bits)
    layout, slices = WireLayout([Segment(2000, bits)], 32), 6
    values = (torch.rand(slices, 2000) - 0.5).sign() * 3.4028e38
    values[1, :1000], values[3] = torch.randn(1000), 1e-3  # most sources of a tile are of usual sizes
    initial = torch.randn(2000).sign() * 3e38
    decoded = ops.dequantize(ops.quantize(values.view(-1), layout), layout, dtype=torch.float32)
    assert decoded.isinf().any() == (bits not in (8, 2)), "at all other widths the scale of the largest float rounds up"
    check(emulated, Case(layout, layout, slices, 1, values.view(-1), initial, torch.float32, 0.5, 0))


@pytest.mark.parametrize("parts", [31, 32, 33, 64, 385, 1023, 1025])
def test_tiles_of_many_parts(emulated, parts):
    """Warps find their tile among the parts in rounds of 32 places, also where parts are of very different sizes."""
    segments = [
        Segment(1 + (37 * index) % 50 + 1500 * (index % 97 == 5), (8, 4, None)[index % 3]) for index in range(parts)
    ]
    layout = WireLayout(segments, 32)
    check_quantize(emulated, torch.randn(2 * layout.numel), layout)


def test_more_slices_than_rows_of_a_grid(emulated):
    check_quantize(emulated, torch.randn(65_536 + 5), WireLayout([Segment(1, None)], 32))


# ---- Frozen weights.


def run(emulated: ops.CompiledKernels, name: str, *arguments: Any, offset: int = 0) -> list[Guarded]:
    """Run an operator. Returns the memory that it fills, between guards that are intact."""
    result = OPERATORS[name].check(arguments)
    outs = [Guarded(torch.Size(shape).numel(), dtype, offset) for shape, dtype in result.filled]
    emulated.run(OPERATORS[name], arguments, result.counts, [out.tensor for out in outs])
    assert all(out.is_intact() for out in outs)
    return outs


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(5, 7, 32), (3, 33, 32), (4, 384, 128), (3, 2048, 512), (7, 131, 160), (33, 96, 32), (3, 576, 160)],
)
def test_frozen_pack_and_unpack(emulated, bits, rows, columns, block):
    for seed in range(20):
        weight = frozen_weight(rows, columns, seed)
        for dtype in FLOAT_DTYPES:
            values = weight.to(dtype)
            codes, scales = frozen_reference.pack(values, bits, block)
            ours = run(emulated, "frozen_pack", values, bits, block)
            assert torch.equal(ours[0].tensor, codes.flatten()) and torch.equal(ours[1].tensor, scales.flatten())
            (decoded,) = run(emulated, "frozen_unpack", codes, scales, columns, bits, block, dtype, offset=seed % 2)
            assert same_bits(decoded.tensor, frozen_reference.unpack(codes, scales, columns, bits, block, dtype))


@pytest.mark.parametrize("block", [64, 128])
def test_scales_of_frozen_weights_may_begin_at_an_odd_address(emulated, block):
    """They do as views into larger buffers. The fast kernels read them as numbers of 16 bits, which the address forbids."""
    format, weight, x = FrozenFormat(4, block), torch.randn(5, 256), torch.ones(2, 256)
    arguments = (weight, 4, block)
    codes, scales = run(emulated, "frozen_pack", *arguments, offset=1)
    expected = frozen_format.pack(weight, format)
    assert torch.equal(codes.tensor, expected[0].flatten()) and torch.equal(scales.tensor, expected[1].flatten())
    odd = scales.tensor.view_as(expected[1])
    (decoded,) = run(emulated, "frozen_unpack", expected[0], odd, 256, 4, block, torch.float32)
    assert same_bits(decoded.tensor, frozen_format.unpack(*expected, 256, format, torch.float32))
    product = emulated_matmul(emulated, x, expected[0], odd, format)
    assert torch.equal(product, frozen_format.matmul(x, *expected, 256, format))


def frozen_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 10.0 ** (seed % 7 - 3)
    if seed % 3 == 1:
        weight[torch.rand(rows, columns, generator=generator) < 0.01] = SPECIALS[seed % 13]
    if seed % 3 == 2:
        weight[0] = 0
    return weight


def emulated_matmul(emulated, x, codes, scales, format, bias=None):
    arguments = (x, codes, scales, bias, x.shape[1], format.bits, format.block_of(x.shape[1]))
    (product,) = run(emulated, "frozen_matmul", *arguments)
    return product.tensor.view(len(x), -1)


@pytest.mark.thorough("*-[14589]-?", "*-17-?")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_inputs", [1, 3, 4, 5, 8, 9, 17, 32])
@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(5, 128, 128), (33, 1280, 128), (64, 2304, 256), (40, 1024, 512), (17, 8320, 128)],
)
def test_matmul_by_tensor_cores_is_near_the_exact_product(emulated, bits, num_inputs, rows, columns, block):
    """Within the bound that [Note: tensor cores for a few rows] states, of sum |x w|, and one rounding to the dtype."""
    format = FrozenFormat(bits, block)
    codes, scales = frozen_format.pack(torch.randn(rows, columns), format)
    weight = frozen_format.unpack(codes, scales, columns, format, torch.float32).double()
    bias = torch.randn(rows)
    for dtype in FLOAT_DTYPES:
        x = torch.randn(num_inputs, columns).to(dtype)
        product = emulated_matmul(emulated, x, codes, scales, format, bias).double()
        exact = x.double() @ weight.T + bias.double()
        bound = x.double().abs() @ weight.abs().T + bias.abs().double()
        # Both halves of 16-bit inputs are exact: only additions round, and the result.
        allowed = (
            2.0**-15 * bound if dtype == torch.float32 else 2.0**-20 * bound + torch.finfo(dtype).eps / 2 * exact.abs()
        )
        assert ((product - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_matmul_keeps_infinities_and_nans(emulated, dtype):
    format = FrozenFormat(4, 128)
    weight = torch.randn(20, 256)
    weight[3, 200] = float("nan")
    codes, scales = frozen_format.pack(weight, format)
    for num_inputs in (1, 11):
        x = torch.ones(num_inputs, 256, dtype=dtype)
        product = emulated_matmul(emulated, x, codes, scales, format)
        assert product[:, 3].isnan().all() and product.isfinite().sum() == 19 * num_inputs
        x[0, 0] = float("inf")
        product = emulated_matmul(emulated, x, codes, scales, format)
        assert not product[0].isfinite().any() and product[1:].isfinite().sum() == 19 * (num_inputs - 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_matmul_of_the_largest_inputs_equals_the_cpu(emulated, bits):
    """They are beyond the largest bf16, to whose infinity they would round. The CPU's product with a code above 1 is infinite."""
    format, weight = FrozenFormat(bits, 128), torch.randint(-2, 3, (20, 256)).float()
    weight[:, ::128] = 127 if bits == 8 else 7  # so that scales are 1
    codes, scales = frozen_format.pack(weight, format)
    x = torch.zeros(3, 256)
    x[0, 9], x[1, 9], x[2, 9] = 3.4e38, -3.394e38, 3.38e38
    product, expected = (
        emulated_matmul(emulated, x, codes, scales, format),
        frozen_format.matmul(x, codes, scales, 256, format),
    )
    assert expected.isfinite().any() and not expected.isnan().any()
    torch.testing.assert_close(product, expected, rtol=2.0**-15, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns", "block"), [(5, 7, 32), (6, 100, 32), (9, 131, 160), (3, 192, 64)])
def test_matmul_of_other_blocks_equals_the_cpu(emulated, bits, rows, columns, block):
    format = FrozenFormat(bits, block)
    codes, scales = frozen_format.pack(torch.randn(rows, columns), format)
    for num_inputs, dtype in ((1, torch.float32), (4, torch.bfloat16), (32, torch.float16)):
        x = torch.randn(num_inputs, columns).to(dtype)
        for bias in (None, torch.randn(rows)):
            expected = frozen_format.matmul(x, codes, scales, columns, format, bias)
            assert torch.equal(emulated_matmul(emulated, x, codes, scales, format, bias), expected)


# ---- Changed words.


@pytest.mark.parametrize("group", range(4))
def test_changed_words(emulated, group):
    """Wires as on a CPU, and the same of damaged wires: those that are read beyond their end stop this process."""
    noticed = 0
    for seed in range(10 * group, 10 * (group + 1)):
        case = make_changes_case(seed, max_words=12_000)
        check_case(emulated, kernels_of("cpu"), case)
        noticed += check_damage(emulated, kernels_of("cpu"), case, seed)
    assert noticed


# ---- Devices.


@pytest.mark.parametrize(
    ("devices", "driver", "error"),
    [
        ([80], 13000, 0),
        ([100], 13000, 0),  # from PTX
        ([100], 12080, 222),
        ([75], 13000, 209),
        ([75, 100, 86], 12080, 0),  # one that runs is enough
        ([], 13000, 100),
    ],
)
def test_devices_are_found_by_their_numbers_alone(devices, driver, error):
    """The emulated library has machine code for 8.0 and 9.0, and PTX for 9.0. No function that needs a context is emulated."""
    library = cuda_emulation.library()
    (ctypes.c_int * 4).in_dll(library, "emulated_devices")[:] = [*devices, 0, 0, 0, 0][:4]
    ctypes.c_int.in_dll(library, "emulated_driver").value = driver
    count = ctypes.c_int()
    assert library.zeropp_find_devices(ctypes.byref(count)) == (native._CUDA_ERROR + error if error else 0)
    assert count.value == len(devices)


# ---- The emulation itself.

DIVERGENT = """
#include <cuda_runtime.h>
__global__ void kernel() { if (threadIdx.x < 31) __syncwarp(); }
extern "C" __attribute__((visibility("default"))) void run() {
  cudaLaunchConfig_t config = {1, 32, 0, nullptr};
  cudaLaunchKernelEx(&config, kernel);
}
"""


def test_a_lane_that_misses_a_meeting_is_found(tmp_path: Path):
    source, target = tmp_path / "divergent.cu", tmp_path / "divergent.so"
    source.write_text(DIVERGENT)
    cuda_emulation.build([source], target)
    code = f"import ctypes; ctypes.CDLL({str(target)!r}).run()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0 and "some lanes of a warp never come to a meeting" in run.stderr


def test_a_copy_that_is_not_waited_for_is_found(emulated, tmp_path: Path):
    """Each step waits for one group of copies less than it needs: it reads codes that have not arrived."""
    wait, text = "wait_for_copies<Codes::kAhead>()", (cuda_emulation.SOURCES / "frozen_matmul.cu").read_text()
    assert text.count(wait) == 1
    text = text.replace(wait, "wait_for_copies<Codes::kAhead + 1>()")
    text = re.sub(r'#include "(.+)"', lambda found: f'#include "{(cuda_emulation.SOURCES / found[1]).resolve()}"', text)
    source, target = tmp_path / "hasty.cu", tmp_path / "hasty.so"
    source.write_text(text)
    cuda_emulation.build([source], target)
    hasty = ops.CompiledKernels(ctypes.CDLL(str(target)), "cuda")
    format = FrozenFormat(4, 128)
    codes, scales = frozen_format.pack(frozen_weight(32, 4096, 0), format)
    x = torch.randn(1, 4096)
    right, wrong = (emulated_matmul(kernels, x, codes, scales, format) for kernels in (emulated, hasty))
    assert not torch.equal(right, wrong)
