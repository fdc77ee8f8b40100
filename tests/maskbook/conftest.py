"""Books for the tests: made up for those of the format, recorded for the others."""

from __future__ import annotations

import sys
from pathlib import Path

# The tiny pipelines of the diffusers tests serve here too.
sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
