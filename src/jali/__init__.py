"""jali: training-free sparse attention for video and image diffusion transformers."""

from jali import lazy, moved
from jali.version import __version__ as __version__

__all__, __getattr__, __dir__ = lazy.attach(__name__)
moved.install()
