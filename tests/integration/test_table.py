"""The cells "=" of docs/models.md, against diffusers: there is no such thing in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

pytestmark = pytest.mark.skipif(tiny.OLD, reason="the table is of diffusers 0.42")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SAYS = ("tested", "untested", "=", "cannot")
MODELS: dict[str, Callable[[], Any]] = {
    "Wan": lambda: tiny.wan_transformer(2),
    "CogVideoX": lambda: tiny.cogvideox(layers=2).transformer,
    "HunyuanVideo": lambda: tiny.hunyuan().transformer,
    "HunyuanVideo 1.5": lambda: tiny.hunyuan15().transformer,
    "LTX": lambda: tiny.ltx(2).transformer,
    "LTX-2": tiny.ltx2_transformer,
    "Flux": lambda: tiny.flux().transformer,
    "Qwen-Image": tiny.qwen_transformer,
}


def table() -> dict[str, dict[str, str]]:
    """Row by row, the cell of every family."""
    lines = PAGE.read_text().split("## With what")[1].split("##")[0].splitlines()
    rows = [[cell.strip() for cell in x.strip("|").split("|")] for x in lines if x[:1] == "|"]
    head, _, *body = rows
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in body}


def fuses(model: Any) -> bool:
    names = set(model.state_dict())
    try:
        model.fuse_qkv_projections()
    except RuntimeError:
        return False
    return set(model.state_dict()) != names


def caches(model: Any) -> bool:
    from diffusers import FirstBlockCacheConfig

    try:
        model.enable_cache(FirstBlockCacheConfig())
    except ValueError:
        return False
    return True


HAS: dict[str, Callable[[Any], bool]] = {
    "compile_repeated_blocks": lambda model: bool(model._repeated_blocks),
    "whole model compiled": lambda _: True,
    "offload, LoRA, casting": lambda _: True,
    "fused projections": fuses,
    "first-block cache": caches,
    "Ulysses, 2 and 4 ranks": lambda model: bool(model._cp_plan),
    "Ulysses, blocks compiled": lambda model: bool(model._cp_plan),
    "tensor parallelism, 2 and 4 ranks": lambda model: bool(getattr(model, "_tp_plan", None)),
    "by backend name": lambda _: True,
}
# A plan that does not run, as `ranks.py` shows.
BROKEN = {("Ulysses, 2 and 4 ranks", "LTX-2"), ("Ulysses, blocks compiled", "LTX-2")}


def test_the_rows_and_columns() -> None:
    found = table()
    assert list(found) == list(HAS)
    for row in found.values():
        assert list(row) == list(MODELS)
        assert all(cell.split()[0].rstrip("¹²³") in SAYS for cell in row.values())


@pytest.mark.parametrize("family", MODELS)
def test_what_diffusers_lacks(family: str) -> None:
    for row, cells in table().items():
        lacks = not HAS[row](MODELS[family]()) or (row, family) in BROKEN
        assert (cells[family][:1] == "=") == lacks, row
