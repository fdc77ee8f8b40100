"""Rows for trackio or wandb, whoever wants them there too. Off unless asked for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
from typing import Any

from jali.experiments.collect import collect
from jali.experiments.job import read_config
from jali.experiments.results import Results

log = logging.getLogger("jali")
TRACKERS = ("trackio", "wandb")  # one interface: init, log, finish


def check_tracker(name: str | None) -> None:
    """Refuse a tracker that is not there before hours of work, not after."""
    if name is not None and name not in TRACKERS:
        raise ValueError(f"--track is {' or '.join(TRACKERS)}, got {name!r}")
    if name is not None and importlib.util.find_spec(name) is None:
        raise ValueError(f"--track {name} needs the package: pip install {name}")


def send(name: str, results: Results, tag: str) -> None:
    """Every row of a finished experiment. A tracker that fails costs a warning, not the results."""
    try:
        # Trackers greet their users on stdout, which belongs to whoever asked for JSON.
        with contextlib.redirect_stdout(sys.stderr):
            tracker: Any = importlib.import_module(name)
            config = read_config(results.config(tag)).to_dict()
            tracker.init(project="jali", name=tag, config=config)
            try:
                for row in collect(results, [tag]).rows:
                    tracker.log({k: v for k, v in row.items() if v is not None})
            finally:
                tracker.finish()
    except Exception as error:
        log.warning("%s: the rows did not reach %s: %s", tag, name, error)
