"""FlashAttention-4 (package flash-attn-4): the fastest kernel for binary plans on Hopper and
Blackwell, through its public function and with the caller's own strides."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from jali.backends.backend import (
    HALF_PRECISION,
    Backend,
    Task,
    common_reasons,
    contiguous_rows,
    multiples,
)  # fmt: skip
from jali.kernels.lists import BlockList
from jali.planning.plan import BlockPlan
from jali.tokens.heads import heads_last
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding

log = logging.getLogger("jali")

TESTED = ("4.0.0b36",)
HOPPER_DIM_64_BLOCKS = Blocks(384, 128)


class Fa4(Backend):
    """Lists go to the kernel as they are: ascending, because it masks the ragged tail only in the
    last entry of a list, and any other order would silently read past the keys."""

    name: ClassVar[str] = "fa4"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = HALF_PRECISION

    def why_not(self, task: Task) -> list[str]:
        reasons = [*why_no_kernel(task.device)]
        reasons += common_reasons(task, HALF_PRECISION, range(8, 129, 8), pools=False)
        if task.padding == "mask":
            reasons.append("knows key lengths, not key masks")
        if task.padding == "length":
            reasons.append("needs key lengths on the host: pass a list or a CPU tensor")
        return reasons

    def preferred(self, task: Task) -> Blocks:
        # At head dim 64 Hopper's kernel has a tile of 192 rows, and 384 is two of them.
        on_hopper = _generation(task.device) == 9
        return HOPPER_DIM_64_BLOCKS if on_hopper and task.head_dim <= 64 else self.blocks

    def fitting(self, blocks: Blocks, task: Task) -> Blocks:
        """Hopper: multiples of 64 rows, and 64, 96 or 128 keys. Blackwell: 256, 128."""
        if _generation(task.device) != 9:
            return Blocks(multiples(blocks, 256, 1).q, 128)
        if blocks.k in (64, 96, 128) and blocks.q % 64 == 0:
            return blocks
        keys = blocks.k if blocks.k in (64, 96, 128) else 64 if blocks.k < 64 else 128
        return Blocks(multiples(blocks, 64, 1).q, keys)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, out_buffer: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
        if padding is None:
            return sparse(q, k, v, plan.lists[1], plan.blocks, scale)
        assert padding.host is not None
        return _by_length(q, k, v, plan.lists[1], plan.blocks, scale, padding.host)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Full attention by the same package. [B, H, S, D] views in and out."""
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    out, _ = _flash().interface.flash_attn_func(
        heads_last(q), heads_last(k), heads_last(v), softmax_scale=scale
    )
    return out.transpose(1, 2)


@functools.cache
def why_no_kernel(device: torch.device) -> tuple[str, ...]:
    """Why the package cannot run on this device at all."""
    reasons: list[str] = []
    if device.type != "cuda":
        reasons.append(f"needs a CUDA device, the tensors are on {device.type}")
    elif _generation(device) not in (9, 10, 11):
        major, minor = torch.cuda.get_device_capability(device)
        reasons.append(f"needs Hopper or Blackwell (9.x, 10.x), this is {major}.{minor}")
    if importlib.util.find_spec("flash_attn") is None or _version() is None:
        reasons.append("flash-attn-4 is not installed: pip install --pre 'jali[fa4]'")
    return tuple(reasons)


@functools.cache
def _version() -> str | None:
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None
    if version not in TESTED:
        log.warning("flash-attn-4 %s is untested with jali; tested: %s", version, ", ".join(TESTED))
    return version


@functools.cache
def _flash() -> Any:
    """The package's modules `interface` and `block_sparsity`, imported with the first call."""
    import flash_attn.cute.block_sparsity
    import flash_attn.cute.interface

    return flash_attn.cute


@functools.cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@functools.lru_cache(maxsize=64)
def _no_masked_blocks(M: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The kernel wants a list of blocks to be masked, too. Ours is always empty."""
    counts = torch.zeros(1, 1, M, dtype=torch.int32, device=device)
    return counts, counts[..., None].contiguous()


def sparse(
    q: Tensor, k: Tensor, v: Tensor, listed: BlockList, blocks: Blocks, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the listed blocks, rows of q, k and v contiguous: output and log-sum-exp."""
    counts, indices = listed
    empty_counts, empty_indices = _no_masked_blocks(counts.shape[2], q.device)
    listed_blocks = _flash().block_sparsity.BlockSparseTensorsTorch(
        mask_block_cnt=empty_counts,
        mask_block_idx=empty_indices,
        full_block_cnt=counts,
        full_block_idx=indices,
        block_size=(blocks.q, blocks.k),
    )
    out, lse = _flash().interface.flash_attn_func(
        heads_last(q), heads_last(k), heads_last(v), softmax_scale=scale,
        block_sparse_tensors=listed_blocks, return_lse=True,
        pack_gqa=False,  # packed query heads would all read the lists of one of them
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _by_length(
    q: Tensor, k: Tensor, v: Tensor, listed: BlockList, blocks: Blocks, scale: float,
    lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One call per sample, its keys cut to their length and its lists to the blocks left."""
    counts, indices = listed
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    slot = torch.arange(indices.shape[-1], device=q.device)
    for b, length in enumerate(lengths):
        one, here = slice(b, b + 1), slice(b % counts.shape[0], b % counts.shape[0] + 1)
        if length == 0:
            out[one], lse[one] = 0, -torch.inf
            continue
        left = -(-length // blocks.k)
        inside = (slot < counts[here, ..., None]) & (indices[here] < left)
        kept = inside.sum(-1, dtype=torch.int32)
        real = BlockList(kept, indices[here, ..., :left])
        out[one], lse[one] = sparse(
            q[one], k[one, :, :length], v[one, :, :length], real, blocks, scale
        )
    return out, lse
