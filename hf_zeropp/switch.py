"""The switch ``ZEROPP_ENABLED``: with 0 the same job runs on FSDP2's own collectives, whatever its settings say.

It is no setting. Settings say how ZeRO++ runs, and a script that passes its own in Python reads none of the environment. The
switch goes over all of them, so that a job can be compared with stock FSDP2 without a change in its files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_zeropp.config import ENV_ENABLED

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def is_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Return what ``ZEROPP_ENABLED`` says; True where it is not set.

    Raises:
        ValueError: it is neither yes nor no.
    """
    text = (os.environ if environ is None else environ).get(ENV_ENABLED, "1")
    if (answer := _WORDS.get(text.strip().lower())) is None:
        raise ValueError(
            f"{ENV_ENABLED} must be one of {', '.join(_WORDS)}, got {text!r}. Set 0 for stock FSDP2, or unset it."
        )
    return answer
