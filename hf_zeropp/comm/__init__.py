"""Two-hop collectives over process groups. Nothing in this package knows FSDP2."""
