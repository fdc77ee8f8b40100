"""Autoregressive generation: a chunk of frames against a growing cache of earlier ones.

A causal video model makes a few latent frames at a time. The queries are those of the chunk; the
keys are those of every frame kept so far, and the chunk's own. Here attention is sparse over that
cache, by any method: the keys are one video that grows in time, and the chunk knows its place.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from jali.attend import attend
from jali.integration.operator import number_of
from jali.integration.processor import make_sparse
from jali.integration.stats import KEPT
from jali.methods import Method, make_method
from jali.planning.site import Site
from jali.tokens.grid import Box, TokenGrid
from jali.value import check_count

_SELF_ATTENTION = re.compile(r"blocks\.\d+\.attn1")


class KVCache:
    """Keys (after RoPE) and values of earlier frames, and room for those of the chunk at hand.

    `put` writes the chunk behind the kept frames and returns everything; it may be called again,
    once per denoising step, and then overwrites the chunk. `keep` makes the chunk part of the
    cache. With a `limit` of frames the oldest ones fall out, except the first `sink` ones.
    """

    def __init__(self, limit: int | None = None, sink: int = 0) -> None:
        check_count("sink", sink, least=0)
        if limit is not None:
            check_count("limit", limit)
        if limit is not None and sink >= limit:
            raise ValueError(f"need sink < limit frames, got sink={sink}, limit={limit}")
        self.limit, self.sink = limit, sink
        self.frames = 0
        self.pending = 0
        self._frame_tokens = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the kept frames."""
        return self.frames * self._frame_tokens

    def put(self, k: Tensor, v: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """k, v [B, H, S, D] of a chunk of `frames` -> those of all frames, the chunk last."""
        self._check(k, frames)
        start, end = self.tokens, self.tokens + k.shape[2]
        self._k, self._v = _room(self._k, k, start, end), _room(self._v, v, start, end)
        self._k[:, :, start:end] = k
        self._v[:, :, start:end] = v
        self.pending = frames
        return self._k[:, :, :end], self._v[:, :, :end]

    def keep(self) -> None:
        """The chunk put last becomes part of the cache."""
        if not self.pending:
            raise ValueError("there is no chunk to keep: none was put since the last one")
        self.frames += self.pending
        self.pending = 0
        over = self.frames - (self.limit or self.frames)
        if over <= 0:
            return
        # A clone, since the two stretches of one buffer overlap.
        first = self.sink * self._frame_tokens
        gone, end = over * self._frame_tokens, self.tokens
        for buffer in (self._k, self._v):
            assert buffer is not None
            buffer[:, :, first : end - gone] = buffer[:, :, first + gone : end].clone()
        self.frames -= over

    def _check(self, k: Tensor, frames: int) -> None:
        check_count("frames", frames)
        each, rest = divmod(k.shape[2], frames)
        if rest:
            raise ValueError(f"{k.shape[2]} tokens are not {frames} equal frames")
        if self._k is None:
            self._frame_tokens = each
            return
        changes = [
            f"{what} {own}, this chunk {new}"
            for what, own, new in (
                ("tokens per frame", self._frame_tokens, each),
                ("batch size", self._k.shape[0], k.shape[0]),
                ("heads", self._k.shape[1], k.shape[1]),
                ("head dim", self._k.shape[3], k.shape[3]),
                ("dtype", self._k.dtype, k.dtype),
                ("device", self._k.device, k.device),
            )
            if own != new
        ]
        if changes and self.frames:
            raise ValueError(f"the cache has {'; '.join(changes)}; reset() before another kind")
        if changes:  # nothing is kept yet, so the first chunk may still change
            self._k, self._v, self._frame_tokens = None, None, each


def _room(buffer: Tensor | None, like: Tensor, start: int, end: int) -> Tensor:
    """A buffer of at least `end` tokens that holds the first `start`; it doubles when it grows."""
    if buffer is not None and buffer.shape[2] >= end:
        return buffer
    B, H, _, D = like.shape
    larger = like.new_empty(B, H, end if buffer is None else max(end, 2 * buffer.shape[2]), D)
    if buffer is not None:
        larger[:, :, :start] = buffer[:, :, :start]
    return larger


@dataclass(frozen=True, slots=True)
class ChunkCall:
    """One attention call: where it was, how many keys it had, what it cost (None: dense).

    The cost stays on the device until someone reads it. `queries` are those of the chunk.
    """

    chunk: int
    site: Site
    keys: int
    cost: Tensor | None
    queries: int = 1

    def work(self) -> tuple[float, float]:
        """Dense work, and how much of it was done. Waits for the device."""
        dense = float(self.queries * self.keys)
        return dense, dense if self.cost is None else dense * float(self.cost)


@dataclass(eq=False)
class ChunkState:
    """The run: its caches (per layer and guidance branch), its place, and what it has cost.

    `calls` are the latest, at least `KEPT` of them; of older ones the sums of each chunk are kept.
    """

    deals_heads: ClassVar[bool] = False  # caches are of the heads that a rank has

    method: Method
    backend: str
    layers: int
    limit: int | None = None
    sink: int = 0
    calls: list[ChunkCall] = field(default_factory=list)
    chunk: int = 0
    frames: int = 0
    site: Site = field(default_factory=Site)
    _box: Box | None = None
    _caches: dict[str, list[KVCache]] = field(default_factory=dict)
    _older: dict[int, tuple[float, float]] = field(default_factory=dict)  # dense work, and done

    def __post_init__(self) -> None:
        self.number = number_of(self)

    def at(self, step: int, steps: int, branch: str = "cond") -> None:
        """Where the next transformer call is. Guidance branches have caches of their own."""
        self.site = Site(step, steps, 0, self.layers, branch)

    def keep(self) -> None:
        """The chunk is done: what its last pass wrote, in every branch, is what later ones read."""
        if self._box is None:
            raise ValueError("there is no chunk to keep: the transformer was not called")
        every = [(b, i, c) for b, caches in self._caches.items() for i, c in enumerate(caches)]
        for branch, layer, cache in every:
            if cache.pending != self._box.frames:
                raise ValueError(
                    f"layer {layer} (branch {branch!r}) has not seen this chunk: "
                    f"run every branch to its end before keep(), and no cache that skips layers"
                )
        for _, _, cache in every:
            cache.keep()
        self.frames += self._box.frames
        self.chunk += 1
        self._box = None

    def reset(self) -> None:
        """Forget every frame: the next chunk is the first of another video."""
        self._caches.clear()
        self.calls.clear()
        self._older.clear()
        self.chunk, self.frames, self._box = 0, 0, None

    def cost(self, chunk: int | None = None) -> float:
        """Share of dense work, dense calls included; of one chunk or of all."""
        found = [own for at, own in self._older.items() if chunk in (None, at)]
        found += [call.work() for call in self.calls if chunk in (None, call.chunk)]
        whole = sum(work for work, _ in found)
        return sum(done for _, done in found) / whole if found else 1.0

    def begin(self, box: Box) -> None:
        """A transformer call with a chunk of this grid starts."""
        self._box = box

    def choose_dense_backend(self, backend: Any) -> None:
        """`set_attention_backend` is for the other attentions of the model."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        scale: float | None, ranks: int, rank: int,  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """q, k, v [B, S, H, D] of the chunk -> its attention to all kept frames and itself."""
        if mask is not None or k.shape != q.shape or ranks > 1:
            raise ValueError("a chunk attends to its own cache: no other keys, no mask, one rank")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        box = self._box
        if box is None:
            raise RuntimeError("a layer was called outside its transformer: its grid is unknown")
        cache = self._cache(layer)
        offset = cache.tokens
        keys, values = cache.put(k, v, box.frames)
        site = replace(self.site, layer=layer, layers=self.layers)
        video = replace(box, frames=cache.frames + box.frames)
        done = attend(
            q, keys, values, method=self.method, grid=TokenGrid((box,)),
            key_grid=TokenGrid((video,)), offset=offset, site=site, backend=self.backend,
            scale=scale,
        )  # fmt: skip
        cost = None if done.executed is None else done.executed.costs.mean()
        self._note(ChunkCall(self.chunk, site, keys.shape[2], cost, q.shape[2]))
        return done.out.transpose(1, 2)

    def _note(self, call: ChunkCall) -> None:
        self.calls.append(call)
        if len(self.calls) < 2 * KEPT:
            return
        for old in self.calls[:KEPT]:
            sums, own = self._older.get(old.chunk, (0.0, 0.0)), old.work()
            self._older[old.chunk] = sums[0] + own[0], sums[1] + own[1]
        del self.calls[:KEPT]

    def _cache(self, layer: int) -> KVCache:
        branch = self.site.branch
        if branch not in self._caches:
            if self.frames:
                raise ValueError(
                    f"branch {branch!r} begins at chunk {self.chunk}: it has no cache of the "
                    f"{self.frames} frames before; run it from the first chunk on"
                )
            self._caches[branch] = [KVCache(self.limit, self.sink) for _ in range(self.layers)]
        return self._caches[branch][layer]


@contextlib.contextmanager
def autoregressive_mode(
    model: Any,
    method: str | Method = "entropy",
    *,
    backend: str = "auto",
    frame_limit: int | None = None,
    sink_frames: int = 0,
) -> Iterator[ChunkState]:
    """A Wan-style transformer (or the pipeline that has it) that generates chunk by chunk.

        with autoregressive_mode(transformer, Entropy(Budget(0.3))) as state:
            for chunk in chunks:
                for step, t in enumerate(timesteps):
                    state.at(step, len(timesteps))
                    chunk = denoise(transformer(chunk, t, text), chunk)
                transformer(chunk, t_clean, text)  # what later chunks are to read
                state.keep()

    Positions go on in time from chunk to chunk. Processors and hooks are as before afterwards,
    however the block ends. Runs eagerly: the cache grows, so nothing here is for torch.compile.

    Args:
        model: the transformer, or a pipeline whose `transformer` it is.
        method: a method's name, or a Method with its schedule.
        backend: who executes plans.
        frame_limit: how many latent frames are kept; all of them without one.
        sink_frames: how many of the first frames stay for good.

    Yields:
        The state of the run: `at` says the step, `keep` ends a chunk, `reset` begins another
        video, `cost` is the share of dense work.

    Raises:
        TypeError: `model` is no transformer and has none.
        ValueError: it is not a stock Wan transformer, or is in another mode already; or
            `sink_frames` is not below `frame_limit`.
    """
    transformer = getattr(model, "transformer", model)
    layers = _self_attentions(transformer)
    state = ChunkState(make_method(method), backend, len(layers), frame_limit, sink_frames)
    KVCache(frame_limit, sink_frames)  # a wrong limit is wrong now, not at the first layer
    before = [layer.processor for layer in layers]
    hook = transformer.rope.register_forward_hook(_positions(state))
    try:
        for index, layer in enumerate(layers):
            layer.processor = make_sparse(layer.processor, state, state.number, index, "dispatcher")
        yield state
    finally:
        for layer, processor in zip(layers, before, strict=True):
            layer.processor = processor
        hook.remove()


def _self_attentions(transformer: Any) -> list[Any]:
    """In order; refuses what is not a stock Wan transformer."""
    if not isinstance(transformer, nn.Module):
        raise TypeError(f"a transformer or a pipeline is needed, got {type(transformer).__name__}")
    found = [m for name, m in transformer.named_modules() if _SELF_ATTENTION.fullmatch(name)]
    if not found or not hasattr(transformer, "rope"):
        raise ValueError(
            f"{type(transformer).__name__} is not a Wan-style transformer (blocks.N.attn1 and "
            f"rope), and chunks of other models are not known"
        )
    for layer in found:
        if type(layer.processor) is not WanAttnProcessor:
            raise ValueError(
                f"the transformer already has a {type(layer.processor).__name__}; leave that mode "
                f"(or remove that handle) first"
            )
    return found


def _positions(state: ChunkState) -> Any:
    """A forward hook on the position embedding, which sees the grid of every transformer call."""

    def hook(rope: Any, args: tuple[Tensor, ...], found: tuple[Tensor, Tensor]) -> Any:
        latents = args[0]
        sizes = (n // p for n, p in zip(latents.shape[2:], rope.patch_size, strict=True))
        box = Box(*sizes)
        state.begin(box)
        if not state.frames:
            return found
        end = state.frames + box.frames
        if end > rope.max_seq_len:
            raise ValueError(
                f"frames {state.frames}..{end - 1} are beyond the {rope.max_seq_len} positions "
                f"of this model; reset() begins another video"
            )
        # The embedding looks at the shape alone: ask for the whole video, take the chunk.
        shape = (*latents.shape[:2], end * rope.patch_size[0], *latents.shape[3:])
        whole = rope.forward(latents.new_empty(()).expand(shape))
        return tuple(part[:, -box.tokens :] for part in whole)

    return hook
