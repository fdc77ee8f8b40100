"""The backend by name: defaults, self-attention only, and said where it cannot reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch

import jali
from jali.integration import named


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """`set_attention_backend` changes diffusers' default for the whole process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    active = Registry._active_backend
    jali.register_backend()
    jali.register_backend()
    yield
    Registry._active_backend = active


def test_by_name(monkeypatch: Any) -> None:
    pipe = tiny.wan(2)
    expected = tiny.generate(pipe, tiny.WAN_CALL)
    calls: list[int] = []
    whole = named.sparse_attention

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(q.shape[1])
        return whole(q, *args, **kwargs)

    monkeypatch.setattr(named, "sparse_attention", counted)
    pipe.transformer.set_attention_backend("jali")
    out = tiny.generate(pipe, tiny.WAN_CALL)
    pipe.transformer.reset_attention_backend()
    assert calls == [1280] * 12, "self-attention only: two layers, three steps, two branches"
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


def test_short_or_masked_is_dense() -> None:
    q, k = torch.randn(1, 64, 2, 16), torch.randn(1, 2048, 2, 16)
    long = torch.randn(1, 2048, 2, 16)
    mask = torch.ones(1, 1, 1, 2048, dtype=torch.bool)
    mask[..., 100:] = False

    def stock(q: torch.Tensor, k: torch.Tensor, mask: Any = None) -> torch.Tensor:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)
        return out.transpose(1, 2)

    assert torch.equal(named.attend_by_name(q, k, k), stock(q, k))
    assert torch.equal(named.attend_by_name(q, q, q), stock(q, q))
    assert torch.equal(named.attend_by_name(long, k, k, mask), stock(long, k, mask))
    assert not torch.equal(named.attend_by_name(long, k, k), stock(long, k))


def test_compiles() -> None:
    torch.compiler.reset()
    model = tiny.wan_transformer(2)
    model.set_attention_backend("jali")
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = model(
            hidden_states=torch.randn(1, 16, 5, 32, 32), timestep=torch.tensor([5]),
            encoder_hidden_states=torch.randn(1, 8, 32),
        ).sample  # fmt: skip
    assert torch.isfinite(out).all()


def test_cogvideox_cannot_be_reached() -> None:
    pipe = tiny.cogvideox()
    with pytest.raises(ValueError, match=r"CogVideoX never asks.*apply_sparse_attention"):
        jali.register_backend(pipe)
    jali.register_backend(tiny.wan_transformer(2))


def test_dense_steps_of_a_mode_are_dense_although_the_name_is_the_default() -> None:
    pipe = tiny.wan(2)
    expected = tiny.generate(pipe, tiny.WAN_CALL)
    pipe.transformer.set_attention_backend("jali")
    with jali.sparse_processor_mode(pipe, method="dense"):
        out = tiny.generate(pipe, tiny.WAN_CALL)
    assert torch.equal(out, expected)
