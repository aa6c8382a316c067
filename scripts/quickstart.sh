#!/usr/bin/env bash
# Set up what is missing, then train a 20 M language model under ZeRO++: four CPU processes as 2 nodes x 2 ranks, about
# four minutes on two cores. Arguments go to the example: `bash scripts/quickstart.sh --zeropp off` runs stock FSDP2.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
install_package examples
exec "$PYTHON" -m hf_zeropp.cli launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml \
    examples/train_accelerate.py "$@"
