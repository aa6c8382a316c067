"""The variables of NCCL and gloo that ZeRO++ needs, set where this package is about to use or to make a process group.

NCCL reads its variables once, and gloo its own with each group. So they are set as early as this package is asked for anything:
when ``hf_zeropp.run`` starts (``hf-zeropp launch`` starts every rank with it), when a ZeroPPPlugin or a ZeroPPCallback is made,
and at last in ``apply_zeropp``. That is late for NCCL: a script on plain FSDP2 has made its process group before. So may be a
callback that is made after TrainingArguments, which make the group. Importing the package sets nothing.
"""

from __future__ import annotations

from hf_zeropp.comm.gloo_address import take_interface_of_nccl
from hf_zeropp.comm.nccl import order_launches


def set_backend_variables() -> None:
    """Ask NCCL for one order of launches, and let gloo take NCCL's interface, where the user has chosen neither."""
    order_launches()
    take_interface_of_nccl()
