#!/usr/bin/env bash
# Runs tiny models of every architecture in every mode, and writes scripts/results/models.md: some 20 minutes on 2 cores.
# Families named on the command line are run anew: bash scripts/zoo.sh llama mixtral
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="tests/helpers:tests/zoo${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" tests/zoo/report.py "$@"
