#!/usr/bin/env bash
# Build the CPU kernels for aarch64, and compare them with this machine's, byte by byte, under emulation.
#
#   bash scripts/test_aarch64.sh    # some ten minutes on 2 cores, most of them for the tests that are recorded
#
# The operators' tests run here first, with the baseline kernels of this machine, and every call of a kernel is recorded: its arguments,
# and the memory before and after. Then the same calls are made under qemu. No PyTorch for aarch64 is needed.
#
# Needs Debian or Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user cmake ninja-build. An aarch64 Python is taken out of the
# packages of the distribution, into runs/aarch64; nothing is installed.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test

OUT="$(mkdir -p runs/aarch64 && cd runs/aarch64 && pwd)"
for tool in aarch64-linux-gnu-g++ qemu-aarch64 cmake ninja apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user cmake ninja-build."
done

fetch_python() {
    [ -x "$OUT/root/usr/bin/python3" ] && return
    # A state of apt's own, so that this machine's lists and installed packages stay as they are.
    local state="$OUT/apt" options
    mkdir -p "$OUT/root" "$state/lists/partial" "$state/archives/partial"
    touch "$state/status"
    options=(-q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$state" -o "Dir::State::status=$state/status"
        -o "Dir::State::lists=$state/lists" -o "Dir::Cache::archives=$state/archives" -o Debug::NoLocking=1)
    apt-get "${options[@]}" update >/dev/null
    apt-get "${options[@]}" install -y --download-only --no-install-recommends python3 libstdc++6 >/dev/null
    for package in "$state"/archives/*.deb; do dpkg-deb -x "$package" "$OUT/root"; done
}

cmake -S ops -B "$OUT/build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DZEROPP_CUDA=OFF >/dev/null
cmake --build "$OUT/build" --clean-first | tail -n 1
fetch_python
ZEROPP_KERNELS=baseline ZEROPP_RECORD="$OUT/calls.pickle" PYTHONPATH=tests/ops/aarch64 "$PYTHON" -m pytest -q -p record \
    -p no:cacheprovider tests/ops/test_wire.py tests/ops/test_frozen_format.py tests/ops/test_changes.py
QEMU_LD_PREFIX="$OUT/root" qemu-aarch64 "$OUT/root/usr/bin/python3" tests/ops/aarch64/replay.py \
    "$OUT/build/libzeropp_cpu.so" "$OUT/calls.pickle"
