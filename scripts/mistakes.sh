#!/usr/bin/env bash
# Make every mistake of tests/mistakes/, launchers included, and write scripts/results/mistakes.md. Five minutes on 2 cores.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
exec "$PYTHON" tests/mistakes/write_page.py
