"""Run folders: the clips of one set of settings, and everything that was known when they were made.

`produce` makes or continues one, `read_gallery` opens one.
"""

from __future__ import annotations

from jali.gallery.manifest import Entry, Gallery, GalleryError, read_gallery
from jali.gallery.produce import Tick, produce
from jali.gallery.settings import Settings

__all__ = ["Entry", "Gallery", "GalleryError", "Settings", "Tick", "produce", "read_gallery"]
