#!/usr/bin/env bash
# Let random faults happen to real training runs: killed and stopped ranks, full disks, few descriptors (tests/faults/).
#
#   bash scripts/faults.sh --count 100               # other faults in every run; the first seed is printed
#   bash scripts/faults.sh --count 100 --seed 7      # these
#   bash scripts/faults.sh --only 1234               # one: what was struck, and what each rank said
#   bash scripts/faults.sh --help
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
exec nice -n 10 "$PYTHON" tests/faults/faults.py "$@"  # it takes all the processor time there is
