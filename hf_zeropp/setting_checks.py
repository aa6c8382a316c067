"""Checks of one value: whether a setting may have it. Rules about several settings stand where these are defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[str, Any], None]
"""Raises a ``ValueError`` that names the setting and what is allowed, where the value is not."""


def one_of(*choices: Any) -> Check:
    """Allow strings, integers and None, those in ``choices``."""

    def check(name: str, value: Any) -> None:
        # ``in`` alone would take True for 1, 4.0 for 4, and fail on values without a hash or an order.
        if not (value is None or isinstance(value, str) or _is_int(value)) or value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.{_none_in_yaml(value, choices)}")

    return check


def positive_int_or(*words: Any) -> Check:
    """Allow integers from 1, and ``words``."""

    def check(name: str, value: Any) -> None:
        if value in words and not isinstance(value, bool):
            return
        if not _is_int(value) or value < 1:
            allowed = f"a positive int{f' or one of {words}' if words else ''}"
            raise ValueError(f"{name} must be {allowed}, got {value!r}.{_none_in_yaml(value, words)}")

    return check


def flag(name: str, value: Any) -> None:
    """Allow True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}.")


def fraction(name: str, value: Any) -> None:
    """Allow numbers from 0 to 1."""
    if not (_is_int(value) or isinstance(value, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}.")


def _none_in_yaml(value: Any, choices: tuple[Any, ...]) -> str:
    """Return how None is written in a file, for a value that is the word."""
    return " In a YAML or JSON file None is `null`." if value == "None" and None in choices else ""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
