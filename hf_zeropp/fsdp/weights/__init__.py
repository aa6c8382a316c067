"""How FSDP2's units get their weights. ``gather.py`` is what FSDP2 calls; read ``copy.py`` behind it."""
