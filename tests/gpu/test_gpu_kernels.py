"""The CUDA kernels on a GPU, against those of the CPU, bit for bit: `pytest -m gpu`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from changes_cases import check_case, check_damage, make_changes_case
from op_cases import OTHER_BLOCKS, ROW_BLOCKS, Case, make_case
from op_checks import check_everything, same_bits

from hf_zeropp import ops
from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.format import FLOAT_DTYPES, QMAX, Segment, WireLayout
from hf_zeropp.ops.frozen_format import FrozenFormat
from hf_zeropp.ops.kernels import kernels_of

pytestmark = pytest.mark.gpu

CASES = int(os.environ.get("ZEROPP_GPU_CASES", 1_200))
GROUPS = 12
SANITIZED = "test_sanitized_cases"


def check(case: Case) -> None:
    check_everything([kernels_of("cuda")], case, "cuda")


def test_the_kernels_are_there():
    """Everything below would pass without them, by the PyTorch reference."""
    assert ops.kernel_info().cuda_reason is None


CONTEXTS = """
import ctypes
from hf_zeropp import ops
assert ops.kernel_info().cuda_reason is None
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print("active" if active.value else "no context")
"""


def test_asking_for_the_kernels_makes_no_context():
    """Otherwise every rank that asks before ``set_device`` would hold some hundred megabytes of GPU 0."""
    run = subprocess.run([sys.executable, "-c", CONTEXTS], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "no context", run.stdout + run.stderr


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_cases(group):
    blocks = OTHER_BLOCKS if group % 4 == 3 else ROW_BLOCKS
    for seed in range(group * CASES // GROUPS, (group + 1) * CASES // GROUPS):
        check(make_case(seed, blocks, max_numel=20_000))


@pytest.mark.parametrize("seed", range(8))
def test_sanitized_cases(seed):
    check(make_case(seed, ROW_BLOCKS if seed % 2 else OTHER_BLOCKS))


@pytest.mark.parametrize("seed", range(200))
def test_changed_words(seed):
    case = make_changes_case(seed, max_words=200_000)
    check_case(kernels_of("cuda"), kernels_of("cpu"), case, "cuda")
    check_damage(kernels_of("cuda"), kernels_of("cpu"), case, seed, "cuda")


@pytest.mark.parametrize("seed", range(4))
def test_sanitized_cases_of_changed_words(seed):
    case = make_changes_case(seed)
    check_case(kernels_of("cuda"), kernels_of("cpu"), case, "cuda")
    check_damage(kernels_of("cuda"), kernels_of("cpu"), case, seed, "cuda")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_is_content(tool):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer not found")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", SANITIZED]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *tests]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("bits", [*QMAX, None])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_large_slices(bits, dtype):
    """More elements than one wave of thread blocks holds, the last tile not full."""
    sizes, widths = (9_000_000, 77, 8_000_003), (bits, None, bits)
    layout = WireLayout(map(Segment, sizes, widths), 256, dtype)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2 * layout.numel, generator=generator).to(dtype)
    check(Case(layout, layout, 2, 1, values, None, dtype, 0.5, 0))


def test_more_slices_than_rows_of_a_grid():
    layout = WireLayout([Segment(1, None)], 32)
    values = torch.randn(65_536 + 5)
    check(Case(layout, layout, 1, len(values), values, None, torch.float32, 1.0, 0))


def test_offsets_beyond_32_bits():
    layout = WireLayout([Segment(2**31 + 4096, 4)], 1024)
    values = torch.zeros(layout.numel, dtype=torch.bfloat16, device="cuda")
    roots = torch.arange(1000, device="cuda") % 15 - 7
    values[-1000:] = roots * roots.abs()
    decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.bfloat16)
    assert torch.equal(decoded[-1000:], values[-1000:]) and not decoded[:-1000].any()


def test_kernels_run_in_the_current_stream_and_the_host_does_not_wait():
    """A second of work stands before the operator in its stream; it must neither overtake it nor wait for it."""
    layout = WireLayout([Segment(1 << 20, 8)], 256)
    values, wire = torch.zeros(1 << 20, device="cuda"), torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    ops.quantize(values, layout, out=wire)  # the layout's table is on the device from here on
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            values.fill_(1.0)
            ops.quantize(values, layout, out=wire)
            done.record()
        assert not done.query(), "the host waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(wire.cpu(), ops.quantize(torch.ones(1 << 20), layout))


def test_cuda_graphs():
    """Captured and replayed: nothing in a call needs the host."""
    layout = WireLayout([Segment(100_000, 4)], 128)
    values = torch.randn(100_000, device="cuda")
    wire = ops.quantize(values, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.quantize(values, layout, out=wire)
    values.normal_()
    graph.replay()
    assert torch.equal(wire.cpu(), ops.quantize(values.cpu(), layout))


# ---- Frozen weights.

SHAPES = [(5, 7, 32), (4, 384, 128), (300, 2048, 512), (7, 131, 160), (333, 96, 32), (1000, 4096, 128), (100, 576, 128)]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns", "block"), SHAPES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_frozen_pack_and_unpack(bits, rows, columns, block, dtype):
    format = FrozenFormat(bits, block)
    weight = torch.randn(rows, columns).to(dtype)
    weight[0, : columns // 2], weight[1, 3], weight[2, 5] = 0, float("nan"), float("inf")
    codes, scales = frozen_format.pack(weight, format)
    on_gpu = frozen_format.pack(weight.cuda(), format)
    assert torch.equal(on_gpu[0].cpu(), codes) and torch.equal(on_gpu[1].cpu(), scales)
    for out_dtype in FLOAT_DTYPES:
        decoded = frozen_format.unpack(*on_gpu, columns, format, out_dtype)
        assert same_bits(decoded.cpu(), frozen_format.unpack(codes, scales, columns, format, out_dtype))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_inputs", [1, 4, 5, 32])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_matmul_is_near_the_exact_product(bits, num_inputs, dtype):
    """Tensor cores add in an order of their own: the bound is that of ops/cuda/frozen_matmul.cu, in sum |x w|."""
    for rows, columns in ((33, 1280), (4096, 4096), (1000, 11008)):
        format = FrozenFormat(bits, 128)
        codes, scales = frozen_format.pack(torch.randn(rows, columns, device="cuda"), format)
        weight = frozen_format.unpack(codes, scales, columns, format, torch.float32).double()
        x = torch.randn(num_inputs, columns, device="cuda").to(dtype)
        product = frozen_format.matmul(x, codes, scales, columns, format).double()
        exact, bound = x.double() @ weight.T, x.double().abs() @ weight.abs().T
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((product - exact).abs() <= 2.0**-15 * bound + rounding).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_matmul_of_other_blocks_equals_the_cpu(bits):
    format = FrozenFormat(bits, 64)
    codes, scales = frozen_format.pack(torch.randn(50, 200), format)
    x = torch.randn(3, 200)
    product = frozen_format.matmul(x.cuda(), codes.cuda(), scales.cuda(), 200, format)
    assert torch.equal(product.cpu(), frozen_format.matmul(x, codes, scales, 200, format))
