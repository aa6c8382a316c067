"""The program that ``bench_tune.py`` lets ``hf-zeropp tune`` try: the model and the steps of ``TrainingRun``, without an end."""

import sys

from library.training_run import TrainingRun
from library.variants import ModelShape, Variant

micro_steps, learning_rate, sequence_length, *sizes = map(float, sys.argv[1:])
run = TrainingRun(Variant("own", zeropp={}), ModelShape(*map(int, sizes)), 1, int(sequence_length), learning_rate)
while True:
    run.take_step(int(micro_steps))
