"""What FSDP2 calls in place of its own collectives."""
