"""MaskBook: what attention looked at, recorded once and replayed without scoring."""

from __future__ import annotations

from jali.integration.fingerprint import Fingerprint
from jali.maskbook.book import MaskBook
from jali.maskbook.container import BookError
from jali.maskbook.error_book import ErrorBook
from jali.maskbook.header import MEAN, Header
from jali.maskbook.write import write_book

__all__ = ["MEAN", "BookError", "ErrorBook", "Fingerprint", "Header", "MaskBook", "write_book"]
