"""The backend by name: defaults, self-attention only, and said where it cannot reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from test_compile import MODELS

import jali
from jali.integration import backend_name


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """`set_attention_backend` changes diffusers' default for the whole process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    active = Registry._active_backend
    jali.register_backend()
    jali.register_backend()
    yield
    Registry._active_backend = active


# A pipeline, its call, and the tokens of the calls that a name makes sparse in three steps.
FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]], list[int]]] = {
    "Wan": (lambda: tiny.wan(2), lambda: tiny.WAN_CALL, [1280] * 12),
    "HunyuanVideo": (tiny.hunyuan, lambda: tiny.HUNYUAN_CALL, [1304] * 9),
    "LTX": (lambda: tiny.ltx(2), lambda: tiny.LTX_CALL, [1280] * 6),
    "Flux": (tiny.flux, lambda: tiny.FLUX_CALL, [1072] * 9),
    "Qwen-Image": (tiny.qwen, tiny.qwen_call, [*[1320] * 3, *[1304] * 3] * 3),
}
if not tiny.OLD:
    FAMILIES["LTX-2"] = (tiny.ltx2, tiny.ltx2_call, [1280] * 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_by_name(family: str, monkeypatch: Any) -> None:
    """Self-attention only, in every layer, step and branch."""
    build, call, sparse = FAMILIES[family]
    pipe = build()
    expected = tiny.generate(pipe, call())
    calls: list[int] = []
    whole = backend_name.sparse_attention

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(q.shape[1])
        return whole(q, *args, **kwargs)

    monkeypatch.setattr(backend_name, "sparse_attention", counted)
    jali.register_backend(pipe)
    pipe.transformer.set_attention_backend("jali")
    out = tiny.generate(pipe, call())
    pipe.transformer.reset_attention_backend()
    assert calls == sparse
    assert torch.isfinite(out).all()
    assert 0 < (out - expected).norm() / expected.norm() < 0.5


def test_as_a_context_manager() -> None:
    from diffusers.models.attention_dispatch import attention_backend

    pipe = tiny.wan(2)
    expected = tiny.generate(pipe, tiny.WAN_CALL)
    with attention_backend("jali"):
        out = tiny.generate(pipe, tiny.WAN_CALL)
    assert not torch.equal(out, expected)
    assert torch.equal(tiny.generate(pipe, tiny.WAN_CALL), expected)


def stock(q: torch.Tensor, k: torch.Tensor, mask: Any = None) -> torch.Tensor:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    return out.transpose(1, 2)


def test_short_or_masked_by_pairs_is_dense(caplog: Any) -> None:
    q, k = torch.randn(1, 64, 2, 16), torch.randn(1, 2048, 2, 16)
    long = torch.randn(1, 2048, 2, 16)
    assert torch.equal(backend_name.attend_by_name(q, k, k), stock(q, k))
    assert torch.equal(backend_name.attend_by_name(q, q, q), stock(q, q))
    assert not caplog.text
    assert not torch.equal(backend_name.attend_by_name(long, k, k), stock(long, k))
    backend_name._tell_of_masks.cache_clear()
    for mask in (torch.ones(2048, 2048).tril().bool()[None, None], torch.randn(1, 1, 1, 2048)):
        assert torch.equal(backend_name.attend_by_name(long, k, k, mask), stock(long, k, mask))
    assert caplog.text.count("dense") == 1, "said, and once"


def test_hidden_keys_stay_hidden() -> None:
    q, k = torch.randn(2, 1, 2048, 2, 16)
    mask = torch.ones(1, 1, 1, 2048, dtype=torch.bool)
    mask[..., 1500:] = False
    out = backend_name.attend_by_name(q, k, k, mask)
    assert not torch.equal(out, stock(q, k, mask))
    k[:, 1500:] = 1e4
    torch.testing.assert_close(backend_name.attend_by_name(q, k, k, mask), out, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["wan", "hunyuan-video"])
def test_compiles(name: str) -> None:
    """Without a mask, and with one of keys."""
    torch.compiler.reset()
    build, inputs, _, _ = MODELS[name]
    model = build(2)
    model.set_attention_backend("jali")
    with torch.no_grad():
        expected = model(**inputs(500.0))[0]
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        out = model(**inputs(500.0))[0]
    assert (out - expected).norm() <= 1e-5 * expected.norm()


def test_cogvideox_cannot_be_reached() -> None:
    pipe = tiny.cogvideox()
    with pytest.raises(ValueError, match=r"CogVideoX never asks.*apply_sparse_attention"):
        jali.register_backend(pipe)


def test_hunyuan15_would_stay_dense() -> None:
    """It hides padding from queries and queries from padding: a mask of pairs."""
    with pytest.raises(ValueError, match=r"HunyuanVideo 1.5 masks pairs.*apply_sparse_attention"):
        jali.register_backend(tiny.hunyuan15())


def test_dense_steps_of_a_mode_are_dense_although_the_name_is_the_default() -> None:
    pipe = tiny.wan(2)
    expected = tiny.generate(pipe, tiny.WAN_CALL)
    pipe.transformer.set_attention_backend("jali")
    with jali.sparse_processor_mode(pipe, method="dense"):
        out = tiny.generate(pipe, tiny.WAN_CALL)
    assert torch.equal(out, expected)
