"""Gradients of trainable units: their reduction in two hops, and what stands in ``.grad`` until it has ended."""
