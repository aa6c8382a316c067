"""Roles and rollouts of ``ppo_lora.py``: four models on one base, what the actor wrote, and what PPO learns from it."""

import argparse
import dataclasses
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from python_lines import MAX_TOKENS, PROMPTS, reward
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

ROLES = ("actor", "critic", "reward")
"""Each has an adapter of its own. A fourth role, "reference", is the base without an adapter."""


class Roles(nn.Module):
    """A language model with one adapter per role, and scalar heads for the critic and the reward model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.lm = get_peft_model(base, config, adapter_name=ROLES[0])
        for role in ROLES[1:]:
            self.lm.add_adapter(role, config)
        self.heads = nn.ModuleDict({role: nn.Linear(base.config.hidden_size, 1) for role in ROLES[1:]})
        self._no_split_modules = base._no_split_modules  # the blocks Accelerate shards

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        """Return the parameters that train when ``role`` does: its adapter and its head."""
        adapter = [param for name, param in self.lm.named_parameters() if f".{role}." in name]
        return adapter + list(self.heads[role].parameters() if role in self.heads else [])

    @contextmanager
    def play(self, role: str):
        """Compute as ``role``, or as "reference", inside. Only the role's own parameters take gradients."""
        if role == "reference":
            with self.lm.disable_adapter():
                yield self
            return
        self.lm.set_adapter(role)
        for name, head in self.heads.items():
            head.requires_grad_(name == role)
        yield self

    def forward(self, tokens: Tensor, mask: Tensor, head: str | None = None) -> Tensor:
        """Return logits [batch, length, vocabulary], or a head's values [batch, length], for tokens [batch, length]."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self.lm(
            input_ids=tokens, attention_mask=mask, position_ids=positions, output_hidden_states=head is not None
        )
        return output.logits if head is None else self.heads[head](output.hidden_states[-1].float()).sum(-1)

    def generate(self, **kwargs) -> Tensor:
        """Generate with the role that plays now."""
        return self.lm.generate(**kwargs)


@dataclasses.dataclass
class Rollout:
    """Completions of the actor, and what PPO learns from them.

    Tensors are [batch, length] unless a comment says otherwise. ``written`` marks the tokens that the actor wrote.
    """

    tokens: Tensor
    mask: Tensor
    written: Tensor
    compiles: Tensor  # [batch]
    log_probs: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    scores: Tensor | None = None  # [batch]
    kl: Tensor | None = None  # [batch]

    @property
    def last(self) -> Tensor:
        """The index of the last token written, [batch]."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (positions * self.written).argmax(1)


@torch.no_grad()
def roll_out(model: Roles, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Rollout:
    """Let the actor complete ``batch_size`` prompts, and ask the compiler about each line."""
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
    texts = tokenizer.batch_decode(tokens.where(written, tokenizer.eos_token_id)[:, start:], skip_special_tokens=True)
    compiles = torch.tensor([reward(*pair) for pair in zip(prompts, texts, strict=True)], device=tokens.device)
    return Rollout(tokens, mask.long(), written, compiles)


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token given those before it, [batch, length]; 0 for the first."""
    log_probs = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return F.pad(log_probs, (1, 0))


@torch.no_grad()
def judge(args: argparse.Namespace, model: Roles, rollout: Rollout) -> None:
    """Add log-probabilities, scores, advantages and returns to ``rollout``."""
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
    """Return GAE's advantages over the written tokens, from the last to the first; all [batch, length]."""
    advantages, ahead = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(ahead)
        surprise = rewards[:, t] + discount * next_value - values[:, t]
        ahead = (surprise + discount * decay * ahead) * written[:, t]
        advantages[:, t] = ahead
    return advantages
