"""A command's own words only: the libraries below it keep their progress bars to themselves."""

from __future__ import annotations


def quiet_libraries() -> None:
    """For this process. Their warnings stay."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
