#!/usr/bin/env bash
# Run tiny models of every architecture in every mode, and write scripts/results/models.md: half an hour on 2 cores.
# Families named on the command line are run anew: bash scripts/zoo.sh llama mixtral
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
export PYTHONPATH="tests/helpers:tests/zoo${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" tests/zoo/report.py "$@"
