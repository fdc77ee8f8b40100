"""Public names, found when they are asked for.

torch alone takes seconds, diffusers more, and a command line that only prints its help needs
neither. Which name is where, `__init__.pyi` says: to type checkers, and to this module.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Modules that subclass diffusers' own classes, or are of no use without its pipelines.
FOR_DIFFUSERS = ("jali.integration.", "jali.maskbook.calibration", "jali.maskbook.mode")


def read_stub(package: str) -> dict[str, str]:
    """Name -> module of a package's stub, whose lines read `from MODULE import NAME as NAME`."""
    text = pkgutil.get_data(package, "__init__.pyi")
    assert text is not None
    lines = (line.split() for line in text.decode().splitlines() if line.startswith("from "))
    return {name: module for _, module, _, name, *_ in lines}


def attach(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package with a stub.

    Names for diffusers are left out of `__all__` where it is not installed, so that a star import
    works; asking for one by name says what is missing.
    """
    modules = read_stub(package)
    modules.pop("__version__", None)
    with_diffusers = find_spec("diffusers") is not None
    public = sorted(
        name
        for name, module in modules.items()
        if not name.startswith("_")  # found by those who ask, and shown to nobody
        and (with_diffusers or not module.startswith(FOR_DIFFUSERS))
    )

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] != "diffusers":
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs diffusers: pip install '{package}[diffusers]'",
                name="diffusers",
            ) from error

    class Package(ModuleType):
        """`attend` and `presets` are functions, each in a module of the same name: importing the
        module, which sets it as an attribute here, must not hide the function."""

        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in modules and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Package
    return public, find, lambda: sorted([*public, "__version__"])
