"""Functions of other libraries that this package extends, each once in a process by each extension."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_zeropp_extends"


def extend(owner: Any, name: str, extended: Callable[..., Any]) -> None:
    """Let calls of another library's function run ``extended``. If it is extended by that already, nothing is done.

    Args:
        owner: the class, module or object that has the function.
        name: of the function.
        extended: takes the original function, and then the arguments of the call. Functions of one name in one module are taken
            for the same.
    """
    original = getattr(owner, name)
    extensions: frozenset[tuple[str, str]] = getattr(original, _MARK, frozenset())
    key = (extended.__module__, getattr(extended, "__qualname__", repr(extended)))
    if key in extensions:
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return extended(original, *args, **kwargs)

    # ``functools.wraps`` copies attributes, so the mark is also found through a later wrapper of another library.
    setattr(call, _MARK, extensions | {key})
    setattr(owner, name, call)
