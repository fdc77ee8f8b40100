"""The names of `import jali`: one list, found when they are asked for, typed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jali
from jali import lazy

ROOT = Path(jali.__file__).parent
HEAVY = ("torch", "triton", "diffusers", "flash_attn", "transformers", "matplotlib", "numpy")
WITHOUT = ("diffusers", "transformers", "triton", "flash_attn", "matplotlib", "av", "jinja2")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_jali_takes_nothing_heavy_with_it_and_no_time() -> None:
    code = (
        "import sys, time; start = time.process_time(); import jali\n"
        f"print(time.process_time() - start, [m for m in {HEAVY} if m in sys.modules])"
    )
    seconds, heavy = zip(*(run(code).split(maxsplit=1) for _ in range(3)), strict=True)
    assert set(heavy) == {"[]"}
    assert min(map(float, seconds)) <= 0.1


def test_every_public_name_says_what_it_is() -> None:
    for name in jali.__all__:
        assert getattr(jali, name).__doc__, name


def test_the_stub_is_read_as_a_type_checker_reads_it() -> None:
    tree = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    found = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # what a stub exports
    }
    assert found == lazy.read_stub("jali")
    assert {name for name in found if not name.startswith("_")} == set(jali.__all__)


def test_dir_shows_the_public_names_and_only_those() -> None:
    assert dir(jali) == sorted([*jali.__all__, "__version__"])
    assert "sparse_processor_mode" in dir(jali)


def test_a_star_import_brings_them() -> None:
    code = (
        "from jali import *\nimport jali\n"
        "print([n for n in jali.__all__ if globals().get(n) is not getattr(jali, n)])"
    )
    assert run(code) == "[]"


def test_without_optional_packages_a_star_import_brings_what_there_is() -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({WITHOUT}))\n"  # None: as if not installed
        "from jali import *\nimport jali\n"
        "attend, MaskBook, make_method, presets\n"
        "assert 'sparse_processor_mode' not in globals(), 'needs diffusers'\n"
        "try:\n    jali.sparse_processor_mode\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    assert run(code) == (
        "jali.sparse_processor_mode needs diffusers: pip install 'jali[diffusers]'"
    )


def test_the_callback_of_esa_is_found_under_its_name_and_not_shown() -> None:
    from jali import _make_step_callback, make_step_callback

    assert _make_step_callback is make_step_callback
    assert "_make_step_callback" not in (*jali.__all__, *dir(jali))
    assert _make_step_callback(object())(None, 0, 0, {"latents": 1}) == {"latents": 1}


def test_a_module_does_not_hide_the_function_of_its_name() -> None:
    code = "import jali.attend, jali.presets, jali; print(callable(jali.attend), jali.presets())"
    assert run(code).startswith("True (")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'jali' has no attribute 'atend'"):
        _ = jali.atend
