# Sourced by quickstart.sh and test.sh: makes $PYTHON an interpreter that has torch and this package.
#
# An active virtual environment is used as it is; otherwise .venv in the clone is made (seeing the system's packages when
# torch is among them, so that an existing torch is kept). It is quick when nothing has changed since the last time.
# TORCH_SPEC overrides what is installed where torch is absent, HF_ZEROPP_PYTHON the interpreter.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_SPEC="${TORCH_SPEC:-torch==2.13.0}"

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${HF_ZEROPP_PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.10 or newer is needed, found: $(python3 --version 2>&1 || echo none). Install one, or name it in HF_ZEROPP_PYTHON."
}

make_environment() {
    if [ -n "${VIRTUAL_ENV:-}" ] || [ -n "${CONDA_PREFIX:-}" ]; then
        PYTHON="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            fail "The active environment has $("$PYTHON" --version); Python 3.10 or newer is needed."
        return
    fi
    PYTHON=.venv/bin/python
    if [ ! -x "$PYTHON" ] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        local base flags=()
        base="$(find_python)"
        "$base" -c 'import torch' 2>/dev/null && flags=(--system-site-packages)
        echo "setup: creating .venv with $("$base" --version)"
        "$base" -m venv --clear "${flags[@]}" .venv ||
            fail "Could not create a virtual environment. On Debian and Ubuntu: apt-get install python3-venv."
    fi
}

install_package() {
    local extras="$1" stamp current
    stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.hf_zeropp_$extras"
    # An editable install knows modules by their paths, so it is renewed when one is added or moves.
    current="$({ cat pyproject.toml $(find ops -type f | sort); find hf_zeropp -name '*.py' | sort; } | sha256sum) $(pwd)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$current" ] && "$PYTHON" -c 'import torch, hf_zeropp' 2>/dev/null; then
        return
    fi
    if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
        echo "setup: installing $TORCH_SPEC"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "$TORCH_SPEC"
    fi
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
        echo "setup: no C++ compiler found, so the slow PyTorch kernels will run. Install g++ for the compiled ones." >&2
    echo "setup: installing hf_zeropp and what it needs"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    echo "$current" >"$stamp"
}
