"""The two orders of one tensor: heads before tokens, as methods and plans see it, and behind them,
as models and FlashAttention do."""

from __future__ import annotations

from torch import Tensor


def heads_first(x: Tensor) -> Tensor:
    """[B, S, H, D] -> [B, H, S, D], a view that knows what it is a view of. For use inside a call:
    a tensor that is handed out should not carry another with it."""
    view = x.transpose(1, 2)
    view.jali_heads_last = x  # type: ignore[attr-defined]
    return view


def heads_last(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B, S, H, D]. Every view made takes the host over a microsecond, so one that
    is there already is not made again."""
    known: Tensor | None = getattr(x, "jali_heads_last", None)
    return x.transpose(1, 2) if known is None else known
