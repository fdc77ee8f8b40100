"""Tables by other estimates than samples: exact where they must be, in bounds elsewhere."""

from __future__ import annotations

import pytest
import torch

from jali import RateDistortion, TokenGrid
from jali.methods.rd import ESTIMATES
from jali.planning.distortion import error_table
from jali.planning.mixture import mixed_table
from jali.planning.plan import MEAN, SKIP
from jali.planning.statistics import statistics_table
from jali.tokens.layout import Blocks, block_layout
from jali.tokens.padding import KeyPadding

LEVELS = (2, 4, 8, MEAN, SKIP)
ALL = (2, 4, 8, "mean", "skip")
ROWS = torch.tensor([[3, 17, 30], [33, 50, 63], [64, 70, 95]])
LAYOUT = block_layout(TokenGrid.flat(96), blocks=Blocks(32, 32))


def tensors(heads=4, kv_heads=2, tokens=96, dim=16, seed=0):
    dice = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, tokens, dim, generator=dice) * 2
    k, v = (torch.randn(1, kv_heads, tokens, dim, generator=dice) for _ in range(2))
    return q, k, v


def in_steps(x, of=8):
    """The same for every `of` tokens."""
    return x[:, :, ::of].repeat_interleave(of, dim=2)


def test_groups_of_equal_keys_and_values_leave_nothing_to_estimate():
    q, k, v = tensors()
    k, v = in_steps(k), in_steps(v)
    found = statistics_table(q, k, v, LAYOUT, 0.25, ROWS, LEVELS)
    exact = error_table(q, k, v, LAYOUT, 0.25, ROWS, LEVELS)
    assert not found.codes[..., :3].any()
    difference = found.codes[..., 3:].int() - exact.codes[..., 3:].int()
    assert int(difference.abs().max()) <= 1
    torch.testing.assert_close(found.top, exact.top)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_small_ramps_err_as_their_covariance_says(size):
    # In every group the keys differ along one axis, and the values with them: first order is all.
    q, k, v = tensors()
    k, v = in_steps(k), in_steps(v)
    ramp = torch.linspace(-1, 1, 8).repeat(12)[:, None] * 0.05
    k = k + ramp * torch.eye(16)[3]
    v = v + ramp * torch.randn(16, generator=torch.Generator().manual_seed(2)) * 4
    found = statistics_table(q, k, v, LAYOUT, 0.25, ROWS, (size,)).errors()
    exact = error_table(q, k, v, LAYOUT, 0.25, ROWS, (size,)).errors()
    ratio = (found / exact).log2()
    # Outputs of masses that differ add up otherwise; a byte is an eighth of an octave.
    assert float(ratio.abs().median()) < 0.5
    assert float(ratio.abs().max()) < 2.5


def test_no_output_is_further_off_than_values_lie_apart():
    # e^(σ²/2) and σ² itself would be far beyond what eight keys can do.
    q, k, v = tensors(seed=3)
    found = statistics_table(q * 6, k * 2, v, LAYOUT, 0.25, ROWS, LEVELS).errors()
    apart = (v[:, :, :, None] - v[:, :, None]).square().sum(-1).amax((-2, -1))  # [1, Hkv]
    assert bool((found.amax((2, 3, 4)) <= 2 * apart.repeat_interleave(2, dim=1)).all())


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_padding_is_as_if_it_were_not_there(estimate):
    make, _ = ESTIMATES[estimate]
    q, k, v = tensors()
    short = block_layout(TokenGrid.flat(96), TokenGrid.flat(77), blocks=Blocks(32, 32))
    want = make(q, k[:, :, :77], v[:, :, :77], short, 0.25, ROWS, LEVELS)
    k[:, :, 77:], v[:, :, 77:] = torch.nan, torch.inf
    for padding in (
        KeyPadding(length=torch.tensor([77], dtype=torch.int32)),
        KeyPadding(mask=torch.arange(96)[None] < 77),
    ):
        found = make(q, k, v, LAYOUT, 0.25, ROWS, LEVELS, padding)
        torch.testing.assert_close(found.errors(), want.errors(), rtol=0.2, atol=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_heads_and_samples_do_not_matter_to_each_other(estimate):
    make, _ = ESTIMATES[estimate]
    q, k, v = (torch.cat([tensors()[i], tensors(seed=1)[i]]) for i in range(3))
    together = make(q, k, v, LAYOUT, 0.25, ROWS, LEVELS).errors()
    for b in range(2):
        for h in range(4):
            kv = slice(h // 2, h // 2 + 1)
            alone = make(
                q[b : b + 1, h : h + 1], k[b : b + 1, kv], v[b : b + 1, kv], LAYOUT, 0.25, ROWS,
                LEVELS,
            )  # fmt: skip
            torch.testing.assert_close(together[b, h], alone.errors()[0, 0], rtol=0.2, atol=1e-7)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_query_that_is_not_finite_says_nothing(estimate):
    make, _ = ESTIMATES[estimate]
    q, k, v = tensors()
    want = make(q, k, v, LAYOUT, 0.25, ROWS[:, :1], LEVELS).errors()
    q[:, :, ROWS[:, 1:].flatten()] = torch.nan
    found = make(q, k, v, LAYOUT, 0.25, ROWS, LEVELS).errors()
    torch.testing.assert_close(found, want, rtol=0.2, atol=1e-7)


def test_a_mixture_keeps_what_either_finds():
    q, k, v = tensors()
    rows = torch.arange(96).view(3, 32)[:, 5:20:3]  # five: the first and the fifth see all keys
    found = mixed_table(q, k, v, LAYOUT, 0.25, rows, LEVELS).errors()
    few = error_table(q, k, v, LAYOUT, 0.25, rows[:, [0, 4]], LEVELS).errors()
    many = statistics_table(q, k, v, LAYOUT, 0.25, rows, LEVELS).errors()
    torch.testing.assert_close(found, (few + many) / 2, rtol=0.1, atol=1e-9)


def test_statistics_are_cheap():
    layout = block_layout(TokenGrid.flat(32768), blocks=Blocks(128, 128))
    shares = {
        name: RateDistortion(samples=8, levels=ALL, estimate=name).planning_share(layout)
        for name in ESTIMATES
    }
    # 8 of 128 rows: keys and (½ + ¼ + ⅛ + 1/128) of them; or 2 and 16/128 of an eighth, 1/128, and
    # once 64 + 24 of 32,768.
    assert shares["samples"] == pytest.approx(0.0625 * (1 + 0.875 + 1 / 128))
    assert shares["statistics"] == pytest.approx(0.0625 * (2.125 / 8 + 1 / 128) + 88 / 32768)
    assert shares["mixed"] == pytest.approx(shares["samples"] / 4 + shares["statistics"])


def test_a_kernel_sees_keys_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows' own attention; the keys again; values, means of 2, 4 and 8 for one level each."""
    layout = block_layout(TokenGrid.flat(32768), blocks=Blocks(128, 128))
    monkeypatch.setattr("jali.kernels.available", lambda _: True)
    found = RateDistortion(samples=8, levels=ALL).planning_share(layout)
    assert found == pytest.approx(0.0625 * (1 + 0.5 + 0.5 * (1 + 0.5 + 0.25 + 0.125)))
    few = RateDistortion(samples=8).planning_share(layout)
    assert few == pytest.approx(0.0625 * (1 + 0.5 + 0.5))  # skipping needs no product of its own
    assert RateDistortion(samples=8, levels=("skip",)).planning_share(layout) == few
