"""The program that ``bench_tune.py`` lets ``hf-zeropp tune`` try: the model and the steps of ``TrainingRun``."""

import sys

import torch.distributed as dist

from hf_zeropp import ZeroPPConfig
from library.training_run import TrainingRun
from library.variants import ModelShape, Variant

dist.init_process_group("gloo")  # ``TrainingRun`` looks at it before Accelerate would make it
steps, micro_steps, learning_rate, sequence_length, *sizes = map(float, sys.argv[1:])
variant = Variant("of the environment", zeropp=ZeroPPConfig.from_env().to_dict())
run = TrainingRun(variant, ModelShape(*map(int, sizes)), 1, int(sequence_length), learning_rate)
for _ in range(int(steps)):
    run.take_step(int(micro_steps))
