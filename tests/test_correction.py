"""Probes: rows that are computed densely correct all others, and never without a reason."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from jali import (
    AdaBsa,
    Budget,
    Curve,
    Entropy,
    Local,
    RateDistortion,
    RfV2,
    Schedule,
    Site,
    TokenGrid,
    attend,
)
from jali.correction import RIDGE, Probes, correct
from jali.methods import METHODS
from jali.methods.method import FEWEST_PROBES
from oracle import relative, sdpa, tensors

SMALL = Entropy(Budget(0.3), q_block=32, k_block=16)
GRID = (3, 12, 16)


def alike(tokens: int = 576, H: int = 4, kv: int = 4, D: int = 16, B: int = 1, seed: int = 0):
    """q, k and v whose rows have much in common, as those of a model have."""
    q, k, v = tensors(tokens, H=H, kv=kv, D=D, B=B, seed=seed)
    make = torch.Generator().manual_seed(seed + 1)
    q = q + torch.randn(B, 1, 1, D, generator=make)
    v = v + 3 * k @ torch.randn(D, D, generator=make) / D
    return q, k, v


def probes_of(exact: torch.Tensor, rows: torch.Tensor) -> Probes:
    sparse = torch.ones(1, 1, 1, dtype=torch.bool)
    return Probes(rows, exact[:, :, None, rows], None, sparse, exact.shape[2])


def test_what_errs_alike_is_mended() -> None:
    make = torch.Generator().manual_seed(0)
    out, turn = (torch.randn(*s, generator=make) for s in ((2, 3, 500, 8), (2, 3, 8, 8)))
    exact = out + 0.3 * out @ turn + torch.randn(2, 3, 1, 8, generator=make)
    found = correct(out.clone(), probes_of(exact, torch.arange(0, 500, 10)))
    assert (found - exact).norm() < 0.1 * (out - exact).norm()


def test_what_has_nothing_in_common_is_left() -> None:
    make = torch.Generator().manual_seed(0)
    out, noise = torch.randn(2, 2, 40, 2000, 8, generator=make).unbind()
    found = correct(out.clone(), probes_of(out + noise, torch.arange(0, 2000, 50)))
    assert (found - out).norm() < 0.15 * noise.norm()


def test_it_is_the_regression_that_left_out_probes_believe() -> None:
    """Against every probe left out by itself, and refitted."""
    make = torch.Generator().manual_seed(3)
    out, more = torch.randn(2, 1, 1, 300, 6, generator=make, dtype=torch.float64).unbind()
    exact = out + 0.4 * out.roll(1, -1) + 0.5 * more + 0.2
    rows = torch.arange(7, 300, 12)
    x, y = out[0, 0, rows], (exact - out)[0, 0, rows]
    strength = RIDGE * (x - x.mean(0)).square().sum(0).mean()

    def told(inside: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        xs, ys = x[inside], y[inside]
        centre = xs - xs.mean(0)
        square = centre.T @ centre + strength * torch.eye(6, dtype=torch.float64)
        return (of - xs.mean(0)) @ square.inverse() @ centre.T @ (ys - ys.mean(0)) + ys.mean(0)

    everyone = torch.arange(len(rows))
    left_out = torch.stack([told(everyone[everyone != i], x[i]) for i in everyone])
    believed = ((y * left_out).sum() / left_out.square().sum()).clamp(0, 1)
    assert 0 < believed < 1
    wanted = out[0, 0] + believed * told(everyone, out[0, 0])
    found = correct(out.clone(), probes_of(exact, rows))
    torch.testing.assert_close(found[0, 0], wanted)


WITH_PROBES = [name for name, kind in METHODS.items() if "probes" in {f.name for f in fields(kind)}]


def test_every_method_but_dense_has_them() -> None:
    assert set(METHODS) - set(WITH_PROBES) == {"dense"}


@pytest.mark.parametrize("name", WITH_PROBES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_they_bring_every_method_nearer(name: str, backend: str) -> None:
    """In its own order of tokens and heads, with text, grouped heads and padded keys."""
    grid = TokenGrid.video(*GRID, text=24)
    q, k, v = alike(grid.tokens, H=4, kv=2, B=2)
    blocks = {"q_block": 32, "k_block": 16, "block_size": 16}
    known = {f.name for f in fields(METHODS[name])}
    method = METHODS[name](**{n: b for n, b in blocks.items() if n in known}).with_budget(0.3)
    lengths = [grid.tokens, grid.tokens - 40]
    if name == "svg":  # orders of heads and scattered padding: reference and torch know masks
        lengths = [grid.tokens] * 2
    exact = torch.cat(
        [
            sdpa(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n])
            for i, n in enumerate(lengths)
        ]
    )
    real = (torch.arange(grid.tokens) < torch.tensor(lengths)[:, None])[:, None, :, None]

    def error(probes: int) -> float:
        found = attend(
            q, k, v, method=replace(method, probes=probes), grid=grid, key_length=lengths,
            backend=backend, site=Site(3, 10, 1, 2),
        )  # fmt: skip
        return float(((found.out - exact) * real).norm())

    assert error(64) < 0.97 * error(0) + 1e-6


def test_text_rows_and_what_is_padded_take_no_part() -> None:
    grid = TokenGrid.video(*GRID, text=64)
    q, k, v = alike(grid.tokens)
    plain = attend(q, k, v, method=SMALL, grid=grid)
    found = attend(q, k, v, method=replace(SMALL, probes=50), grid=grid)
    text = plain.plan.layout.text_rows.repeat_interleave(32)[: grid.tokens]  # type: ignore[union-attr]
    text = plain.plan.layout.q.restore(text[None])[0]  # type: ignore[union-attr]
    same = (found.out == plain.out).all(-1).all(1)[0]
    assert torch.equal(same, text)

    # A plan that does not look at q: those of others may, where queries are padded.
    method = Local(Budget(0.3), q_block=32, k_block=16, probes=50)
    length = grid.tokens - 100
    junk = [x.clone() for x in (q, k, v)]
    for x in junk:
        x[:, :, length:] = torch.nan
    outs = [
        attend(*some, method=method, grid=grid, key_length=[length]).out
        for some in ((q, k, v), (junk[0], k, v), tuple(junk))
    ]
    for other in outs[1:]:
        torch.testing.assert_close(other[:, :, :length], outs[0][:, :, :length])


def test_a_broken_query_stays_alone() -> None:
    q, k, v = alike()
    method = replace(SMALL, probes=576)
    q[:, 1, 100] = torch.nan
    found = attend(q, k, v, method=method, grid=GRID).out
    broken = ~found.isfinite().all(-1)
    assert broken[0, 1, 100]
    assert broken.sum() <= 1


@pytest.mark.parametrize("first_frame", [True, False])
def test_rows_that_read_everything_are_left_as_they_are(first_frame: bool) -> None:
    q, k, v = alike()
    method = RfV2(0.7, block_size=32, window=(1, 4, 4), first_frame=first_frame)
    plain = attend(q, k, v, method=method, grid=GRID)
    found = attend(q, k, v, method=replace(method, probes=64), grid=GRID)
    same = (found.out == plain.out).all(-1).all(1)[0]
    assert same.any() == first_frame
    assert not same.all()


@pytest.mark.parametrize("size", [1e-30, 1e18, 1e30])
def test_sizes_of_values_do_not_matter(size: float) -> None:
    q, k, v = alike()
    found = attend(q, k, v * size, method=replace(SMALL, probes=64), grid=GRID).out
    assert found.isfinite().all()
    plain = attend(q, k, v * size, method=SMALL, grid=GRID).out
    exact = sdpa(q, k, v) * size
    assert relative(found, exact) <= relative(plain, exact) * 1.01


def test_a_sample_and_a_head_do_not_depend_on_others() -> None:
    q, k, v = alike(B=3)
    method = RateDistortion(0.3, q_block=32, k_block=16, probes=48)
    whole = attend(q, k, v, method=method, grid=GRID).out
    one = attend(q[1:2], k[1:2], v[1:2], method=method, grid=GRID).out
    torch.testing.assert_close(whole[1:2], one)
    local = replace(SMALL, sharpness=0.0, probes=48)
    heads = attend(q, k, v, method=local, grid=GRID).out
    some = attend(q[:, 1:3], k[:, 1:3], v[:, 1:3], method=local, grid=GRID).out
    torch.testing.assert_close(heads[:, 1:3], some)


def test_few_that_count_change_nothing() -> None:
    """Where a clip is short, or most rows read everything."""
    make = torch.Generator().manual_seed(0)
    out = torch.randn(1, 2, 400, 8, generator=make)
    exact = 1.5 * out + 1
    for count in (1, 2, FEWEST_PROBES - 1):
        found = correct(out.clone(), probes_of(exact, torch.arange(0, 400, 20)[:count]))
        assert torch.equal(found, out)
    enough = probes_of(exact, torch.arange(0, 400, 400 // FEWEST_PROBES))
    assert (correct(out.clone(), enough) - exact).norm() < 0.3 * (out - exact).norm()

    q, k, v = alike()
    method, length = replace(SMALL, probes=64), [100]  # eleven of 64 are real
    plain = attend(q, k, v, method=SMALL, grid=GRID, key_length=length).out
    found = attend(q, k, v, method=method, grid=GRID, key_length=length).out
    assert torch.equal(found, plain)


def test_more_than_there_are_rows() -> None:
    q, k, v = alike()
    exact, plain = sdpa(q, k, v), attend(q, k, v, method=SMALL, grid=GRID).out
    every = attend(q, k, v, method=replace(SMALL, probes=10**6), grid=GRID)
    assert relative(every.out, exact) < relative(plain, exact)
    assert every.planning >= 1


def test_they_are_counted_as_planning() -> None:
    q, k, v = alike()
    plain, probed = (
        attend(q, k, v, method=replace(SMALL, probes=count), grid=GRID) for count in (0, 48)
    )
    # 48 rows over all keys, and a row's own product with 16 × 16 numbers beside 2 · 576 · 16
    assert probed.planning - plain.planning == pytest.approx(48 / 576 + 16 / (2 * 576))
    assert probed.plan.cost == plain.plan.cost  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in alike())
    exact = sdpa(*(x.double() for x in (q, k, v)))
    plain, probed = (
        attend(q, k, v, method=replace(SMALL, probes=count), grid=GRID).out for count in (0, 64)
    )
    assert probed.dtype == dtype
    assert (probed - exact).norm() < 0.9 * (plain - exact).norm()


def test_a_schedule_hands_them_on() -> None:
    method = Schedule(replace(SMALL, probes=48), curve=Curve(0.4))
    assert method.probes == 48
    q, k, v = alike()
    site = Site(3, 10, 1, 2)
    found = attend(q, k, v, method=method, grid=GRID, site=site)
    inner = attend(q, k, v, method=method.at(site), grid=GRID, site=site)
    assert torch.equal(found.out, inner.out)


@pytest.mark.parametrize("method", [replace(SMALL, probes=16), AdaBsa(0.5, probes=16)])
def test_they_cannot_be_causal(method: Entropy | AdaBsa) -> None:
    q, k, v = tensors(200)
    with pytest.raises(ValueError, match="probes=16 cannot be causal"):
        attend(q, k, v, method=method, causal=True)


@pytest.mark.parametrize("name", WITH_PROBES)
def test_what_is_no_count_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="probes must be at least 0, got -1"):
        METHODS[name](probes=-1)
    with pytest.raises(TypeError, match=r"probes must be an int, got 0\.5"):
        METHODS[name](probes=0.5)
    with pytest.raises(ValueError, match="probes must be 0 or at least 16, got 15: so few rows"):
        METHODS[name](probes=15)
