#!/usr/bin/env bash
# Set up what is missing, then run the tests. Arguments go to pytest: `bash scripts/test.sh -k collectives`.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package test
exec "$PYTHON" -m pytest "$@"
