"""Modules under the paths that earlier pages showed: they still import, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "jali.bench": "jali.evaluation.bench",
    "jali.budget": "jali.planning.budget",
    "jali.calibrate": "jali.maskbook.calibration",
    "jali.demo": "jali.evaluation.demo",
    "jali.gallery": "jali.generation",
    "jali.grid": "jali.tokens.grid",
    "jali.inspection": "jali.evaluation.inspection",
    "jali.layout": "jali.tokens.layout",
    "jali.order": "jali.tokens.order",
    "jali.plan": "jali.planning.plan",
    "jali.prompts": "jali.generation.prompts",
    "jali.quality.clip": "jali.clips.clip",
    "jali.quality": "jali.evaluation.quality",
    "jali.report": "jali.evaluation.report",
    "jali.scoring": "jali.planning.scoring",
    "jali.selection": "jali.planning.selection",
    "jali.site": "jali.planning.site",
}


class Moved(MetaPathFinder, Loader):
    """Finds an old path by its new one. Python asks it only where nothing else was found."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if new_path(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_path(spec.name)
        assert new is not None
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        found = importlib.import_module(new)
        self._own = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # importing under the old path had replaced it


def new_path(name: str) -> str | None:
    """Where a module is now; None where it never moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


def install() -> None:
    """Let old paths be found, once."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
