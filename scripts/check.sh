#!/usr/bin/env bash
# Everything that can be said of the code without running it: lint, format, types, and the rules of tests/style, file by file.
# tests/test_check.py calls it, so the suite runs it once.
# Uses the active environment (or .venv) with the `test` extra; PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON="$(command -v python || command -v python3)"
    [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
folders=(hf_zeropp scripts tests examples)
status=0
"$PYTHON" -m ruff check "${folders[@]}" || status=1
"$PYTHON" -m ruff format --check "${folders[@]}" || status=1
"$PYTHON" -m mypy || status=1
"$PYTHON" -m pytest -q -p no:cacheprovider tests/style || status=1
exit $status
