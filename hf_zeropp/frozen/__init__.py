"""Frozen weights: stored packed in 8 or 4 bits, and sharded within a node.

The modules build on each other in this order: ``storage`` (the dtype under which FSDP2 shards codes), ``adapters`` (which modules
an adapter library added), ``weight`` (a packed weight as a tensor), ``modules`` (layers that hold them), ``packing`` (a model's
weights become packed ones), ``units`` (how they are sharded) and ``published`` (what an inference engine gets).
"""
