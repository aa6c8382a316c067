"""Parse sizes as people write them: bytes ("1.5GB") and counts of parameters ("7B")."""

from __future__ import annotations

import re

COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BYTE_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
"""Units of a size in bytes, longest first, since "B" ends all of them."""


def parse_count(text: str) -> int | None:
    """Return the number that ``text`` names ("7.5B" is 7500000000), or None where it is not a count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    # ``round`` and not ``int``: 4.1 * 10**6 is 4099999.9999999995 in floating point.
    return round(float(match[1]) * COUNT_UNITS[match[2]]) if match else None


def parse_bytes(size: int | str | None) -> int:
    """Return a size in bytes.

    Args:
        size: a number of bytes, or a text such as "2MB" or "1.5 GB" (powers of 1000); None is 0.

    Raises:
        ValueError: the text is not a size.
    """
    if size is None or isinstance(size, int):
        return size or 0
    text = size.strip().upper()
    for suffix, factor in BYTE_UNITS.items():
        if text.endswith(suffix):
            try:
                return int(float(text.removesuffix(suffix)) * factor)
            except (ValueError, OverflowError):  # no number, and an infinite one
                break
    raise ValueError(f'A size must be a number of bytes or a text such as "800MB" or "1.5GB", got {size!r}.')
