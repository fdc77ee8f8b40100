"""MaskBook: what attention looked at, recorded once and replayed without scoring."""

from __future__ import annotations

from jali.maskbook.book import MaskBook
from jali.maskbook.container import BookError
from jali.maskbook.header import MEAN, Fingerprint, Header
from jali.maskbook.write import write_book

__all__ = ["MEAN", "BookError", "Fingerprint", "Header", "MaskBook", "write_book"]
