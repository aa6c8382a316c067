"""Seams to other libraries: Accelerate, Transformers and its Trainer, PEFT. Only this package imports them."""
