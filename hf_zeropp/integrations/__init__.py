"""Accelerate, the Trainer, PEFT and launchers. Besides ``rollouts`` only this package imports their libraries."""
