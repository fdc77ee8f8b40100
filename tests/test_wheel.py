"""The wheel: what is in it, and that it works in an environment that has nothing else of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    return next(folder.glob("*.whl"))


def run(*words: str, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if words[0] == sys.executable:  # hatchling and pip may lie where PYTHONPATH points
        clean = dict(os.environ)
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/jali").rglob("*")
               if p.is_file() and "__pycache__" not in p.parts}  # fmt: skip
    info = {name for name in names if ".dist-info/" in name}
    assert names - info == package
    for needed in (
        "jali/py.typed", "jali/__init__.pyi", "jali/generation/prompts/nano.txt",
        "jali/presets/data/wan-t2v-1.3b.yaml", "jali/evaluation/report/page.html",
        "jali/nano/weights/model_index.json", "jali/nano/weights/checksums.json",
    ):  # fmt: skip
        assert needed in names
    assert not [name for name in names if "training" in name or name.startswith("tests")]


def test_it_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """An environment of its own that finds the packages of this one, but not this checkout."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = ("pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", *install, str(wheel), cwd=tmp_path)
    site = next(home.glob("lib/python*/site-packages"))
    # A path in a .pth file is searched, but the .pth files there (the checkout's) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    code = (
        "import jali, torch\nprint(jali.__file__, jali.__version__)\n"
        "x = torch.randn(1, 2, 1000, 64)\n"
        "made = jali.attend(x, x, x, method='entropy')\n"
        "print(made.out.shape == x.shape, made.plan.cost < 1)\n"
    )
    where, right = run(str(python), "-c", code, cwd=tmp_path).splitlines()
    assert where.startswith(str(site))
    assert right == "True True"
    assert "torch" in run(str(home / "bin" / "jali"), "doctor", "--device", "cpu", cwd=tmp_path)
