"""The shape of the code: import direction, lazy packages, docstrings, no waiting for the device."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jali

ROOT = Path(jali.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
HEAVY = ("triton", "diffusers", "flash_attn", "transformers", "matplotlib")

# Each module may import those with a smaller number, and its own package. A new part of the
# library joins by one line.
LAYERS = {
    "grid": 0, "order": 1, "layout": 2, "padding": 3, "plan": 4, "site": 0, "fused": 0,
    "lists": -2, "heads": -2,
    "budget": 5, "scoring": 5, "selection": 5, "maskbook": 5.5, "version": 0,
    "methods": 6, "backends": 6, "presets": 7, "border": 7, "attend": 8,
    "functional": 9, "integration": 9.5, "families": 9, "": 10,
    "quality": 11, "calibrate": 9.7, "nano": 11, "demo": 12.2,
    "prompts": 11.2, "gallery": 11.3, "bench": 11.5, "inspection": 11.5,
    "report": 12, "experiments": 12.5, "cli": 13, "__main__": 14, "kernels": -1,
}  # fmt: skip
# Neither of these two may import the other: a plan is all they share.
APART = {("methods", "backends"), ("backends", "methods")}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, bool]]:
    """(dotted module, whether at import time) of every import statement."""
    lazy: set[ast.AST] = set()
    for node in ast.walk(tree):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, kinds) or checking:
            lazy.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"{package}.{base}".rstrip(".")
            if base == "jali":  # `from jali import border` names modules, or public names
                for name in node.names:
                    sub = ROOT / name.name
                    known = sub.is_dir() or sub.with_suffix(".py").exists()
                    yield (f"jali.{name.name}" if known else "jali"), node not in lazy
            else:
                yield base, node not in lazy


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    here = module_of(path)
    assert here in LAYERS, f"say in LAYERS where jali.{here} stands"
    for name, now in imports(ast.parse(path.read_text()), f"jali.{here}"):
        if name.split(".")[0] != "jali":
            continue
        there = [*name.split("."), ""][1]
        if there == here:
            continue
        if there == "kernels":
            assert not now, f"{path}: kernels may only be imported inside a function"
            assert here == "bench" or LAYERS[here] <= LAYERS["backends"], f"{path} imports {name}"
            continue
        if here == "kernels":  # a leaf, but for the form in which plans reach it
            assert there == "lists", f"{path} imports {name}"
        assert (here, there) not in APART, f"{path} imports {name}"
        assert LAYERS[there] < LAYERS[here], f"{path} imports {name}: that way is up"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text
    assert len(text) > 15


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_packages_are_imported_where_they_are_used(path: Path) -> None:
    here = module_of(path)
    for name, now in imports(ast.parse(path.read_text()), f"jali.{here}"):
        if now and name.split(".")[0] in HEAVY:
            assert here in ("kernels", "integration", "report", "quality"), f"{path}: {name}"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if module_of(p) in ("methods", "scoring", "selection", "budget")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_planning_never_waits_for_the_device(path: Path) -> None:
    waits = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in waits, f"{path}:{node.lineno} .{node.func.attr}()"


def test_importing_jali_takes_nothing_heavy_with_it() -> None:
    code = f"import sys, jali; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_public_names_exist() -> None:
    for name in jali.__all__:
        assert getattr(jali, name).__doc__, name


def test_no_vague_names() -> None:
    for path in FILES:
        assert path.stem not in ("utils", "misc", "helpers", "common", "core", "new"), path
