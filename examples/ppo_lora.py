"""PPO on one frozen base: actor, critic, reference and reward model are LoRA adapters (or none) on the same INT4 weights.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml examples/ppo_lora.py

A small model learns to write Python lines that compile. The reward model learns from the compiler's verdicts on what the
actor writes, and PPO follows the reward model; the table shows its score and, beside it, how many lines really compile.
Per iteration: a generation phase, then a training phase; both phases' seconds and bytes across nodes are printed. A few
minutes on two cores.
"""

import argparse
import dataclasses
import time
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from python_lines import MAX_TOKENS, PROMPTS, make_base, reward
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from hf_zeropp import ZeroPPPlugin, ZeroPPQuantConfig, generation_mode

ROLES = ("actor", "critic", "reward")  # the reference is the base without an adapter


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="runs/python_lines", help="made there if it does not exist")
    parser.add_argument("--frozen-bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument(
        "--reward-iterations", type=int, default=8, help="of these, the first train the reward model alone"
    )
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


class Roles(nn.Module):
    """A language model with one adapter per role, and scalar heads for critic and reward model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.lm = get_peft_model(base, config, adapter_name=ROLES[0])
        for role in ROLES[1:]:
            self.lm.add_adapter(role, config)
        self.heads = nn.ModuleDict({role: nn.Linear(base.config.hidden_size, 1) for role in ROLES[1:]})
        self._no_split_modules = base._no_split_modules  # the blocks Accelerate shards

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        adapter = [param for name, param in self.lm.named_parameters() if f".{role}." in name]
        return adapter + list(self.heads[role].parameters() if role in self.heads else [])

    @contextmanager
    def play(self, role: str):
        """Compute as one role, or as "reference". Only the role's own parameters take gradients."""
        if role == "reference":
            with self.lm.disable_adapter():
                yield self
            return
        self.lm.set_adapter(role)
        for name, head in self.heads.items():
            head.requires_grad_(name == role)
        yield self

    def forward(self, tokens: Tensor, mask: Tensor, head: str | None = None) -> Tensor:
        """tokens, mask: [batch, length]. Logits [batch, length, vocabulary], or a head's values [batch, length]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self.lm(
            input_ids=tokens, attention_mask=mask, position_ids=positions, output_hidden_states=head is not None
        )
        return output.logits if head is None else self.heads[head](output.hidden_states[-1].float()).sum(-1)

    def generate(self, **kwargs) -> Tensor:
        return self.lm.generate(**kwargs)


@dataclasses.dataclass
class Rollout:
    """What the actor wrote. All [batch, length] but ``compiles`` [batch]; ``written`` marks completion tokens."""

    tokens: Tensor
    mask: Tensor
    written: Tensor
    compiles: Tensor
    log_probs: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    scores: Tensor | None = None  # [batch]
    kl: Tensor | None = None  # [batch]

    @property
    def last(self) -> Tensor:
        """[batch]: index of the last token written."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (positions * self.written).argmax(1)


