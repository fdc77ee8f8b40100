"""How a command ends: one sentence on stderr, and a code that means something."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import typer

from jali.error import shorten

LONGEST = 1000  # letters of a sentence that ends a command; paths are long
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def refuse(sentence: object) -> NoReturn:
    """Bad input."""
    _end(sentence, BAD_INPUT)


def fail(sentence: object) -> NoReturn:
    """A job that could not be done."""
    _end(sentence, FAILED)


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """While input is read and checked, what is refused is the user's to change."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        refuse(_reason(error))


@contextlib.contextmanager
def job_errors() -> Iterator[None]:
    """While a job runs: a value that is refused late is still input; a full disk, no memory or
    numbers that are not finite are a failed job. Anything else is a bug, and keeps its traceback.
    """
    try:
        yield
    except Exception as error:
        from jali.error import JobError

        missing = isinstance(error, FileNotFoundError)
        failed = isinstance(error, OSError | ArithmeticError | MemoryError | JobError)
        if failed and not missing:
            fail(_reason(error))
        if type(error).__name__ == "OutOfMemoryError":
            fail(f"out of memory: {_reason(error)}")
        if missing or isinstance(error, ValueError | ImportError) or _refusal(error):
            refuse(_reason(error))
        raise


@contextlib.contextmanager
def short_usage_errors() -> Iterator[None]:
    """What typer says of a value it cannot read repeats the value, however long."""
    try:
        yield
    except typer.BadParameter as error:
        error.message = shorten(error.message, LONGEST)
        raise


def _refusal(error: Exception) -> bool:
    """A TypeError that jali itself raises is about input; any other one is about code."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    place = "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, TypeError) and place.startswith("jali.")


def _reason(error: BaseException) -> str:
    from jali.error import ArgumentError

    if isinstance(error, ArgumentError):
        from jali.cli.options import flag_of

        return error.said_as(flag_of)
    if isinstance(error, OSError) and error.strerror:
        return f"{f'{error.filename} cannot be used: ' if error.filename else ''}{error.strerror}"
    return str(error).strip() or type(error).__name__


def _end(sentence: object, code: int) -> NoReturn:
    typer.echo(f"jali: {shorten(sentence, LONGEST)}", err=True)
    raise typer.Exit(code)
