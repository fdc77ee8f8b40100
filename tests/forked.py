"""Processes of their own, forked from one that has imported the libraries: they start at once."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import av
import torch
from diffusers import WanPipeline

import jali.generation
import jali.integration.models.pipeline
import jali.maskbook.calibration

__all__ = ["WanPipeline", "av", "jali", "run_command", "start"]
torch.set_num_threads(1)


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """`target(*arguments)` in another process; its `exitcode` is there after `join`."""
    here = str(Path(__file__).parent)
    if here not in os.environ.get("PYTHONPATH", "").split(
        os.pathsep
    ):  # the server looks only there
        os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forked"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def run_command(words: Sequence[str], out: Path, err: Path, largest_file: int | None) -> None:
    """`jali WORDS` as a shell starts it, with what it prints in two files."""
    from jali.cli.main import app

    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    app([str(word) for word in words])
