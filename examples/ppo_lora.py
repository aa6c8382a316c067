"""PPO on one frozen base: actor, critic and reward model are LoRA adapters on the same INT4 weights.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml examples/ppo_lora.py

A small model learns to write Python lines that compile. The reward model learns from the compiler's verdicts on what the actor
writes, and PPO follows the reward model. Each line of the output shows the reward model's score and the share of lines that
really compile. An iteration has a generation phase and a training phase; the seconds and the bytes across nodes of both phases
are printed at the end. A run takes a few minutes on two cores.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from phases import Phases
from ppo_rollout import ROLES, Roles, Rollout, judge, log_probs_of, roll_out
from python_lines import make_base
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_zeropp import ZeroPPPlugin, ZeroPPQuantConfig, generation_mode


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub name or path of the base; default: a small one, made in runs/python_lines")
    parser.add_argument("--frozen-bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--reward-iterations", type=int, default=8, help="first iterations without the actor's steps")
    parser.add_argument("--batch-size", type=int, default=32, help="completions per rank and iteration")
    parser.add_argument("--epochs", type=int, default=2, help="optimizer steps on each batch")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--kl", type=float, default=0.05, help="price of a nat of divergence from the reference")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--discount", type=float, default=1.0)
    parser.add_argument("--gae", type=float, default=0.95)
    parser.add_argument("--memory-budget", default="50MB", help="gathered weights kept while generating")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def actor_loss(args: argparse.Namespace, model: Roles, rollout: Rollout, accelerator: Accelerator) -> Tensor:
    """Return PPO's clipped objective. Advantages are normalized over all ranks."""
    advantages = rollout.advantages[rollout.written]
    mean, square = accelerator.reduce(torch.stack((advantages.mean(), advantages.square().mean())), "mean")
    advantages = (advantages - mean) / (square - mean**2).clamp(min=1e-8).sqrt()
    with model.play("actor"):
        log_probs = log_probs_of(model(rollout.tokens, rollout.mask), rollout.tokens)
    ratio = (log_probs - rollout.log_probs)[rollout.written].exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - args.clip, 1 + args.clip) * advantages).mean()


def critic_loss(model: Roles, rollout: Rollout) -> Tensor:
    """Return the squared error of the values before each written token."""
    with model.play("critic"):
        values = F.pad(model(rollout.tokens, rollout.mask, head="critic")[:, :-1], (1, 0))
    return (values - rollout.returns)[rollout.written].square().mean()


def reward_loss(model: Roles, rollout: Rollout) -> Tensor:
    """Return the cross-entropy of the reward model's score and the compiler's verdict."""
    with model.play("reward"):
        scores = model(rollout.tokens, rollout.mask, head="reward").gather(1, rollout.last[:, None]).squeeze(1)
    return F.binary_cross_entropy_with_logits(scores, rollout.compiles)


def report(args: argparse.Namespace, accelerator: Accelerator, history: list[Tensor], phases: Phases) -> None:
    """Print the means of five iterations, before the actor learns and at the end, and what each phase took."""
    untrained = history[: args.reward_iterations or 1]  # the actor still equals the reference
    before, after = (torch.stack(part[-5:]).mean(0).tolist() for part in (untrained, history))
    accelerator.print(f"mean reward {before[0]:.2f} -> {after[0]:.2f}, compiles {before[1]:.2f} -> {after[1]:.2f}")
    if accelerator.is_main_process:
        phases.print()


def main() -> None:
    """Alternate generation and training for ``--iterations``."""
    args = parse_args()
    plugin = ZeroPPPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(args.seed)
    with accelerator.main_process_first():
        base = args.model or make_base()
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    quantization = ZeroPPQuantConfig(bits=args.frozen_bits)
    model = Roles(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=quantization))
    optimizers = [torch.optim.AdamW(model.parameters_of(role), lr=args.learning_rate, weight_decay=0) for role in ROLES]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    optimizer_of = dict(zip(ROLES, optimizers, strict=True))
    set_seed(args.seed, device_specific=True)
    phases = Phases(lambda: plugin.handle_of(model))

    def step(role: str, loss: Tensor) -> None:
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(list(model.parameters_of(role)), 1.0)
        optimizer_of[role].step()
        optimizer_of[role].zero_grad()

    history = []  # per iteration: score, share that compiles, KL divergence
    for iteration in range(args.iterations):
        with phases("generation"), generation_mode(model, args.memory_budget):
            rollout = roll_out(model, tokenizer, args.batch_size)
            judge(args, model, rollout)
        with phases("training"):
            for _ in range(args.epochs):
                step("reward", reward_loss(model, rollout))
                step("critic", critic_loss(model, rollout))
                if iteration >= args.reward_iterations:
                    step("actor", actor_loss(args, model, rollout, accelerator))
        figures = torch.stack((rollout.scores.mean(), rollout.compiles.mean(), rollout.kl.mean()))
        history.append(accelerator.reduce(figures, "mean"))
        score, compiles, kl = history[-1].tolist()
        accelerator.print(
            f"iteration {iteration:3}  reward {score:.2f}  compiles {compiles:.2f}  KL {kl:.2f}", flush=True
        )
    report(args, accelerator, history, phases)
    accelerator.end_training()


if __name__ == "__main__":
    main()
