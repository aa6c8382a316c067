"""GRPO with TRL over a base packed in INT4: a small model learns to write Python lines that compile.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml examples/grpo_lora.py

GRPOTrainer is used as it is, with LoRA and one callback. Completions are generated with the sharded model: after the first token
that follows an update, weights are gathered within the node and nothing crosses nodes. ``PhaseTraffic`` below prints the seconds
and bytes of generation and of training apart. A run takes a few minutes on two cores.
"""

import dataclasses
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from python_lines import MAX_TOKENS, PROMPTS, make_base, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from hf_zeropp import ZeroPPCallback, ZeroPPQuantConfig


@dataclasses.dataclass
class Arguments(GRPOConfig):
    """GRPOConfig with defaults for a run of a few minutes."""

    output_dir: str = "runs/grpo_lora"
    base: str = dataclasses.field(default="runs/python_lines", metadata={"help": "made there if it does not exist"})
    frozen_bits: int = dataclasses.field(default=4, metadata={"help": "of the base: 8 or 4"})
    max_steps: int = 40
    per_device_train_batch_size: int = 24
    num_generations: int | None = 12
    max_completion_length: int | None = MAX_TOKENS
    learning_rate: float = 3e-3
    lr_scheduler_type: str = "constant_with_warmup"
    warmup_steps: float = 5
    beta: float = 0.02
    temperature: float = 1.0
    logging_steps: float = 5
    save_strategy: str = "no"
    report_to: str = "none"
    bf16: bool | None = False
    use_cpu: bool = not torch.accelerator.is_available()
    fsdp: bool = True

    def __post_init__(self) -> None:
        self.fsdp_config = self.fsdp_config or {"zeropp": True}  # True: the settings of the launch config
        super().__post_init__()


class PhaseTraffic(TrainerCallback):
    """Seconds of generation and of training, and megabytes that entered this node from others, printed at the end."""

    def __init__(self, zeropp: ZeroPPCallback) -> None:
        self.zeropp = zeropp
        self.seconds = {"generation": 0.0, "training": 0.0}
        self.megabytes = {"generation": 0.0, "training": 0.0}

    def watch_generation(self, trainer: GRPOTrainer) -> None:
        """Count what the trainer's generation takes, which no event shows."""
        generate = trainer._generate_and_score_completions

        def watched(*args, **kwargs):
            started, before = time.perf_counter(), self._cross_node_megabytes()
            result = generate(*args, **kwargs)
            self._add("generation", started, before)
            return result

        trainer._generate_and_score_completions = watched

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Remember where the step began."""
        self._step = time.perf_counter(), self._cross_node_megabytes(), dict(self.seconds), dict(self.megabytes)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Count the step without its generation as training."""
        started, before, seconds, megabytes = self._step
        self._add("training", started, before)
        self.seconds["training"] -= self.seconds["generation"] - seconds["generation"]
        self.megabytes["training"] -= self.megabytes["generation"] - megabytes["generation"]

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Print both phases."""
        if state.is_world_process_zero:
            for phase in self.seconds:
                print(f"{phase}: {self.seconds[phase]:.1f} s, {self.megabytes[phase]:.2f} MB into this node")

    def _cross_node_megabytes(self) -> float:
        handle = self.zeropp.handle
        return handle.traffic.cross_node_bytes / 1e6 if handle else 0.0

    def _add(self, phase: str, started: float, before: float) -> None:
        self.seconds[phase] += time.perf_counter() - started
        self.megabytes[phase] += self._cross_node_megabytes() - before


def rewards(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """Return the reward of each completion."""
    return [reward(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


def main() -> None:
    """Train, and print the mean reward at the first and the last log."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        base = make_base(args.base)
    callback = ZeroPPCallback()
    phases = PhaseTraffic(callback)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, quantization_config=ZeroPPQuantConfig(bits=args.frozen_bits)
        ),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * 200),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[callback, phases],
    )
    phases.watch_generation(trainer)
    trainer.train()
    trainer.save_model()
    history = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        print(f"mean reward {history[0]:.2f} -> {history[-1]:.2f}")


if __name__ == "__main__":
    main()
