"""Chunk by chunk: equal to full attention over the cache at density 1, sparse below, restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

from diffusers import CogVideoXTransformer3DModel, WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from jali import (
    Box,
    Budget,
    Dense,
    Entropy,
    Method,
    Psa,
    RfV2,
    Schedule,
    apply_sparse_attention,
    attend,
)
from jali.integration import autoregressive
from jali.integration.autoregressive import KVCache, autoregressive_mode
from jali.integration.processor import SparseProcessor

LAYERS, CHUNK, CHUNKS, SIDE = 3, 4, 3, 32  # 4 frames of 16 × 16 tokens, three times
TOKENS = CHUNK * (SIDE // 2) ** 2
SMALL_BLOCKS = {"q_block": 64, "k_block": 64}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def wan() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=LAYERS,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    ).eval()


@pytest.fixture(scope="module")
def chunks() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 4, CHUNK, SIDE, SIDE) for _ in range(CHUNKS)]


@pytest.fixture(scope="module")
def text() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(1, 7, 16)


T = torch.tensor([500.0])


def run(wan: Any, chunks: list[Tensor], text: Tensor, method: str | Method, **options: Any) -> Any:
    """Every chunk's output, and the state."""
    with autoregressive_mode(wan, method, **options) as state:
        found = []
        for chunk in chunks:
            found.append(wan(chunk, T, text).sample)
            state.keep()
    return found, state


