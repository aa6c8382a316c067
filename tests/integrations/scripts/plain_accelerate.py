"""A script that knows nothing of this package, as its users write them: Accelerate, settings from the launcher."""

import argparse
import json

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--save_to")
parser.add_argument("--resume_from")
parser.add_argument("--two_optimizers", action="store_true")  # of such a job Accelerate saves no state
parser.add_argument("--train_a_probe_first", action="store_true")
args = parser.parse_args()

if args.train_a_probe_first:
    probe = torch.nn.Linear(4, 1)
    probe_optimizer = torch.optim.AdamW(probe.parameters())
    for _ in range(3):
        probe(torch.randn(8, 4)).sum().backward()
        probe_optimizer.step()

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
*params, head = model.parameters()
optimizers = [torch.optim.AdamW(params, lr=1e-3), torch.optim.AdamW([head], lr=1e-4)]
if not args.two_optimizers:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3)]
model, *optimizers = accelerator.prepare(model, *optimizers)
if args.resume_from:
    accelerator.load_state(args.resume_from)
losses = []
for step in range(2 * args.steps):
    generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
    tokens = torch.randint(97, (2, 16), generator=generator).to(accelerator.device)
    with torch.no_grad():
        model(input_ids=tokens, labels=tokens)
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
if args.save_to:
    accelerator.save_state(args.save_to)
if accelerator.is_main_process:
    with open(args.out, "w") as file:
        json.dump(losses, file)
accelerator.end_training()
