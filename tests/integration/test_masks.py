"""Attention masks: what says which keys are real is kept, anything else is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

import tiny

import jali
from jali.integration.masks import read_mask

TOKENS = 5 * 16 * 16


def test_what_a_mask_says() -> None:
    assert read_mask(None).problem is None
    prefix = torch.arange(8) < torch.tensor([[3], [8]])
    for mask in (prefix, prefix[:, None, None]):
        padding = read_mask(mask).padding
        assert padding is not None
        assert padding.host == (3, 8)
    assert read_mask(torch.ones(2, 8, dtype=torch.bool)).padding is None
    scattered = torch.tensor([[True, False, True]])
    found = read_mask(scattered).padding
    assert found is not None
    assert found.length is None
    assert torch.equal(found.mask, scattered)  # type: ignore[arg-type]
    pairs = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    assert read_mask(pairs).problem == "a mask [1, 1, 4, 4] of pairs of tokens"
    assert read_mask(torch.zeros(1, 4)).problem == "a mask [1, 4] that is added to the scores"


def masked_wan(mask: Tensor) -> Any:
    """Wan whose second layer gets a mask, as a variant of it might hand one over."""
    model = tiny.wan_transformer(3)

    def hand_over(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:2], mask, *args[3:])

    model.blocks[1].attn1.register_forward_pre_hook(hand_over)
    return model


def forward(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        return model(  # type: ignore[no-any-return]
            hidden_states=torch.randn(1, 16, 5, 32, 32, generator=generator),
            encoder_hidden_states=torch.randn(1, 16, 32, generator=generator),
            timestep=torch.tensor([500.0]),
            return_dict=False,
        )[0]


def band() -> Tensor:
    """Near tokens only: nothing that a list of blocks could say."""
    place = torch.arange(TOKENS)
    return ((place[:, None] - place).abs() < 300)[None, None]


@pytest.mark.parametrize("added", [False, True])
def test_a_mask_no_plan_can_keep_is_refused(added: bool) -> None:
    mask = torch.where(band(), 0.0, -torch.inf) if added else band()
    model = masked_wan(mask)
    before = [block.attn1.processor for block in model.blocks]
    what = "that is added to the scores" if added else "of pairs of tokens"
    words = rf"Wan hands its attention a mask \[1, 1, 1280, 1280\] {what}, .*unknown_masks='dense'"
    with (
        pytest.raises(ValueError, match=words),
        jali.sparse_processor_mode(model, 0.4, warmup_frac=1, steps=3),
    ):
        forward(model)  # a dense step refuses it too: before the first one is done
    assert [block.attn1.processor for block in model.blocks] == before


@pytest.mark.parametrize("added", [False, True])
def test_or_it_stays_dense_where_that_is_asked_for(added: bool) -> None:
    model = masked_wan(torch.where(band(), 0.0, -torch.inf) if added else band())
    expected = forward(model)
    with jali.sparse_processor_mode(
        model, 1.0, warmup_frac=0, dense_first_layer=False, unknown_masks="dense"
    ) as run:
        found = forward(model)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    reasons = [row.reason for row in run.stats().rows]
    assert reasons[0] is None
    assert reasons[2] is None
    assert "mask [1, 1, 1280, 1280]" in str(reasons[1])


def test_a_mask_of_keys_is_kept() -> None:
    keys = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
    keys[..., 700:] = False
    model = masked_wan(keys)
    expected = forward(model)
    with jali.sparse_processor_mode(model, 1.0, warmup_frac=0, dense_first_layer=False) as run:
        found = forward(model)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert all(row.reason is None for row in run.stats().rows)


@pytest.mark.parametrize("real", [700, 0])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_keys_a_mask_hides_may_hold_anything(real: int, warmup: float) -> None:
    """In sparse calls as in dense ones; and where no key is left, the result is zero."""
    keys = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
    keys[..., real:] = False
    hidden = torch.arange(real, TOKENS)
    results = []
    for junk in (None, torch.nan):
        model = masked_wan(keys)
        if junk is not None:
            for name in ("to_k", "to_v"):
                layer = getattr(model.blocks[1].attn1, name)
                layer.register_forward_hook(lambda *seen: seen[-1].index_fill(1, hidden, torch.nan))
        options = {"warmup_frac": warmup, "steps": 3, "dense_first_layer": False}
        with jali.sparse_processor_mode(model, 0.4, **options):
            results.append(forward(model))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


def test_dense_means_the_stock_operation_whatever_the_mask() -> None:
    model = masked_wan(band())
    expected = forward(model)
    with jali.sparse_processor_mode(model, method="dense"):
        assert torch.equal(forward(model), expected)


@pytest.mark.skipif(tiny.OLD, reason="LTX-2 is newer")
def test_ltx2_conditions_are_refused() -> None:
    model = tiny.ltx2_transformer()
    given = tiny.ltx2_inputs(500.0) | {"video_self_attention_mask": torch.ones(2, TOKENS, TOKENS)}
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"LTX-2 hands its attention a mask .* added to the scores"),
        jali.sparse_processor_mode(model, 0.5, warmup_frac=0),
    ):
        model(**given)


def test_only_two_ways() -> None:
    with pytest.raises(ValueError, match="unknown_masks must be 'raise' or 'dense', got 'ignore'"):
        jali.apply_sparse_attention(tiny.wan_transformer(2), warmup_frac=0, unknown_masks="ignore")