class BlockCausal:
    """The definition: stock attention of a whole video in which a chunk sees itself and the past.

    `visible` [F, F] says which frames see which.
    """

    _attention_backend = _parallel_config = None

    def __init__(self, visible: Tensor) -> None:
        each = (SIDE // 2) ** 2
        self.mask = visible.repeat_interleave(each, 0).repeat_interleave(each, 1)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        assert attention_mask is None
        return WanAttnProcessor()(
            attn, hidden_states, encoder_hidden_states, self.mask[None, None], rotary_emb
        )


def whole_video(wan: Any, chunks: list[Tensor], text: Tensor, visible: Tensor) -> list[Tensor]:
    """All chunks in one call under a mask, which never needs a cache."""
    before = [block.attn1.processor for block in wan.blocks]
    for block in wan.blocks:
        block.attn1.processor = BlockCausal(visible)
    try:
        return list(wan(torch.cat(chunks, 2), T, text).sample.chunk(len(chunks), 2))
    finally:
        for block, processor in zip(wan.blocks, before, strict=True):
            block.attn1.processor = processor


def causal(frames: int = CHUNK * CHUNKS) -> Tensor:
    chunk = torch.arange(frames) // CHUNK
    return chunk[:, None] >= chunk[None, :]


EVERYTHING = [
    Dense(),
    Entropy(Budget(1.0), **SMALL_BLOCKS),
    Psa({1: (0.0, 1.0)}),
    RfV2(sparsity=0.0),
    Schedule(Entropy(Budget(0.1)), dense_layers=(0, 1, 2)),
]


@pytest.mark.parametrize("method", EVERYTHING, ids=lambda m: str(m)[:40])
def test_density_one_is_full_attention_over_the_cache(
    method: Method, wan: Any, chunks: list[Tensor], text: Tensor
) -> None:
    expected = whole_video(wan, chunks, text, causal())
    found, state = run(wan, chunks, text, method)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert state.cost() == 1
    # The past matters, and so does its place in time: otherwise this test shows nothing.
    alone = wan(chunks[2], T, text).sample
    assert (found[2] - alone).abs().max() > 1e-2


def test_the_first_chunk_is_the_stock_model(wan: Any, chunks: list[Tensor], text: Tensor) -> None:
    found, _ = run(wan, chunks[:1], text, "dense")
    assert torch.equal(found[0], wan(chunks[0], T, text).sample)


@pytest.mark.parametrize(
    "method",
    [
        Entropy(Budget(0.3), **SMALL_BLOCKS),
        Psa().with_budget(0.2),
        RfV2(sparsity=0.8, block_size=64),
        Entropy(Budget(0.3)),
    ],
    ids=lambda m: str(m)[:40],
)
def test_sparse_over_the_cache(
    method: Method, wan: Any, chunks: list[Tensor], text: Tensor
) -> None:
    dense, _ = run(wan, chunks, text, "dense")
    found, state = run(wan, chunks, text, method)
    for ours, theirs in zip(found, dense, strict=True):
        assert ours.isfinite().all()
        assert not torch.equal(ours, theirs)
    assert [call.keys for call in state.calls[::LAYERS]] == [TOKENS, 2 * TOKENS, 3 * TOKENS]
    for chunk in (1, 2):  # 1,024 and 2,048 cached tokens
        assert state.cost(chunk) < 0.6
    assert {call.site.layer for call in state.calls} == set(range(LAYERS))


def test_a_chunk_knows_its_place_among_the_keys(
    wan: Any, chunks: list[Tensor], text: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a budget a query block reads its own tokens only: those at the end of the cache."""
    plans = []

    def watch(*args: Any, **options: Any) -> Any:
        done = attend(*args, **options)
        plans.append(done.plan)
        return done

    monkeypatch.setattr(autoregressive, "attend", watch)
    run(wan, chunks, text, Entropy(Budget(0.0), **SMALL_BLOCKS))
    for plan in plans[2 * LAYERS :]:
        blocks = TOKENS // 64
        expected = torch.cat([torch.zeros(blocks, 2 * blocks), torch.eye(blocks)], 1)
        assert torch.equal(plan.levels[0, 0].float(), expected)
        assert plan.layout.k_grid.segments == (Box(3 * CHUNK, SIDE // 2, SIDE // 2),)


def test_a_backend_of_diffusers_is_for_the_other_attentions(
    wan: Any, chunks: list[Tensor], text: Tensor
) -> None:
    expected, _ = run(wan, chunks[:2], text, Entropy(Budget(0.3), **SMALL_BLOCKS))
    with autoregressive_mode(wan, Entropy(Budget(0.3), **SMALL_BLOCKS)) as state:
        for chunk, theirs in zip(chunks[:2], expected, strict=True):
            for block in wan.blocks:
                for attn in (block.attn1, block.attn2):  # what set_attention_backend does
                    attn.processor._attention_backend = AttentionBackendName.NATIVE
            assert torch.equal(wan(chunk, T, text).sample, theirs)
            state.keep()
    for block in wan.blocks:
        assert block.attn1.processor._attention_backend is None
        block.attn2.processor._attention_backend = None


def test_a_chunk_is_denoised_in_steps(wan: Any, chunks: list[Tensor], text: Tensor) -> None:
    """Passes before the last one leave no trace in the cache, and a schedule hears the steps."""
    method = Schedule(Entropy(Budget(0.3), **SMALL_BLOCKS), dense_steps=0.5)
    with autoregressive_mode(wan, method) as state:
        for chunk in chunks:
            for step in range(4):
                state.at(step, 4)
                last = wan(chunk + (3 - step), T, text).sample
            state.keep()
    assert [call.cost is None for call in state.calls[::LAYERS]] == [True, True, False, False] * 3
    assert [call.site.step for call in state.calls[::LAYERS]] == [0, 1, 2, 3] * 3
    only = Schedule(Entropy(Budget(0.3), **SMALL_BLOCKS))
    with autoregressive_mode(wan, only) as state:
        for chunk in chunks:
            state.at(3, 4)
            expected = wan(chunk, T, text).sample
            state.keep()
    assert torch.equal(last, expected)


def test_guidance_branches_have_their_own_past(
    wan: Any, chunks: list[Tensor], text: Tensor
) -> None:
    alone = {b: run(wan, chunks, x, "dense")[0] for b, x in (("cond", text), ("uncond", -text))}
    with autoregressive_mode(wan, "dense") as state:
        for i, chunk in enumerate(chunks):
            for branch, words in (("cond", text), ("uncond", -text)):
                state.at(0, 1, branch)
                assert torch.equal(wan(chunk, T, words).sample, alone[branch][i])
            state.keep()
        state.at(0, 1, "third")
        with pytest.raises(
            ValueError, match="'third' begins at chunk 3: it has no cache of the 12"
        ):
            wan(chunks[0], T, text)


def test_a_window_with_sink_frames(wan: Any, chunks: list[Tensor], text: Tensor) -> None:
    """Five frames kept of eight: frame 0 for good, and the last four."""
    found, _ = run(wan, chunks, text, "dense", frame_limit=5, sink_frames=1)
    visible = causal()
    visible[8:, 1:4] = False
    expected = whole_video(wan, chunks, text, visible)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    forgetful, _ = run(wan, chunks, text, "dense", frame_limit=4)
    assert not torch.allclose(found[2], forgetful[2], atol=1e-4)


def test_reset_begins_another_video(wan: Any, chunks: list[Tensor], text: Tensor) -> None:
    with autoregressive_mode(wan, "dense") as state:
        first = wan(chunks[0], T, text).sample
        state.keep()
        wan(chunks[1], T, text)
        state.reset()
        assert torch.equal(wan(chunks[0], T, text).sample, first)
        assert len(state.calls) == LAYERS


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_everything_is_restored(
    error: type[BaseException] | None, wan: Any, chunks: list[Tensor], text: Tensor
) -> None:
    before = [(b.attn1.processor, b.attn2.processor) for b in wan.blocks]
    expected = wan(chunks[0], T, text).sample
    seen = None
    try:
        with autoregressive_mode(wan, "entropy") as state:
            assert all(isinstance(b.attn1.processor, SparseProcessor) for b in wan.blocks)
            assert [b.attn2.processor for b in wan.blocks] == [pair[1] for pair in before]
            wan(chunks[0], T, text)
            state.keep()
            if error:
                raise error
    except BaseException as caught:
        seen = type(caught)
    assert seen is error
    after = [(b.attn1.processor, b.attn2.processor) for b in wan.blocks]
    assert all(x is y for old, new in zip(before, after, strict=True) for x, y in zip(old, new))  # noqa: B905
    assert not wan.rope._forward_hooks
    assert torch.equal(wan(chunks[0], T, text).sample, expected)


def test_fused_projections_and_the_pipeline_itself(
    chunks: list[Tensor], text: Tensor, wan: Any
) -> None:
    import copy
    from types import SimpleNamespace

    fused = copy.deepcopy(wan)
    fused.fuse_qkv_projections()
    ours, _ = run(fused, chunks, text, "dense")
    plain, _ = run(wan, chunks, text, "dense")
    torch.testing.assert_close(ours[2], plain[2], atol=2e-5, rtol=1e-4)
    with autoregressive_mode(SimpleNamespace(transformer=wan)):
        assert isinstance(wan.blocks[0].attn1.processor, SparseProcessor)


def test_what_is_refused(wan: Any, chunks: list[Tensor], text: Tensor) -> None:
    with autoregressive_mode(wan) as state:
        with (
            pytest.raises(ValueError, match="already has a SparseWanAttnProcessor"),
            autoregressive_mode(wan),
        ):
            pass
        assert isinstance(wan.blocks[0].attn1.processor, SparseProcessor)
        with pytest.raises(ValueError, match="is sparse already"):
            apply_sparse_attention(wan, "dense")
        hidden = torch.randn(1, 8, 64)
        for others in ((hidden[:, :4],), (None, torch.ones(1, 1, 8, 8, dtype=torch.bool))):
            with pytest.raises(ValueError, match="no other keys, no mask"):
                wan.blocks[0].attn1(hidden, *others)
        with pytest.raises(ValueError, match="no chunk to keep: the transformer was not called"):
            state.keep()
        wan(chunks[0], T, text)
        state.keep()
        with pytest.raises(ValueError, match="has tokens per frame 256, this chunk 64"):
            wan(chunks[0][..., :16, :16], T, text)
        with pytest.raises(ValueError, match=r"layer 0 .* has not seen this chunk"):
            state.keep()
        with pytest.raises(ValueError, match=r"frames 4\.\.67 are beyond the 64 positions"):
            wan(torch.zeros(1, 4, 64, 4, 4), T, text)
    for limit, sink in ((2, 2), (0, 0), (3, -1)):
        with (
            pytest.raises(ValueError, match=r"sink|limit"),
            autoregressive_mode(wan, frame_limit=limit, sink_frames=sink),
        ):
            pass
    assert type(wan.blocks[0].attn1.processor) is WanAttnProcessor
    cog = CogVideoXTransformer3DModel(num_layers=1, num_attention_heads=1, attention_head_dim=16)
    with pytest.raises(ValueError, match="not a Wan-style"), autoregressive_mode(cog):
        pass
    with pytest.raises(TypeError, match="a transformer or a pipeline is needed, got str"):
        autoregressive_mode("wan").__enter__()
    with pytest.raises(ValueError, match="unknown method 'entropie'"):
        autoregressive_mode(wan, "entropie").__enter__()


def test_a_layer_that_skips_a_chunk_is_noticed(
    wan: Any, chunks: list[Tensor], text: Tensor
) -> None:
    with autoregressive_mode(wan, "dense") as state:
        handle = wan.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError))
        with pytest.raises(OSError):  # noqa: PT011
            wan(chunks[0], T, text)
        handle.remove()
        with pytest.raises(ValueError, match=r"layer 1 \(branch 'cond'\) has not seen this chunk"):
            state.keep()
        found = wan(chunks[0], T, text).sample  # run again, all is well
        state.keep()
    assert torch.equal(found, wan(chunks[0], T, text).sample)


# The cache alone


def kv(frames: int, start: int, each: int = 3) -> tuple[Tensor, Tensor]:
    """Every token holds the number of its frame."""
    k = torch.arange(start, start + frames).repeat_interleave(each).float()
    k = k[None, None, :, None].expand(2, 2, -1, 4).clone()
    return k, -k


@pytest.mark.parametrize(("limit", "sink"), [(None, 0), (5, 0), (5, 2), (3, 1), (2, 0), (1, 0)])
def test_the_cache_holds_the_right_frames(limit: int | None, sink: int) -> None:
    cache = KVCache(limit, sink)
    kept: list[int] = []
    start = 0
    for frames in (2, 3, 1, 4, 2, 2, 2):
        for _ in range(2):  # a second pass overwrites the first
            k, v = kv(frames, start)
            keys, values = cache.put(k, v, frames)
            expected = [*kept, *range(start, start + frames)]
            assert keys[0, 1, ::3, 2].tolist() == expected
            assert torch.equal(values, -keys)
        cache.keep()
        kept = [*kept, *range(start, start + frames)]
        if limit is not None and len(kept) > limit:
            kept = [*kept[:sink], *kept[len(kept) - (limit - sink) :]]
        assert cache.frames == len(kept)
        assert cache.tokens == 3 * len(kept)
        start += frames


def test_the_cache_refuses_what_does_not_fit() -> None:
    cache = KVCache()
    with pytest.raises(ValueError, match="no chunk to keep"):
        cache.keep()
    with pytest.raises(ValueError, match="6 tokens are not 4 equal frames"):
        cache.put(*kv(2, 0), 4)
    cache.put(*kv(2, 0, each=5), 2)
    cache.put(*kv(2, 0), 2)  # nothing is kept yet
    cache.keep()
    k, v = kv(1, 2)
    for wrong, match in (
        (k[:1], "batch size 2, this chunk 1"),
        (k[:, :1], "heads 2, this chunk 1"),
        (k.double(), "dtype torch.float32, this chunk torch.float64"),
        (k[..., :2], "head dim 4, this chunk 2"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.put(wrong, wrong, 1)
    assert cache.put(k, v, 1)[0].shape == (2, 2, 9, 4)
