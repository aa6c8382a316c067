"""A script that knows nothing of this package, with a model that Transformers shards over two ranks while it loads it."""

import argparse
import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--out")
args = parser.parse_args()

set_seed(0)
config = DistributedConfig(fsdp_size=2)
model = AutoModelForCausalLM.from_pretrained(args.model, distributed_config=config)
tokens = torch.randint(3, 128, (64, 16), generator=torch.Generator().manual_seed(1)).tolist()
arguments = TrainingArguments(
    output_dir=args.out,
    max_steps=3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
data = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with open(f"{args.out}/losses.json", "w") as file:
        json.dump(losses, file)
