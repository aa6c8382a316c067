#!/usr/bin/env bash
# Set up what is missing, then run the tests. Arguments go to pytest: `bash scripts/test.sh -k collectives`.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
# The default suite runs in two processes: tests that start ranks in one of them, and beside it what needs no ranks
# (tests/conftest.py). With arguments it is one process, and `-x`, `--pdb` and times (`--durations`) mean what they say.
[ $# -gt 0 ] || set -- --numprocesses 2 --dist loadgroup --no-loadscope-reorder
exec "$PYTHON" -m pytest "$@"
