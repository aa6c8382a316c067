#!/usr/bin/env bash
# Check this package on the GPUs of this machine, in under nine minutes: tests, kernels beside a copy, training beside FSDP2.
#
#   bash scripts/gpu_check.sh                 # writes runs/gpu_check: summary.md, summary.json, a log and a page per stage
#   bash scripts/gpu_check.sh my_folder
#   bash scripts/gpu_check.sh my_folder --only training --device cpu   # one stage; training also runs without a GPU
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
exec "$PYTHON" scripts/benchmarks/gpu_check.py "$@"
