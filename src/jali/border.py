"""Where tensors enter: every rule of a call is checked here, before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jali.backends import Task
from jali.grid import TokenGrid
from jali.methods import Method
from jali.padding import KeyPadding


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call."""

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


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: TokenGrid | Sequence[int] | None,
    key_grid: TokenGrid | Sequence[int] | None,
    offset: int | None,
    scale: float | None,
    key_length: Tensor | Sequence[int] | None,
    key_mask: Tensor | None,
    causal: bool,
    method: Method,
) -> Call:
    check_tensors(q, k, v)
    B, H, Sq, D = q.shape
    kv_heads, Sk = k.shape[1:3]
    q_grid = TokenGrid.flat(Sq) if grid is None else TokenGrid.of(grid)
    q_grid.check(Sq, "grid")
    k_grid = None
    if key_grid is not None:
        k_grid = TokenGrid.of(key_grid)
        k_grid.check(Sk, "key_grid")
    elif Sk != Sq:
        k_grid = TokenGrid.flat(Sk)
    if offset is not None and (not isinstance(offset, int) or not 0 <= offset <= Sk - Sq):
        raise ValueError(
            f"offset is the first query's place among {Sk} keys, so 0..{Sk - Sq} for {Sq} queries; "
            f"got {offset}"
        )
    if causal and not method.can_be_causal:
        raise ValueError(
            f"{method.name} cannot be causal: its blocks are not in sequence order; "
            f"use entropy, ada_bsa or dense"
        )
    if causal and offset is None and k_grid not in (None, q_grid):
        raise ValueError(
            f"a causal call with {Sq} queries and {Sk} other keys needs offset=, the first query's "
            f"place among them"
        )
    padding = _padding(key_length, key_mask, B, Sk, k.device)
    if causal and padding is not None:
        raise ValueError("causal attention with padded keys is not supported; drop the padding")
    return Call(
        method=method,
        q_grid=q_grid,
        k_grid=k_grid,
        offset=offset,
        scale=check_scale(scale, D),
        padding=padding,
        task=Task(
            device=q.device,
            dtype=q.dtype,
            head_dim=D,
            heads=H,
            kv_heads=kv_heads,
            q_tokens=Sq,
            k_tokens=Sk,
            ratios=method.ratios,
            padding=None if padding is None else padding.kind,
            causal=causal,
        ),
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Rank, sizes, dtype, device, and no gradients: [B, H, S, D] each."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    _check_shapes(q.shape, k.shape, v.shape)
    _check_kinds(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError(
            "q, k or v requires gradients, but jali only does inference: "
            "call it under torch.no_grad() or detach the tensors"
        )


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
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
        raise ValueError(f"query heads must be a multiple of key heads, got {q[1]} and {k[1]}")


def _check_kinds(
    q: torch.dtype, k: torch.dtype, v: torch.dtype,
    q_at: torch.device, k_at: torch.device, v_at: torch.device,
) -> None:  # fmt: skip
    for name, dtype in (("q", q), ("k", k), ("v", v)):
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {dtype}")
    if not q == k == v:
        raise TypeError(f"q, k and v must have one dtype, got {q}, {k}, {v}")
    if not q_at == k_at == v_at:
        raise ValueError(f"q, k, v must be on one device, got {q_at}, {k_at}, {v_at}")


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def _padding(
    length: Tensor | Sequence[int] | None,
    mask: Tensor | None,
    B: int,
    Sk: int,
    device: torch.device,
) -> KeyPadding | None:
    if length is not None and mask is not None:
        raise ValueError("give key_length or key_mask, not both")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"key_mask must be a bool tensor [{B}, {Sk}], got {mask!r}")
        if mask.dtype != torch.bool or tuple(mask.shape) != (B, Sk):
            raise ValueError(
                f"key_mask must be bool [{B}, {Sk}] (True is real), "
                f"got {mask.dtype} {list(mask.shape)}"
            )
        return KeyPadding(mask=mask.to(device))
    if length is None:
        return None
    known = None
    if not isinstance(length, Tensor):
        length = torch.as_tensor(length)
    if tuple(length.shape) != (B,) or length.dtype.is_floating_point or length.dtype == torch.bool:
        raise ValueError(f"key_length must be {B} ints, got {length.dtype} {list(length.shape)}")
    if length.device.type == "cpu":
        known = tuple(length.tolist())
        if any(not 0 <= n <= Sk for n in known):
            raise ValueError(f"key_length must be {B} lengths in 0..{Sk}, got {list(known)}")
    return KeyPadding(length=length.to(device, torch.int32), host=known)
