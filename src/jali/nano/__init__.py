"""nano: a small text-to-video model in the Wan architecture, its world, and how it was trained."""

from importlib.resources import files
from pathlib import Path


def folder() -> Path:
    """The diffusers folder that holds the weights."""
    return Path(str(files(__name__))) / "weights"
