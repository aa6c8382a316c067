#!/usr/bin/env bash
# Build the source distribution and from it a wheel, check what a registry would show of them, and use the wheel where there is no
# compiler: in a fresh virtual environment, with nothing on the PATH but that environment.
#
#   bash scripts/check_wheel.sh            # some 40 seconds, and no network
#   bash scripts/check_wheel.sh DIST       # keeps both files in the folder DIST
#   DEPENDENCIES=A:B bash scripts/check_wheel.sh   # another PyTorch: site-packages of other environments, the first one that has it
#
# The fresh environment sees the libraries of the active one (PyTorch and the others), and not its hf_zeropp.
# Uses the active environment (or .venv) with the `test` extra; PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON="$(command -v python || command -v python3)"
    [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
PYTHON="$(realpath --no-symlinks "$(command -v "$PYTHON")")"
ROOT="$(pwd)"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
DIST="$(realpath "${1:-$WORK/dist}")"
DEPENDENCIES="${DEPENDENCIES:-$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}"

# In another folder, where `build` is the module and not the folder of CMake's files. The wheel is made from the source distribution.
cd "$WORK"
"$PYTHON" -m build --no-isolation --outdir "$DIST" -C cmake.define.ZEROPP_CUDA=OFF "$ROOT" >build.log 2>&1 ||
    { tail -n 50 build.log >&2; exit 1; }
"$PYTHON" -m twine check --strict "$DIST"/hf_zeropp-*

"$PYTHON" -m venv --without-pip fresh
"$PYTHON" -m pip --python fresh/bin/python install --quiet --no-deps --no-index --disable-pip-version-check "$DIST"/hf_zeropp-*.whl
tr : "\n" <<<"$DEPENDENCIES" >"$(fresh/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
cp "$ROOT/scripts/smoke.py" .
env -i PATH="$WORK/fresh/bin" HOME="$WORK" fresh/bin/python smoke.py
