"""Pretrain a causal language model under ZeRO++ with Accelerate, on CPU or GPUs, from the same script.

    hf-zeropp launch --config_file examples/configs/cpu_2_nodes_x_2_ranks.yaml examples/train_accelerate.py

By default it trains a Llama of about 20 M parameters, and a BPE tokenizer, on the source text of Python's standard library.
``--zeropp off`` runs stock FSDP2 on the same data and seed, for comparison.
"""

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from standard_library import MODULES, load_model, load_text, load_tokenizer, tokenize
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hf_zeropp import ZeroPPPlugin


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub name or path to fine-tune; default: a new 20 M Llama")
    parser.add_argument("--dataset", help="hub name of a dataset with a text column; default: --text-files")
    parser.add_argument("--text-files", default=MODULES, help="glob of text files")
    parser.add_argument("--zeropp", default="on", help="on (launch config, environment), off (FSDP2), or a file")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and micro-step")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs/train_accelerate")
    return parser.parse_args()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean loss per token in fp32. The model's own loss is rounded to the compute dtype."""
    model.eval()
    losses = []
    for batch in loader:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()))
    model.train()
    return accelerator.gather(torch.stack(losses)).mean().item()


def main() -> None:
    """Train, and print the traffic of a step and the validation loss before and after."""
    args = parse_args()
    plugin = ZeroPPPlugin(zeropp={"on": None, "off": False}.get(args.zeropp, args.zeropp))
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    with accelerator.main_process_first():
        text = load_text(args.dataset, args.text_files)
        tokenizer = load_tokenizer(args.model, args.output_dir, text["text"])
        tokens = tokenize(text, tokenizer, args.seq_len).train_test_split(test_size=256, seed=args.seed)
    model = load_model(args.model, tokenizer)
    accelerator.print(f"{model.num_parameters() / 1e6:.1f} M parameters, {len(tokens['train'])} training sequences")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    train_loader = DataLoader(tokens["train"], batch_size=args.batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(tokens["test"], batch_size=args.batch_size * 4)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

    loss_before = evaluate(accelerator, model, eval_loader)
    if handle := plugin.handle_of(model):
        handle.invalidate()  # else the first step would use the secondary shards that evaluation left, and count less
        handle.traffic.reset()
    start = time.perf_counter()
    train(args, accelerator, model, optimizer, train_loader)
    seconds = time.perf_counter() - start
    if handle and accelerator.is_main_process:
        handle.traffic.print(handle.predict(args.gradient_accumulation_steps))
    loss_after = evaluate(accelerator, model, eval_loader)
    num_sequences = args.steps * args.gradient_accumulation_steps * args.batch_size * accelerator.num_processes
    accelerator.print(f"{args.steps} steps in {seconds:.1f} s, {num_sequences * args.seq_len / seconds:.0f} tokens/s")
    accelerator.print(f"validation loss {loss_before:.4f} -> {loss_after:.4f}")
    accelerator.end_training()


def train(args, accelerator, model, optimizer, loader) -> None:
    """Run ``--steps`` optimizer steps."""
    progress = tqdm(total=args.steps, desc="training", disable=not accelerator.is_main_process)
    step = 0
    while step < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.set_postfix(loss=f"{loss.item():.3f}")
                progress.update()
                step += 1
                if step == args.steps:
                    break


if __name__ == "__main__":
    main()
