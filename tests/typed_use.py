"""What a type checker knows of the public names; mypy reads this, nothing runs it."""

from typing import assert_type

import jali

assert_type(jali.TokenGrid.video(1, 2, 3), jali.TokenGrid)
assert_type(jali.__version__, str)
jali.no_such_name()  # type: ignore[attr-defined]
