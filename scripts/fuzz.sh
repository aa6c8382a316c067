#!/usr/bin/env bash
# Run random programs under ZeRO++, under stock FSDP2 and on an unsharded model, and compare (tests/fuzz/).
#
#   bash scripts/fuzz.sh --minutes 60              # other programs in every run; the first seed is printed
#   bash scripts/fuzz.sh --minutes 60 --seed 7     # these
#   bash scripts/fuzz.sh --only 1234               # one seed: run it, make it short, print it
#   bash scripts/fuzz.sh --script program.txt      # a program in a file, such as tests/fuzz/regressions/*/*.txt
#   bash scripts/fuzz.sh --help
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
exec nice -n 10 "$PYTHON" tests/fuzz/fuzz.py "$@"  # it takes all the processor time there is
