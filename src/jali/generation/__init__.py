"""Run folders: the clips of one set of settings, and everything that was known when they were made.

`produce` makes or continues one, `read_gallery` opens one.
"""

from __future__ import annotations

from jali.generation.manifest import Entry, Gallery, GalleryError, read_gallery
from jali.generation.produce import Tick, produce
from jali.generation.settings import Settings

__all__ = ["Entry", "Gallery", "GalleryError", "Settings", "Tick", "produce", "read_gallery"]
