"""Compares Triton's kernels, in Triton's interpreter on the CPU, with the kernels that run there. A program of its own.

    TRITON_INTERPRET=1 python tests/helpers/triton_cases.py FIRST_SEED END_SEED

The interpreter is chosen when Triton is imported, so the tests run this in a process of its own.
"""

from __future__ import annotations

import sys

import torch
import triton.language as tl
from op_cases import Case, make_case
from op_checks import check_everything

from hf_zeropp import ops
from hf_zeropp.ops.format import QMAX, Segment, WireLayout
from hf_zeropp.ops.kernels import triton_kernels
from hf_zeropp.ops.triton_device import decode

# Multiples of 8, powers of two and others; 63 and 100 fall back to the reference.
BLOCKS = (8, 32, 64, 96, 128, 160, 256, 512, 1000, 2048, 63, 100)


def main(first: int, end: int) -> None:
    kernels, why_not = triton_kernels("cpu")
    assert kernels is not None, why_not
    for seed in range(first, end):
        check_everything([kernels], make_case(seed, blocks=BLOCKS, max_numel=300))
    for bits in QMAX:  # the few random cases of the default suite do not meet each
        layout = WireLayout([Segment(size, bits) for size in (1, 13, 129)], 96)
        values = torch.randn(2 * layout.numel)
        check_everything([kernels], Case(layout, layout, 2, 1, values, None, torch.float32, 0.5, 0))
    check_sources_far_apart()
    print(f"{end - first} cases have the same bits")


def check_sources_far_apart() -> None:
    """The third source begins 3 GiB behind the first, where no 32 bits reach. What lies between is never touched."""
    layout, source_bytes, numel = WireLayout([Segment(32, 8)], 32), 3 << 29, 32
    values = torch.linspace(-1.0, 1.0, numel)
    near = ops.quantize(values.repeat(3), layout).view(3, -1)
    far = torch.empty(2 * source_bytes + layout.nbytes, dtype=torch.uint8)
    for source in range(3):
        far[source * source_bytes :][: layout.nbytes] = near[source]
    out = torch.zeros(numel)
    words, codes = out.view(torch.int32), layout.parts[0].codes
    decode[(1, 1)](
        far, words, words, 1.0, 0, numel, numel, 1, 1, 3, source_bytes, layout.nbytes, 0, codes,
        HAS_INITIAL=False, DTYPE=tl.float32, BITS=8, BLOCK=32, RAW=tl.bfloat16, TILE=1024,
    )  # fmt: skip
    assert torch.equal(out, ops.dequantize_sum(near, layout, num_sources=3)[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
