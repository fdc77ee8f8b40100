"""Dense clips are the same for every method and budget: a sweep need not make them every time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jali.experiments.results import Results
from jali.experiments.stage import damage, recorded_outputs

if TYPE_CHECKING:
    from jali.generation import Settings


def borrow(folder: Path, settings: Settings, prompts: Sequence[str], root: Path) -> str | None:
    """Fill an empty run folder with the same run of another experiment; returns its tag.

    Only of one whose stage is complete, to the byte, and was done on the same kind of machine with
    the same versions: the clips are then what this experiment would make itself.
    """
    if folder.exists():
        return None
    results, name = Results(root, root), Path(*folder.parts[-2:])
    for tag in results.tags():
        with contextlib.suppress(OSError, ValueError):
            known = recorded_outputs(results, tag, "quality")
            files = {n: d for n, d in known.items() if Path(n).parent == name}
            source = results.folder(tag)
            if not _same(source / name, settings, prompts) or damage(source, files):
                continue
            folder.parent.mkdir(parents=True, exist_ok=True)
            waiting = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".borrowed-"))
            try:
                for file in files:
                    shutil.copyfile(source / file, waiting / Path(file).name)
                os.chmod(waiting, 0o755)
                os.rename(waiting, folder)
            finally:
                shutil.rmtree(waiting, ignore_errors=True)
            return tag
    return None


def _same(folder: Path, settings: Settings, prompts: Sequence[str]) -> bool:
    from jali import __version__
    from jali.generation import read_run
    from jali.generation.machine import machine, versions

    found = read_run(folder)
    return (
        found.complete
        and found.settings.digest == settings.digest
        and [clip.prompt for clip in found.clips] == list(prompts)
        and found.machine == machine(str(settings.device))
        and found.versions == versions()
        and found.jali == __version__
    )
