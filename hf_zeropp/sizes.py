"""Parse and show sizes as people write them: bytes ("1.5GB"), counts of parameters ("7B") and rates of networks ("100gbit")."""

from __future__ import annotations

import re
from collections.abc import Iterable

COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
PREFIXES = ("", "K", "M", "G", "T", "P")
BYTE_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
"""Units of a size in bytes, longest first, since "B" ends all of them."""

# Only "bit" is clear: "100Gb" and "100Gbps" are read as bits by some and as bytes by others, a factor of 8.
_RATE = re.compile(r"(\d+(?:\.\d+)?)([mgt])bit", re.IGNORECASE)
_BYTES_PER_S = {"m": 1e6 / 8, "g": 1e9 / 8, "t": 1e12 / 8}


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


def parse_rate(text: str) -> float:
    """Return a rate in bytes per second: "100gbit" is 1.25e10. Units are mbit, gbit and tbit, in any case.

    Raises:
        ValueError: the text is no rate, has no unit, or is zero.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(
            f"expected a rate above zero with its unit, such as 100gbit for 10^11 bits per second, got {text!r}"
        )
    return float(match[1]) * _BYTES_PER_S[match[2].lower()]


def shorten(number: float, units: Iterable[str]) -> str:
    """Return three significant digits of ``number`` and its unit: "1.75G" for 1_749_600_000. Each unit is 1000 of the last."""
    unit, *larger = units
    while number >= 999.5 and larger:  # from there on, three digits round to 1000
        number, unit = number / 1000, larger.pop(0)
    return f"{number:.3g}{unit}"
