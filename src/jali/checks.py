"""Every rule of a call, checked where tensors enter and before any work."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jali.backends import Task
from jali.methods import Dense, Method
from jali.tokens.grid import TokenGrid
from jali.tokens.order import Raster
from jali.tokens.padding import KeyPadding

# Beyond these nobody calls sparse attention: no model has so many heads, and so few tokens are one
# block, of which nothing can be left out.
MOST_HEADS, FEWEST_TOKENS = 256, 128


class Call(NamedTuple):
    """A checked call: what it is about, without its tensors."""

    method: Method
    q_grid: TokenGrid
    k_grid: TokenGrid | None
    offset: int | None
    scale: float
    padding: KeyPadding | None
    task: Task

    @property
    def full_task(self) -> Task:
        """The same call, reading everything."""
        return self.task if self.task.ratios == (1,) else replace(self.task, ratios=(1,))


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: Method,
    grid: TokenGrid | Sequence[int] | None = None,
    key_grid: TokenGrid | Sequence[int] | None = None,
    offset: int | None = None,
    scale: float | None = None,
    padding: KeyPadding | None = None,
    causal: bool = False,
) -> Call:
    """What `attend` is called with, checked; [B, H, S, D] each."""
    check_tensors(q, k, v)
    q_grid = grid if grid is None else TokenGrid.of(grid)
    k_grid = key_grid if key_grid is None else TokenGrid.of(key_grid)
    Sq, Sk = q.shape[2], k.shape[2]
    if offset is not None and (not isinstance(offset, int) or not 0 <= offset <= Sk - Sq):
        raise ValueError(
            f"offset is the first query's place among {Sk} keys, so 0..{Sk - Sq} for {Sq} queries; "
            f"got {offset}"
        )
    if causal and not method.can_be_causal:
        if method.tail:
            raise ValueError("a tail cannot be causal: the mean of a block holds keys to come")
        if method.probes and not method.needs_values:
            raise ValueError(
                f"probes={method.probes} cannot be causal: rows to come would correct earlier ones"
            )
        in_order = isinstance(method.token_order, Raster)
        why = "its scores know" if in_order else "its blocks are not in sequence order and hold"
        raise ValueError(
            f"{method.name} cannot be causal: {why} keys to come; "
            f"use plain entropy, ada_bsa or dense"
        )
    if causal and padding is not None:
        raise ValueError("causal attention with padded keys is not supported; drop the padding")
    kind = None if padding is None else padding.kind
    q_grid, k_grid, task = _facts(
        q.device, q.dtype, q.shape, k.shape, q_grid, k_grid, method.executed_ratios, kind, causal,
        sparse=not isinstance(method, Dense),
    )  # fmt: skip
    if causal and offset is None and k_grid not in (None, q_grid):
        raise ValueError(
            f"a causal call with {Sq} queries and {Sk} other keys needs offset=, the first query's "
            f"place among them"
        )
    return Call(method, q_grid, k_grid, offset, check_scale(scale, q.shape[3]), padding, task)


# A model makes the same few calls thousands of times: what follows from values is made once.
@functools.lru_cache(maxsize=256)
def _facts(
    device: torch.device, dtype: torch.dtype, q: torch.Size, k: torch.Size,
    grid: TokenGrid | None, key_grid: TokenGrid | None,
    ratios: tuple[int, ...], padding: str | None, causal: bool, sparse: bool,
) -> tuple[TokenGrid, TokenGrid | None, Task]:  # fmt: skip
    """The queries' grid, the keys' where they are another sequence, and what is to be done."""
    Sq, Sk = q[2], k[2]
    _check_order(q, k, grid, sparse)
    grid = grid or TokenGrid.flat(Sq)
    grid.check(Sq, "grid")
    if key_grid is not None:
        key_grid.check(Sk, "key_grid")
    elif Sk != Sq:
        key_grid = TokenGrid.flat(Sk)
    task = Task(
        device=device,
        dtype=dtype,
        head_dim=q[3],
        heads=q[1],
        kv_heads=k[1],
        q_tokens=Sq,
        k_tokens=Sk,
        ratios=ratios,
        padding=padding,
        causal=causal,
    )
    return grid, key_grid, task


def _check_order(q: torch.Size, k: torch.Size, grid: TokenGrid | None, sparse: bool) -> None:
    """Refuse [B, S, H, D]: heads by the hundred with a block of tokens each, or the grid's tokens
    where heads are."""
    many = sparse and q[1] > MOST_HEADS and max(q[2], k[2]) <= FEWEST_TOKENS
    if many or (grid is not None and grid.tokens == q[1] != q[2]):
        raise ValueError(
            f"q {list(q)} is [batch, heads, tokens, head_dim], so {q[1]} heads of {q[2]} tokens; "
            f"if it is the other way round, pass q.transpose(1, 2), and k and v alike"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Rank, sizes, dtype, device, and no gradients: [B, H, S, D] each."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise TypeError(_not_a_tensor(q=q, k=k, v=v))
    _check_together(
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError(
            "q, k or v requires gradients, but jali only does inference: "
            "call it under torch.no_grad() or detach the tensors"
        )


def _not_a_tensor(**given: object) -> str:
    name = next(name for name, x in given.items() if not isinstance(x, Tensor))
    return f"{name} must be a tensor, got {type(given[name]).__name__}"


@functools.lru_cache(maxsize=256)
def _check_together(q: torch.Size, k: torch.Size, v: torch.Size, *kinds: Any) -> None:
    """Their shapes, and their three dtypes and devices."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, heads, tokens, head_dim], got {list(shape)}"
            )
        if shape.numel() == 0:
            raise ValueError(f"{name} is empty: {list(shape)}")
    if k != v:
        raise ValueError(f"k and v must have one shape, got {list(k)} and {list(v)}")
    if q[0] != k[0]:
        raise ValueError(f"q and k must have one batch size, got {q[0]} and {k[0]}")
    if q[3] != k[3]:
        raise ValueError(f"q and k must have one head dim, got {q[3]} and {k[3]}")
    if q[1] % k[1]:
        swapped = "; [batch, tokens, heads, head_dim] wants .transpose(1, 2)" * (q[2] == k[2])
        raise ValueError(
            f"query heads must be a multiple of key heads, got {q[1]} and {k[1]}{swapped}"
        )
    dtypes, devices = kinds[:3], kinds[3:]
    for name, dtype in zip("qkv", dtypes, strict=True):
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {dtype}")
    if len(set(dtypes)) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {', '.join(map(str, dtypes))}")
    if len(set(devices)) > 1:
        raise ValueError(f"q, k, v must be on one device, got {', '.join(map(str, devices))}")


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def check_padding(
    length: Tensor | Sequence[int] | None, mask: Tensor | None, k: Tensor
) -> KeyPadding | None:
    """The real keys of k [B, Hkv, Sk, D], as a caller describes them."""
    if length is not None and mask is not None:
        raise ValueError("give key_length or key_mask, not both")
    B, Sk = k.shape[0], k.shape[2]
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"key_mask must be a bool tensor [{B}, {Sk}], got {mask!r}")
        if mask.dtype != torch.bool or tuple(mask.shape) != (B, Sk):
            raise ValueError(
                f"key_mask must be bool [{B}, {Sk}] (True is real), "
                f"got {mask.dtype} {list(mask.shape)}"
            )
        return KeyPadding(mask=mask.to(k.device))
    if length is None:
        return None
    if not isinstance(length, Tensor):
        length = torch.as_tensor(length)
    if tuple(length.shape) != (B,) or length.dtype.is_floating_point or length.dtype == torch.bool:
        raise ValueError(f"key_length must be {B} ints, got {length.dtype} {list(length.shape)}")
    if length.device.type != "cpu":
        return KeyPadding(length=length.to(k.device, torch.int32))
    known = tuple(length.tolist())
    if any(not 0 <= n <= Sk for n in known):
        raise ValueError(f"key_length must be {B} lengths in 0..{Sk}, got {list(known)}")
    return KeyPadding.of_lengths(known, k.device)
