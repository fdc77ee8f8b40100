"""The shape of the code: import direction, lazy packages, docstrings, no waiting for the device."""

from __future__ import annotations

import ast
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
    "kernels": 0, "value": 0, "version": 0, "error": 0, "moved": 0, "lazy": 0, "strict_yaml": 1,
    "files": 1, "name": 2, "device": 1, "tokens": 1, "clips": 2, "planning": 2, "methods": 3,
    "backends": 3, "presets": 4, "checks": 4, "correction": 4, "attend": 5, "functional": 6,
    "integration": 7, "": 7, "maskbook": 8, "nano": 8, "adapters": 8, "comfyui": 9,
    "generation": 9, "evaluation": 10, "experiments": 11, "cli": 12, "__main__": 13,
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
            if base == "jali":  # `from jali import checks` names modules, or public names
                for name in node.names:
                    sub = ROOT / name.name
                    known = sub.is_dir() or sub.with_suffix(".py").exists()
                    yield (f"jali.{name.name}" if known else "jali"), node not in lazy
            else:
                yield base, node not in lazy


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    here = module_of(path)
    if here == "":
        return  # the list of public names, found when they are asked for
    assert here in LAYERS, f"say in LAYERS where jali.{here} stands"
    for name, now in imports(ast.parse(path.read_text()), f"jali.{here}"):
        if name.split(".")[0] != "jali":
            continue
        there = [*name.split("."), ""][1]
        if there == here:
            continue
        if name.startswith("jali.kernels.") and name != "jali.kernels.lists":
            assert not now, f"{path}: kernels may only be imported inside a function"
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
            assert here in ("kernels", "integration", "maskbook", "evaluation"), f"{path}: {name}"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if module_of(p) == "methods" or p.stem in ("scoring", "selection", "budget")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_planning_never_waits_for_the_device(path: Path) -> None:
    waits = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in waits, f"{path}:{node.lineno} .{node.func.attr}()"


def test_no_vague_names() -> None:
    for path in FILES:
        assert path.stem not in ("utils", "misc", "helpers", "common", "core", "new"), path
