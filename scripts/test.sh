#!/usr/bin/env bash
# Set up what is missing, then run the tests. Arguments go to pytest: `bash scripts/test.sh -k collectives`.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
# The default suite runs two files at a time: the ranks of one test leave a fourth of two processors idle. All scenarios of a
# file share one start of the ranks, so a file is not divided. With arguments, one test runs at a time, and `-x`, `--pdb` and
# times (`--durations`) mean what they say.
[ $# -gt 0 ] || set -- --numprocesses 2 --dist loadscope --no-loadscope-reorder
exec "$PYTHON" -m pytest "$@"
