"""Packages whose names are imported when they are first used.

Such a package writes its names once, as imports under `if TYPE_CHECKING:`, and ends with

    import_when_used(__name__)
"""

import contextlib
import gc
import sys
from types import ModuleType

TYPE_CHECKING = False  # as typing's, whose import takes longer than all that is done here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from functools import cached_property as cached_property
    from typing import Any
else:

    class cached_property:  # noqa: N801 - as functools'
        """As functools', without the lock that it takes until Python 3.12.

        A search for meshes makes tens of thousands of values.
        """

        def __init__(self, make: "Callable[[Any], Any]") -> None:
            self.make, self.name, self.__doc__ = make, "", make.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: "Any", owner: "type | None" = None) -> "Any":
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.make(instance)
            return value


_read: "dict[str, dict[str, tuple[str, str]]]" = {}  # what each package's file says


class LazyPackage(ModuleType):
    """A package that imports a name from the module that its file says, when it is asked for it."""

    def __getattr__(self, name: str) -> "Any":
        import importlib

        homes = _homes(str(self.__file__))
        if name not in homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, own_name = homes[name]
        if module == self.__name__:
            value: Any = importlib.import_module(f"{module}.{own_name}")
        else:
            value = getattr(importlib.import_module(module), own_name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: "Any") -> None:
        # Python sets a submodule that is imported: abstract_step the function stays what it is
        if not (isinstance(value, ModuleType) and name in _homes(str(self.__file__))):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_homes(str(self.__file__))})


def when_called(module: str, name: str) -> "Callable[..., Any]":
    """The function of a module that is imported when it is first called."""

    def call(*arguments: "Any", **named: "Any") -> "Any":
        import importlib

        return getattr(importlib.import_module(module), name)(*arguments, **named)

    return call


def import_when_used(package: str) -> None:
    """Make a package import what its file imports under `if TYPE_CHECKING:` when it is used."""
    sys.modules[package].__class__ = LazyPackage


@contextlib.contextmanager
def without_collector() -> "Iterator[None]":
    """For imports and plans: many values are made that stay, or that are in no cycle.

    To look for those that could be freed takes an eighth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _homes(file: str) -> dict[str, tuple[str, str]]:
    """The module of each name of a package, and the name there."""
    if file not in _read:
        import ast

        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read())
        _read[file] = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for block in tree.body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
    return _read[file]
