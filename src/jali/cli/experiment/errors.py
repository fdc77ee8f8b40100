"""How these commands end: what an experiment may raise, as a sentence and a code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from jali.cli.exits import INTERRUPTED, fail, refuse


@contextmanager
def errors() -> Iterator[None]:
    """One sentence each: 2 for what was asked, 1 for what went wrong, 130 for Ctrl-C."""
    from jali.experiments.cluster import LaunchError
    from jali.experiments.job import Stopped, sentence
    from jali.experiments.lock import HeldError
    from jali.experiments.slurm import SlurmSilentError
    from jali.experiments.storage import UnreadableError

    try:
        yield
    except (LaunchError, HeldError, SlurmSilentError, UnreadableError) as error:
        fail(error)
    except FileNotFoundError as error:
        refuse(error)
    except (ValueError, TypeError) as error:
        refuse(error)
    except (OSError, MemoryError, ArithmeticError) as error:
        fail(sentence(error))
    except Stopped as error:
        typer.echo(f"jali: {error}", err=True)
        raise typer.Exit(INTERRUPTED) from None
