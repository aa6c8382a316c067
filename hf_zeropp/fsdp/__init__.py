"""Objects that FSDP2 calls in place of its own collectives, and the decisions that ranks take together."""
