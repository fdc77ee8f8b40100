"""Examples in docstrings (`>>> …`) as code, wherever in a docstring they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a prompt to the next empty line, the lines at least as far in.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)


def fence(text: str) -> str:
    """The text with its examples between fences."""
    return EXAMPLE.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text)


class DoctestBlocks(griffe.Extension):
    """Read by mkdocstrings before a docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and "```" not in obj.docstring.value:
            obj.docstring.value = fence(obj.docstring.value)
