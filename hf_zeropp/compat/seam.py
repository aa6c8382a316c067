"""A seam: names of another library that this package relies on, and how to find out whether they are still there."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import operator
import re
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any


class Relation(enum.Enum):
    """How the owner of a seam is related to its names, or what this package does with them. ``Seam.missing`` tries it."""

    HAS = "has"  # read as attributes of it: of the module, of the class, or set on ``self`` by the class's methods
    CALLED = "called"  # attributes of it that can be called
    SET = "set"  # attributes of its objects, or of the module, that can be set
    READS = "reads"  # its code uses them: as attributes, as globals, as strings, or as keyword arguments
    TAKES = "takes"  # they are all its parameters, in this order
    ACCEPTS = "accepts"  # they are parameters of it, among others


@dataclasses.dataclass(frozen=True)
class Seam:
    """Names that one object of another library has, reads or takes.

    Attributes:
        owner: the object, as ``"module:attribute.path"``, or ``"module"`` for the module itself.
        names: the names.
        used_by: modules of this package that rely on them, without the leading ``hf_zeropp.``.
        note: what they do with the names, and what breaks if one moved; without that: an ImportError or AttributeError.
        relation: how the owner is related to the names.
        is_silent: whether nothing would raise then. ``check_seams`` raises in its place.
        since: the first version of the library that has the names; () for all that are supported.
        until: the first version with which the names are not used any more; () for none.
    """

    owner: str
    names: tuple[str, ...]
    used_by: tuple[str, ...]
    note: str
    relation: Relation = Relation.HAS
    is_silent: bool = False
    since: tuple[int, ...] = ()
    until: tuple[int, ...] = ()

    @property
    def module(self) -> str:
        """The module of the owner."""
        return self.owner.partition(":")[0]

    @property
    def library(self) -> str:
        """The top-level package of the owner."""
        return self.module.partition(".")[0]

    @property
    def serves_training(self) -> bool:
        """Whether training relies on it whatever the model is, and not only with frozen weights, or with another library."""
        return any(module.startswith(("fsdp.", "comm.")) for module in self.used_by)

    def applies_to(self, version: str) -> bool:
        """Whether this version of the library is to have the names."""
        is_too_new = bool(self.until) and numbers_of(version, len(self.until)) >= self.until
        return not is_too_new and numbers_of(version, len(self.since)) >= self.since

    def missing(self) -> list[str]:
        """Return the names that are not as expected: all of them where the owner itself is missing.

        The owner's module must be imported.
        """
        path = self.owner.partition(":")[2]
        try:
            owner = operator.attrgetter(path)(sys.modules[self.module]) if path else sys.modules[self.module]
        except AttributeError:
            return list(self.names)
        # The parameters must be equal as a whole, because one that is added in the middle shifts those that are passed
        # by position.
        if self.relation is Relation.TAKES:
            return [] if _parameters(owner) == self.names else list(self.names)
        if self.relation is Relation.ACCEPTS:
            return [name for name in self.names if name not in _parameters(owner)]
        used = _names_in_code(owner)
        if self.relation is Relation.READS:
            return [name for name in self.names if name not in used]
        if self.relation is Relation.CALLED:
            return [name for name in self.names if not callable(getattr(owner, name, None))]
        # Attributes that methods set on ``self`` are none of the class. A method that uses the name is taken as proof of one.
        is_set = used if isinstance(owner, type) else frozenset()
        gone = [name for name in self.names if not hasattr(owner, name) and name not in is_set]
        if self.relation is Relation.SET and isinstance(owner, type):
            gone += [name for name in self.names if name not in gone and not _can_set(owner, name)]
        return gone


def _row(
    relation: Relation, owner: str, names: str, used_by: str, note: str, *, silent: bool = False, **fields: Any
) -> Seam:
    return Seam(owner, tuple(names.split()), tuple(used_by.split()), note, relation, is_silent=silent, **fields)


# A table has a row for each seam: owner, names, modules that use them, note. Spaces separate names, and modules. The further
# fields are those of ``Seam``, ``silent`` among them.
has, called, sets, reads, takes, accepts = (functools.partial(_row, relation) for relation in Relation)


def _can_set(owner: type, name: str) -> bool:
    """Return whether objects of a class let the attribute be set. It is tried, on one that was made without ``__init__``."""
    if isinstance(member := inspect.getattr_static(owner, name, None), property):
        return member.fset is not None  # a setter may need what ``__init__`` makes
    try:
        setattr(object.__new__(owner), name, None)
    except AttributeError:  # it has slots, or is frozen
        return False
    except TypeError:  # a class of C++ cannot be made this way. What cannot be set there is a property
        return True
    return True


def _parameters(function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters. It is unwrapped first, because ours may stand in its place by now."""
    return tuple(inspect.signature(inspect.unwrap(function)).parameters)


def numbers_of(version: str, count: int) -> tuple[int, ...]:
    """Return the first numbers of a version. Versions end in parts of their own ("2.13.0a0+git1f2e", "2.11.0+cpu")."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:count])


# A module or class is walked once, although several seams ask about it.
@functools.cache
def _names_in_code(owner: Any) -> frozenset[str]:
    """Return the attributes, globals, strings and keyword arguments in the code of a function, class or module."""
    return frozenset(name for code in _codes_of(owner) for name in _names_in(code))


def _codes_of(owner: Any) -> Iterator[CodeType]:
    """Iterate over the code of a function, of a class with its bases, or of a module's functions and classes.

    Compiled code is read and not source text: it is at hand in memory, and has no comments and docstrings to be misled by.
    """
    if isinstance(owner, ModuleType):
        # A module's dictionary also holds imported names. Their code is that of other modules, and would prove nothing
        # about this one. Objects without code may warn whoever looks at them, as ``torch.distributed.reduce_op`` does.
        members = [
            value
            for value in vars(owner).values()
            if callable(value) and getattr(value, "__module__", None) == owner.__name__
        ]
    elif isinstance(owner, type):
        # Base classes are included, because a method may move to a base or a mixin without a change for us.
        members = [value for base in owner.__mro__ if base is not object for value in vars(base).values()]
    else:
        # A property holds its function as ``fget``, a class or static method as ``__func__``. Functions that were replaced,
        # by this package or by a decorator, keep the original as ``__wrapped__``.
        function = inspect.unwrap(getattr(owner, "fget", None) or getattr(owner, "__func__", None) or owner)
        if (code := getattr(function, "__code__", None)) is not None:
            yield code
        return
    for member in members:
        # A class that is an attribute of another class is not that class's own code, and may lead back to it.
        if not isinstance(member, type) or isinstance(owner, ModuleType):
            yield from _codes_of(member)


def _names_in(constant: Any) -> Iterator[str]:
    """Iterate over the names and strings in code and in the functions that it defines, in a string, or in a tuple of these."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType):
        yield from constant.co_names
        yield from _names_in(constant.co_consts)
    elif isinstance(constant, tuple):  # the constants of code, among them the names of keyword arguments
        for each in constant:
            yield from _names_in(each)