@torch.no_grad()
def roll_out(model: Roles, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Rollout:
    prompts = [PROMPTS[i] for i in torch.randint(len(PROMPTS), (batch_size,))]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(next(model.parameters()).device)
    inputs.pop("token_type_ids", None)
    with model.play("actor"):
        tokens = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=True, top_k=0, temperature=1.0)
    start = inputs["input_ids"].shape[1]
    ended = tokens[:, start:] == tokenizer.eos_token_id
    written = torch.zeros_like(tokens, dtype=torch.bool)
    written[:, start:] = ended.cumsum(1) - ended.long() == 0  # up to the first end, which counts
    mask = F.pad(inputs["attention_mask"], (0, tokens.shape[1] - start)) | written
    texts = tokenizer.batch_decode(tokens[:, start:] * written[:, start:], skip_special_tokens=True)
    compiles = torch.tensor([reward(*pair) for pair in zip(prompts, texts, strict=True)], device=tokens.device)
    return Rollout(tokens, mask.long(), written, compiles)


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token, given those before it: [batch, length], 0 for the first."""
    log_probs = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return F.pad(log_probs, (1, 0))


@torch.no_grad()
def judge(args: argparse.Namespace, model: Roles, rollout: Rollout) -> None:
    """Log-probabilities, scores, values, and from them advantages and returns."""
    batch = (rollout.tokens, rollout.mask)
    with model.play("actor"):
        rollout.log_probs = log_probs_of(model(*batch), rollout.tokens)
    with model.play("reference"):
        reference = log_probs_of(model(*batch), rollout.tokens)
    with model.play("reward"):
        scores = model(*batch, head="reward")
    with model.play("critic"):
        values = F.pad(model(*batch, head="critic")[:, :-1], (1, 0)) * rollout.written  # before each token
    rollout.scores = scores.gather(1, rollout.last[:, None]).squeeze(1).sigmoid()
    divergence = (rollout.log_probs - reference) * rollout.written
    rollout.kl = divergence.sum(1)
    rewards = -args.kl * divergence
    rewards.scatter_add_(1, rollout.last[:, None], rollout.scores[:, None])
    rollout.advantages = generalized_advantages(rewards, values, rollout.written, args.discount, args.gae)
    rollout.returns = rollout.advantages + values


def generalized_advantages(rewards: Tensor, values: Tensor, written: Tensor, discount: float, decay: float) -> Tensor:
    """GAE over the written tokens, from the last to the first; all [batch, length]."""
    advantages, ahead = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(ahead)
        surprise = rewards[:, t] + discount * next_value - values[:, t]
        ahead = (surprise + discount * decay * ahead) * written[:, t]
        advantages[:, t] = ahead
    return advantages


def actor_loss(args: argparse.Namespace, model: Roles, rollout: Rollout, accelerator: Accelerator) -> Tensor:
    """The clipped objective."""
    advantages = rollout.advantages[rollout.written]
    mean, square = accelerator.reduce(torch.stack((advantages.mean(), advantages.square().mean())), "mean")
    advantages = (advantages - mean) / (square - mean**2).clamp(min=1e-8).sqrt()
    with model.play("actor"):
        log_probs = log_probs_of(model(rollout.tokens, rollout.mask), rollout.tokens)
    ratio = (log_probs - rollout.log_probs)[rollout.written].exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - args.clip, 1 + args.clip) * advantages).mean()


def critic_loss(model: Roles, rollout: Rollout) -> Tensor:
    with model.play("critic"):
        values = F.pad(model(rollout.tokens, rollout.mask, head="critic")[:, :-1], (1, 0))
    return (values - rollout.returns)[rollout.written].square().mean()


def reward_loss(model: Roles, rollout: Rollout) -> Tensor:
    """The reward model learns what compiles."""
    with model.play("reward"):
        scores = model(rollout.tokens, rollout.mask, head="reward").gather(1, rollout.last[:, None]).squeeze(1)
    return F.binary_cross_entropy_with_logits(scores, rollout.compiles)


def mean_of_last(history: list[Tensor], count: int = 5) -> list[float]:
    return torch.stack(history[-count:]).mean(0).tolist()


class Phases:
    """Seconds and bytes across nodes of each phase."""

    def __init__(self, handle) -> None:
        self.handle = handle
        self.totals: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str):
        started, before = time.perf_counter(), self.handle.traffic.cross_node_bytes
        yield
        total = self.totals.setdefault(name, [0.0, 0.0])
        total[0] += time.perf_counter() - started
        total[1] += (self.handle.traffic.cross_node_bytes - before) / 1e6


def main() -> None:
    args = parse_args()
    plugin = ZeroPPPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(args.seed)
    with accelerator.main_process_first():
        base = make_base(args.base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    quantization = ZeroPPQuantConfig(bits=args.frozen_bits)
    model = Roles(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=quantization))
    optimizers = [torch.optim.AdamW(model.parameters_of(role), lr=args.learning_rate, weight_decay=0) for role in ROLES]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    optimizer_of = dict(zip(ROLES, optimizers, strict=True))
    set_seed(args.seed, device_specific=True)
    phases = Phases(plugin.handle_of(model))

    def step(role: str, loss: Tensor) -> None:
        accelerator.backward(loss)
        accelerator.clip_grad_norm_([param for param in model.parameters_of(role)], 1.0)
        optimizer_of[role].step()
        optimizer_of[role].zero_grad()

    history = []  # per iteration: score, share that compiles, KL
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
    untrained = history[: args.reward_iterations or 1]  # the actor is the reference still
    (score, compiles, _), (new_score, new_compiles, _) = (mean_of_last(part) for part in (untrained, history))
    accelerator.print(f"mean reward {score:.2f} -> {new_score:.2f}, compiles {compiles:.2f} -> {new_compiles:.2f}")
    for name, (seconds, megabytes) in phases.totals.items():
        accelerator.print(f"{name}: {seconds:.1f} s, {megabytes:.2f} MB into this node")
    accelerator.end_training()


if __name__ == "__main__":
    main()
