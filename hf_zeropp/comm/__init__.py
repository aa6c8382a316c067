"""Collectives over process groups, their wire buffers and their topology. Nothing in this package knows FSDP2."""
