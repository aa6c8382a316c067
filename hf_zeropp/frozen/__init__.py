"""Frozen weights, packed in 8 or 4 bits and sharded within a node."""
