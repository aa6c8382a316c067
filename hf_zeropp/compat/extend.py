"""Functions of other libraries that this package extends, each once in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_zeropp_extends"


def extend(owner: Any, name: str, extended: Callable[..., Any]) -> None:
    """Let calls of another library's function run ``extended``. If it is extended already, nothing is done.

    Args:
        owner: the class, module or object that has the function.
        name: of the function.
        extended: takes the original function, and then the arguments of the call.
    """
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return extended(original, *args, **kwargs)

    # ``functools.wraps`` copies attributes, so the mark is also found through a later wrapper of another library.
    setattr(call, _MARK, True)
    setattr(owner, name, call)
