"""Merge a LoRA adapter into its base, in one process, and write a model in 16 bits that opens without this package.

    python examples/merge_lora.py --adapter runs/dpo_lora --output runs/merged
    python examples/merge_lora.py --adapter runs/dpo_lora --output runs/merged --frozen_bits 4

Training with ``frozen_bits`` computes with the values that the base's codes decode to. The second command merges into these
values, the first into the base as it was before packing. A packed folder is decoded without being asked.
"""

from __future__ import annotations

import argparse

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_zeropp import ZeroPPQuantConfig


def main() -> None:
    """Merge the adapter that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="a folder of PEFT's, or its name on the hub")
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--model", help="the base; default: what the adapter's config names")
    parser.add_argument("--frozen_bits", type=int, choices=(4, 8), help="bits in which training packed the base")
    args = parser.parse_args()

    name = args.model or PeftConfig.from_pretrained(args.adapter).base_model_name_or_path
    # Transformers takes None for "forget what config.json says of packed weights", so the argument is given or left out.
    packing = {"quantization_config": ZeroPPQuantConfig(bits=args.frozen_bits)} if args.frozen_bits else {}
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, **packing)
    if hasattr(base.config, "quantization_config"):
        base = base.dequantize()
    model = PeftModel.from_pretrained(base, args.adapter)
    model.merge_and_unload().save_pretrained(args.output)
    AutoTokenizer.from_pretrained(name).save_pretrained(args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
