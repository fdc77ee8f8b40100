"""Import paths that earlier pages showed still work, and say where the module is now."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import jali
from jali.moved import MOVED

ROOT = Path(jali.__file__).parent


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_new_module(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        found = importlib.import_module(old)
    new = importlib.import_module(MOVED[old])
    assert found is new
    assert new.__spec__ is not None
    assert new.__spec__.name == MOVED[old]


def test_no_old_path_hides_a_module() -> None:
    for old in MOVED:
        place = ROOT.joinpath(*old.split(".")[1:])
        assert not place.exists(), old
        assert not place.with_suffix(".py").exists(), old


def test_names_that_pages_showed(recwarn: pytest.WarningsRecorder) -> None:  # noqa: ARG001
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from jali.selection import keep_top\nfrom jali.budget import blocks_for\n"
        "from jali.demo import make_scene\nfrom jali.report import compare_page, write_page\n"
        "from jali.quality import metric\nfrom jali.quality.clip import read_clip, write_mp4\n"
        "from jali.quality.evaluation import evaluate\nfrom jali.calibrate import calibrate\n"
        "import jali; assert callable(jali.calibrate) and callable(jali.presets)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_path_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("jali.nothing")
