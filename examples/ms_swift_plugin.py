r"""ms-swift under ZeRO++: a plugin that its command line names. The settings stand in the FSDP file, under ``zeropp``.

NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --tuner_type lora --dataset tatsu-lab/alpaca \
    --external_plugins examples/ms_swift_plugin.py --fsdp examples/configs/ms_swift_fsdp.json
"""

from hf_zeropp.integrations.launch.unmodified import put_in_force

put_in_force()
