"""LoRA on a packed base: the quantizer, checkpoints that hold packed weights, export in 16 bits, and PEFT's targets."""
