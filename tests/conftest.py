"""Shared settings: hypothesis profiles, the gpu marker, one thread per worker, the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # tests are small; workers share the cores

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "ci", max_examples=12, derandomize=True, deadline=None, suppress_health_check=_QUIET
)
settings.register_profile("full", max_examples=200, deadline=None, suppress_health_check=_QUIET)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all examples, and the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    full = config.getoption("--full") or os.environ.get("JALI_TEST_FULL") == "1"
    settings.load_profile("full" if full else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    full = config.getoption("--full") or os.environ.get("JALI_TEST_FULL") == "1"
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    slow = pytest.mark.skip(reason="slow: run with --full")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not full:
            item.add_marker(slow)


@pytest.fixture(scope="session")
def jali() -> Callable[..., Any]:
    """`jali("generate", …)`: exit_code, stdout and stderr apart; bugs keep their traceback."""
    from typer.testing import CliRunner

    from jali.cli.main import app

    def call(*words: object) -> Any:
        done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return call
