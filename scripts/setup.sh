# Sourced by quickstart.sh and test.sh: makes $PYTHON an interpreter that has torch and this package.
#
# An active virtual environment, or one whose python3 is first on PATH, is used as it is; otherwise .venv in the clone is made
# (seeing the system's packages when torch is among them, so that an existing torch is kept). It is quick when nothing has changed
# since the last time. TORCH_SPEC overrides what is installed where torch is absent, HF_ZEROPP_PYTHON the interpreter.
# HF_ZEROPP_OFFLINE=1 downloads nothing: it installs this package alone, or names what is missing for that.

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
    local given="${HF_ZEROPP_PYTHON:-python3}"
    if [ -n "${VIRTUAL_ENV:-}" ] || [ -n "${CONDA_PREFIX:-}" ]; then
        PYTHON="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python"
    # Images of containers put an environment's python3 on PATH, and set neither variable.
    elif "$given" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; then
        PYTHON="$(command -v "$given")"
    else
        make_venv
        return
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "The active environment has $("$PYTHON" --version); Python 3.10 or newer is needed."
}

make_venv() {
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

has_compiler() {
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null
}

# On PATH, or as a package of the environment, where the build looks as well.
has_program() {
    command -v "$1" >/dev/null || "$PYTHON" -c "import $1" 2>/dev/null
}

# Prints the names that are not installed, among those that pyproject.toml has for the package and its build, or for an extra.
missing_packages() {
    "$PYTHON" - "$@" <<'MISSING'
import re
import sys
from importlib import metadata

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
extras = settings["project"]["optional-dependencies"]
needed = ["pip", *settings["build-system"]["requires"], *settings["project"]["dependencies"]]
for text in extras[sys.argv[1]] if sys.argv[1:] else needed:
    name = re.match(r"[\w.-]+", text)[0]
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        print(name, end=" ")
MISSING
}

# Installs the package itself, into an environment that has all it needs. The packages of the extra may be missing.
install_offline() {
    local missing
    missing="$(missing_packages)"
    if has_compiler; then
        has_program cmake || missing+="cmake "
        has_program ninja || has_program make || missing+="ninja "
    fi
    [ -z "$missing" ] || fail "HF_ZEROPP_OFFLINE=1 downloads nothing, and the environment of $PYTHON lacks: $missing"
    missing="$(missing_packages "$1")"
    [ -z "$missing" ] || echo "setup: not installed, so what needs them will not run: $missing" >&2
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation --editable .
}

install_package() {
    local extras="$1" stamp current
    stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.hf_zeropp_$extras"
    [ "${HF_ZEROPP_OFFLINE:-0}" = 0 ] || stamp+="_offline"  # it does not say that the extra is there
    # An editable install knows modules by their paths, so it is renewed when one is added or moves.
    current="$({ cat pyproject.toml $(find ops -type f | sort); find hf_zeropp -name '*.py' | sort; } | sha256sum) $(pwd)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$current" ] && "$PYTHON" -c 'import torch, hf_zeropp' 2>/dev/null; then
        return
    fi
    has_compiler ||
        echo "setup: no C++ compiler found, so the slow PyTorch kernels will run. Install g++ for the compiled ones." >&2
    # make compiles one file after the other unless it is told. ninja, where there is one, takes all cores by itself.
    export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN)}"
    if [ "${HF_ZEROPP_OFFLINE:-0}" != 0 ]; then
        echo "setup: installing hf_zeropp, and nothing else"
        install_offline "$extras"
    else
        if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
            echo "setup: installing $TORCH_SPEC"
            "$PYTHON" -m pip install --quiet --disable-pip-version-check "$TORCH_SPEC"
        fi
        echo "setup: installing hf_zeropp and what it needs"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
    fi
    echo "$current" >"$stamp"
}
