"""What holds for every method, whatever the data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from cases import DEVICES, GEOMETRIES, METHODS, PLACES, spoiled
from hypothesis import given
from hypothesis import strategies as st

from jali import Attended, Psa, Site, TokenGrid, attend
from jali.backends import BACKENDS
from jali.methods import METHODS as KINDS
from jali.methods import sampling
from oracle import relative, sdpa, tensors

GRID = TokenGrid.video(4, 9, 10, text=7)
SPARSE = [name for name in METHODS if name != "dense"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("geometry", ["text_front", "gqa", "chunk", "other_keys", "several", "one"])
@pytest.mark.parametrize("method", METHODS)
def test_density_one_is_sdpa(method: str, geometry: str, device: str) -> None:
    shape = GEOMETRIES[geometry]
    if "compat" in method and (not shape.square or shape.kv != shape.H or shape.q.tokens == 457):
        pytest.skip("compat is undefined here")
    if method == "rf_v2_compat" and geometry == "several":
        pytest.skip("compat is undefined here")
    if method == "psa_step":
        pytest.skip("a step has one level for all blocks; see test_psa")
    q, k, v = tensors(shape.q, shape.k, B=shape.B, H=shape.H, kv=shape.kv, device=device)
    full = METHODS[method].with_budget(1.0)
    if method == "ada_bsa_cdf":
        full = dataclasses.replace(full, cdf_threshold=1.0)  # type: ignore[type-var]
    if method == "ada_bsa_compat":
        full = dataclasses.replace(full, cdf_threshold=1.0)  # type: ignore[type-var]
    if isinstance(full, Psa) and full.ratios[-1] > 1 and full.similarity is None:
        assert full.ranges[1] == (0.0, 1.0)
    where = {"grid": shape.q, "key_grid": shape.k, "offset": shape.offset}
    result = attend(q, k, v, method=full, **where)
    if result.plan is not None:
        assert result.plan.cost == 1
        assert result.plan.density == 1
    limit = BACKENDS[result.backend].tolerance[q.dtype] if result.plan is not None else 5e-6
    assert relative(result.out, sdpa(q.double(), k.double(), v.double())) <= limit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_permuting_heads_permutes_the_result(method: str, device: str) -> None:
    grid = TokenGrid.video(4, 9, 10)
    q, k, v = tensors(grid, H=5, device=device)
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    plain = attend(q, k, v, method=METHODS[method], grid=grid).out
    moved = attend(q[:, order], k[:, order], v[:, order], method=METHODS[method], grid=grid).out
    torch.testing.assert_close(moved, plain[:, order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_batches_do_not_see_each_other(method: str, device: str) -> None:
    grid = TokenGrid.video(4, 9, 10)
    q, k, v = tensors(grid, B=3, device=device)
    together = attend(q, k, v, method=METHODS[method], grid=grid).out
    order = [2, 0, 1]
    moved = attend(q[order], k[order], v[order], method=METHODS[method], grid=grid).out
    torch.testing.assert_close(moved, together[order], atol=1e-5, rtol=1e-5)
    for b in range(3):
        alone = attend(*(x[b : b + 1] for x in (q, k, v)), method=METHODS[method], grid=grid).out
        torch.testing.assert_close(alone, together[b : b + 1], atol=1e-5, rtol=1e-5)


def planned(method: str, seed: int = 0, site: Site | None = None, **more: object) -> Attended:
    q, k, v = tensors(GRID.tokens - 7, seed=seed)
    return attend(
        q, k, v, method=METHODS[method], grid=TokenGrid.video(4, 9, 10),
        site=site or Site(3, 10, 1, 2), **more,
    )  # fmt: skip


@pytest.mark.parametrize("method", SPARSE)
def test_same_inputs_same_plan_whatever_came_before(method: str) -> None:
    first = planned(method)
    torch.manual_seed(99)
    planned(method, seed=1)
    torch.rand(3)
    state = torch.get_rng_state()
    sampling._of_all_layers.cache_clear()
    again = planned(method)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert first.plan is not None
    assert again.plan is not None
    assert torch.equal(first.plan.levels, again.plan.levels)
    assert torch.equal(first.out, again.out)


@pytest.mark.parametrize("method", [m for m in SPARSE if not METHODS[m].base.needs_values])
def test_values_do_not_move_the_plan(method: str) -> None:
    q, k, v = tensors(360)
    grid = TokenGrid.video(4, 9, 10)
    first, second = (attend(q, k, x, method=METHODS[method], grid=grid).plan for x in (v, v * -3))
    assert first is not None
    assert second is not None
    assert torch.equal(first.levels, second.levels)


@pytest.mark.parametrize("method", SPARSE)
def test_plans_say_what_they_contain(method: str) -> None:
    plan = planned(method).plan
    assert plan is not None
    found = set(plan.levels.unique().tolist()) - {0}
    assert found <= set(plan.ratios) == set(METHODS[method].executed_ratios)
    assert plan.levels.dtype == torch.uint8
    assert (plan.levels != 0).any(-1).all()
    reads_all = METHODS[method].tail or method in ("psa_step", "rf_v2_compat", "rd_few")
    if not reads_all:
        assert plan.density < 1, "nothing was skipped: the case is too small to test anything"


@pytest.mark.parametrize("method", [m for m in SPARSE if "compat" not in m])
def test_own_and_text_blocks_are_read_in_full(method: str) -> None:
    q, k, v = tensors(GRID)
    plan = attend(q, k, v, method=METHODS[method], grid=GRID).plan
    assert plan is not None
    layout = plan.layout
    assert (plan.levels[:, :, layout.own] == 1).all()
    assert (plan.levels[..., layout.text_keys] == 1).all()
    assert (plan.levels[:, :, layout.text_rows] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["huge", "constant", "zero", "tiny", "one_hot"])
def test_no_nan_out_of_finite_input(method: str, kind: str, device: str) -> None:
    q, k, v = tensors(360, device=device)
    if kind == "huge":
        q, k = q * 100, k * 100  # logits of about 1e4
    elif kind == "constant":
        k = torch.ones_like(k)
    elif kind == "zero":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    elif kind == "tiny":
        q, k = q * 1e-30, k * 1e-30
    else:
        k = torch.zeros_like(k)
        k[:, :, 17] = 1e4
    grid = TokenGrid.video(4, 9, 10)
    result = attend(q, k, v, method=METHODS[method], grid=grid, lse=True)
    assert result.out.isfinite().all()
    assert result.lse is not None
    assert result.lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_no_nan_at_the_end_of_the_half_range(method: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(360, dtype=dtype)
    q, k, v = (x.clamp(-1, 1) * 30000 for x in (q, k, v))
    if method in ("dense", "rf_v2_compat"):
        pytest.skip("the stock operation, and scores in the input's precision, are as they are")
    result = attend(q, k, v, method=METHODS[method], grid=TokenGrid.video(4, 9, 10))
    assert result.out.isfinite().all()


@pytest.mark.parametrize("method", [m for m in METHODS if "compat" not in m])
def test_nothing_real_gives_zeros(method: str) -> None:
    q, k, v = tensors(200, B=2)
    for padding in (
        {"key_length": [200, 0]},
        {"key_mask": torch.tensor([[True], [False]]).expand(2, 200)},
    ):
        result = attend(q, k, v, method=METHODS[method], **padding)
        assert result.out.isfinite().all()
        assert (result.out[1] == 0).all()
        assert (result.out[0] != 0).any()


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("kind", ["key_length", "key_mask"])
@pytest.mark.parametrize("method", [m for m in METHODS if "compat" not in m])
def test_padded_keys_are_as_if_absent(method: str, kind: str, device: str, backend: str) -> None:
    """Whatever lies in the padding, NaN included, not a bit of plan or result changes."""
    grid = TokenGrid.video(3, 5, 8, text=7, text_side="back")
    S = grid.tokens
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = tensors(
        grid, B=3, H=4, kv=2, D=64 if device == "cuda" else 16, device=device, dtype=dtype
    )
    lengths = torch.tensor([S - 4, 0, 41])
    real = torch.arange(S) < lengths[:, None]
    given: dict[str, Any] = {"key_length": lengths.tolist()}
    if kind == "key_mask":
        real = real & (torch.rand(3, S, generator=torch.Generator().manual_seed(0)) < 0.8)
        given = {"key_mask": real.to(device)}
    real = real.to(device)
    clean = [x.masked_fill(~real[:, None, :, None], 0) for x in (k, v)]
    junk = [spoiled(x, real) for x in (k, v)]
    for lse in (True, False) if method == "dense" else (True,):
        call: dict[str, Any] = {"method": METHODS[method], "grid": grid, "site": Site(3, 10, 1, 2)}
        try:
            a, b = (attend(q, *x, backend=backend, lse=lse, **call, **given) for x in (clean, junk))
        except ValueError as error:
            if "cannot run this" not in str(error):
                raise
            return
        assert a.out.isfinite().all()
        assert torch.equal(a.out, b.out)
        assert a.lse is None or torch.equal(a.lse, b.lse)
        assert a.plan is None or torch.equal(a.plan.levels, b.plan.levels)


@pytest.mark.parametrize("method", [m for m in METHODS if "compat" not in m])
def test_padded_text_stays_out_of_the_video(method: str) -> None:
    """Text of a joint sequence is padded as queries too: what these hold reaches their own rows
    and nothing else."""
    grid = TokenGrid.video(3, 5, 8, text=20, text_side="back")
    q, k, v = tensors(grid, H=3)
    real = torch.arange(grid.tokens)[None] < 131
    results = []
    for junk in (torch.zeros_like, lambda x: spoiled(x, real)):
        inputs = (torch.where(real[:, None, :, None], x, junk(x)) for x in (q, k, v))
        done = attend(*inputs, method=METHODS[method], grid=grid, key_length=[131])
        results.append(done.out[:, :, :131])
    assert results[0].isfinite().all()
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_broken_query_breaks_only_its_own_row(method: str) -> None:
    grid = TokenGrid.video(4, 9, 10)
    q, k, v = tensors(grid)
    q[:, 0, 100] = torch.nan
    result = attend(q, k, v, method=METHODS[method], grid=grid)
    if result.plan is not None and "compat" not in method:
        assert result.plan.cost < 1
    broken = ~result.out.isfinite().all(-1)
    assert broken[0, 0, 100]
    assert broken.sum() == 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_numeric_knob_refuses_nan(kind: type) -> None:
    """NaN, in every field that holds a number."""
    numeric = [
        f.name
        for f in dataclasses.fields(kind)
        if any(word in str(f.type) for word in ("float", "int"))
        and "tuple" not in str(f.type) and "Mapping" not in str(f.type) and f.name != "seed"
    ]  # fmt: skip
    for name in numeric:
        with pytest.raises((ValueError, TypeError)):
            kind(**{name: math.nan})


@given(st.integers(1, 600), st.integers(0, 50))
def test_any_length_reads_something(tokens: int, seed: int) -> None:
    q, k, v = tensors(tokens, seed=seed, H=1)
    for name in ("entropy", "psa_threshold", "rf_v2", "ada_bsa_cdf", "random", "local"):
        plan = attend(q, k, v, method=METHODS[name]).plan
        assert plan is not None
        assert (plan.levels != 0).any(-1).all(), name
