#!/usr/bin/env bash
# Check this package on one GPU of this machine, in nine minutes at most: bits, training over NCCL beside FSDP2, step times.
#
#   bash scripts/gpu_check.sh                       # writes runs/gpu_check: a log per stage, summary.md, all.tgz
#   bash scripts/gpu_check.sh my_folder --only nccl operators
#   bash scripts/gpu_check.sh my_folder --device cpu   # a rehearsal without a GPU
#
# Step times need root, and `ip` and `tc` (iproute2). On a machine without a network nothing is installed, where the libraries lie in
# the checkout: build them where there is nvcc, and copy the whole folder.
#
#   cmake -S ops -B build/gpu -DZEROPP_CUDA=ON && cmake --build build/gpu --parallel && cmake --install build/gpu --prefix .
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [ -e hf_zeropp/_libs/libzeropp_cuda.so ] && python3 -c 'import torch' 2>/dev/null; then
    PYTHON=python3
    [ -z "$(find ops -newer hf_zeropp/_libs/libzeropp_cuda.so -type f ! -name '*.md' | head -n 1)" ] ||
        echo "gpu_check: hf_zeropp/_libs is older than a file in ops/. Was it built before the last change?" >&2
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
else
    make_environment
    install_package test
fi
exec "$PYTHON" scripts/benchmarks/gpu_check.py "$@"
