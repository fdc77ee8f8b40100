"""attend(): the data path, dense calls, chunks that add up."""

from __future__ import annotations

import pytest
import torch

from jali import (
    AdaBsa,
    Budget,
    Dense,
    Entropy,
    Psa,
    Random,
    RfV2,
    Schedule,
    Site,
    TokenGrid,
    attend,
)
from jali.checks import check_padding
from oracle import relative, sdpa, stock_bf16_runs, tensors

SMALL = Entropy(Budget(0.4), q_block=32, k_block=16)


@pytest.mark.parametrize("D", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_is_sdpa_bit_for_bit(D: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not stock_bf16_runs():
        pytest.skip("PyTorch's own bf16 attention does not run on this CPU")
    q, k, v = tensors(130, H=6, kv=2, D=D, dtype=dtype)
    result = attend(q, k, v, method="dense")
    assert torch.equal(result.out, sdpa(q, k, v))
    assert result.backend == "stock"
    assert result.plan is None
    assert torch.equal(
        attend(q, k, v, method=Dense(), causal=True).out, sdpa(q, k, v, is_causal=True)
    )


def test_the_same_call_twice_is_the_same() -> None:
    q, k, v = tensors(300)
    assert torch.equal(attend(q, k, v, method=SMALL).out, attend(q, k, v, method=SMALL).out)


@pytest.mark.parametrize("method", [Dense(), SMALL, Schedule(SMALL, dense_steps=1)])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("offset", [0, 7, 60])
def test_a_causal_chunk_counts_from_its_offset(method: object, lse: bool, offset: int) -> None:
    q, k, v = tensors(40, 100)
    full = method if not isinstance(method, Entropy) else method.with_budget(1.0)
    out = attend(q, k, v, method=full, causal=True, offset=offset, lse=lse).out  # type: ignore[arg-type]
    mask = torch.arange(100) <= torch.arange(40)[:, None] + offset
    assert relative(out, sdpa(q, k, v, attn_mask=mask)) < 5e-6


@pytest.mark.parametrize("method", [SMALL, Psa(q_block=32, k_block=16), Random(Budget(0.5))])
def test_lse_merges_parts(method: object) -> None:
    """Two halves of the keys, merged by their log-sum-exp, are the whole."""
    full = method.with_budget(1.0)  # type: ignore[attr-defined]
    q, k, v = tensors(64, 200)
    parts = [attend(q, k[:, :, s], v[:, :, s], method=full) for s in (slice(0, 90), slice(90, 200))]
    sums = torch.stack([p.lse for p in parts])  # type: ignore[misc]
    weight = sums.softmax(0)[..., None]
    merged = sum(w * p.out for w, p in zip(weight, parts, strict=True))
    assert relative(merged, sdpa(q, k, v)) < 5e-6


def test_scale_is_used() -> None:
    q, k, v = tensors(100)
    for method in (SMALL.with_budget(1.0), Dense(), AdaBsa(), RfV2(0.0)):
        out = attend(q, k, v, method=method, scale=0.05).out
        assert relative(out, sdpa(q, k, v, 0.05)) < 5e-6


def test_an_integer_scale_is_a_number() -> None:
    q, k, v = tensors(64)
    assert (
        relative(attend(q, k, v, method=SMALL.with_budget(1.0), scale=1).out, sdpa(q, k, v, 1.0))
        < 5e-6
    )


def test_cost_and_density_are_what_was_executed() -> None:
    q, k, v = tensors(1024)
    result = attend(q, k, v, method=Psa(q_block=64, k_block=32), backend="torch")
    assert result.plan is not None
    assert result.executed is not None
    assert result.executed.cost >= result.plan.cost
    assert 0 < result.plan.cost < result.plan.density < 1
    assert str(result.plan.show()).startswith("16 query × 32 key blocks of 64×32")


def test_length_or_mask_make_no_difference() -> None:
    grid = TokenGrid.video(3, 8, 8, text=20, text_side="back")
    q, k, v = tensors(grid, B=2)
    lengths = [205, 212]
    mask = torch.arange(212) < torch.tensor(lengths)[:, None]
    for method in (SMALL, RfV2(0.5, 32), Psa(q_block=32, k_block=16)):
        by_length = attend(q, k, v, method=method, grid=grid, key_length=lengths)
        by_tensor = attend(q, k, v, method=method, grid=grid, key_length=torch.tensor(lengths))
        by_mask = attend(q, k, v, method=method, grid=grid, key_mask=mask)
        assert torch.equal(by_length.out, by_tensor.out)
        torch.testing.assert_close(by_length.out, by_mask.out)


def test_attend_needs_no_grad_tensors_but_runs_under_no_grad() -> None:
    q, k, v = tensors(64)
    q.requires_grad_()
    with torch.no_grad():
        assert attend(q, k, v, method=SMALL).out.isfinite().all()
    with torch.inference_mode():
        assert attend(q, k, v, method=SMALL).out.isfinite().all()


def test_random_controls_follow_the_site() -> None:
    q, k, v = tensors(600)
    method = Random(Budget(0.2), q_block=32, k_block=16)
    plans = [
        attend(q, k, v, method=method, site=site).plan.levels  # type: ignore[union-attr]
        for site in (Site(1, 5, 1, 3), Site(1, 5, 1, 3), Site(2, 5, 1, 3), Site(1, 5, 2, 3))
    ]
    assert torch.equal(plans[0], plans[1])
    assert not torch.equal(plans[0], plans[2])
    assert not torch.equal(plans[0], plans[3])


def test_lengths_from_the_host_are_copied_to_the_device_once() -> None:
    """Every such copy waits for all that is under way there, and a model has many layers."""
    _, k, _ = tensors(70, B=2)
    one, two = (check_padding((70, 41), None, k) for _ in range(2))
    assert one is not None
    assert two is not None
    assert one.length is two.length
    assert one.host == (70, 41)
