"""Backends: choosing, reasons, dense calls, scratch, causal pooled tails."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import jali.backends as backends
import jali.backends.torch as torch_backend
from jali import BlockPlan, Blocks, Budget, Dense, Entropy, Psa, TokenGrid, attend, block_layout
from jali.backends import BACKENDS, Reference, Task, Torch, choose, why_not
from jali.backends.dense import stock
from jali.methods import FastestDense, Method
from jali.tokens.padding import KeyPadding
from oracle import relative, sdpa, tensors

CPU = torch.device("cpu")


def task(**changes: object) -> Task:
    given = {"device": CPU, "dtype": torch.float32, "head_dim": 64, "heads": 4, "kv_heads": 4}
    return Task(**{**given, "q_tokens": 100, "k_tokens": 100, **changes})  # type: ignore[arg-type]


def test_two_backends_run_anything() -> None:
    for changes in ({}, {"head_dim": 17}, {"dtype": torch.float64}, {"ratios": (1, 2, 4, 8)},
                    {"padding": "mask"}, {"causal": True}, {"kv_heads": 1}):  # fmt: skip
        reasons = why_not(task(**changes))
        assert reasons["torch"] == []
        assert reasons["reference"] == []


def test_auto_takes_the_fastest_that_can_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._logged.clear()
    with caplog.at_level(logging.INFO, logger="jali"):
        for _ in range(3):
            assert choose("auto", task()).name == "torch"
    lines = [r.getMessage() for r in caplog.records if "torch" in r.getMessage()]
    assert len(lines) == 1
    assert "CUDA" in lines[0], "it says why not the faster ones"


def test_a_gpu_without_a_fast_kernel_is_logged_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        backends, "_reasons", lambda name, _: () if name == "torch" else ("has no kernel here",)
    )
    on_gpu = task(device=torch.device("cuda", 7))
    assert choose("auto", on_gpu).name == "torch"
    backends._fastest.cache_clear()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "slower than dense" in caplog.text


def test_every_reason_is_a_sentence_and_tolerances_are_stated() -> None:
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert set(backend.tolerance) >= {torch.float16, torch.bfloat16}
        assert all(0 < t <= 2e-2 for t in backend.tolerance.values())
        for reason in backend.why_not(task()):
            assert len(reason) > 8


@pytest.mark.parametrize("scratch", [1, 5_000, 10**9])
def test_scratch_limits_change_nothing(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATHERED_BYTES", "COPIED_BYTES"):
        monkeypatch.setattr(torch_backend, name, scratch)
    q, k, v = tensors(300, B=2, H=4, kv=2)
    for method in (Psa(q_block=32, k_block=16), Entropy(Budget(0.4), q_block=32, k_block=16)):
        small = attend(q, k, v, method=method, backend="torch")
        wanted = attend(q, k, v, method=method, backend="reference")
        assert relative(small.out, wanted.out) < 5e-6
        torch.testing.assert_close(small.lse, wanted.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [256, 300])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("method", [Psa(q_block=32, k_block=16), Entropy(Budget(0.4), tail=True)])
def test_any_strides(method: Method, heads: int, tokens: int) -> None:
    """Every second number of a row, and rows that lie across."""
    q, k, v = tensors(tokens, B=2, H=heads, D=16)
    wanted = attend(q, k, v, method=method, backend="reference")
    across = [x.mT.contiguous().mT for x in (q, k, v)]
    second = [x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v)]
    for several in (across, second):
        found = attend(*several, method=method, backend="torch")
        assert relative(found.out, wanted.out) < 5e-6
        torch.testing.assert_close(found.lse, wanted.lse, atol=1e-5, rtol=1e-5)


def test_threads_have_memory_of_their_own() -> None:
    """Calls at the same time do not write over what others gathered."""
    inputs = [tensors(700 + 60 * i, D=32, seed=i) for i in range(4)]

    def call(i: int) -> torch.Tensor:
        return attend(*inputs[i], method=Psa(q_block=32, k_block=32), backend="torch").out

    alone = [call(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call, list(range(4)) * 8))
    assert all(torch.equal(out, alone[i % 4]) for i, out in enumerate(together))


def test_memory_kept_from_inference_mode_serves_elsewhere() -> None:
    q, k, v = tensors(500, D=32, dtype=torch.float64)

    def call() -> torch.Tensor:
        return attend(q, k, v, method=Psa(q_block=32, k_block=32), backend="torch").out

    def both() -> bool:
        with torch.inference_mode():
            first = call()
        kept = torch_backend._Memory._of_thread.memory
        return not kept.is_inference() and torch.equal(first, call())

    with ThreadPoolExecutor(1) as new_thread:
        assert new_thread.submit(both).result()


@pytest.mark.parametrize("method", [Psa(q_block=32, k_block=16), Entropy(Budget(0.4), tail=True)])
def test_elsewhere_it_is_written_out(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without Triton has no fused kernel for it."""
    q, k, v = tensors(300, B=2, H=4, kv=2)
    wanted = attend(q, k, v, method=method, backend="torch", key_length=[300, 111])
    monkeypatch.setattr(torch_backend, "_fused", torch_backend._written_out)
    found = attend(q, k, v, method=method, backend="torch", key_length=[300, 111])
    assert relative(found.out, wanted.out) < 5e-6
    torch.testing.assert_close(found.lse, wanted.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scratch", [50_000, 10**8])  # in chunks of their own, or in one
def test_heads_with_huge_logits_among_small_ones(
    scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "GATHERED_BYTES", scratch)
    q, k, v = tensors(300, H=4)
    q[:, 1], q[:, 2] = 100 * q[:, 1], q[:, 2].sign()
    k[:, 1], k[:, 2] = 100 * k[:, 1], -10 * q[:, 2, :1]  # overflow; underflow of query 0
    layout = block_layout(TokenGrid.flat(300), blocks=Blocks(32, 16))
    plan = BlockPlan.from_levels(torch.ones(1, 4, layout.M, layout.N), layout)
    out, lse = Torch().attend(q, k, v, plan, 0.25)
    wanted, wanted_lse = Reference().attend(q, k, v, plan, 0.25)
    assert relative(out, wanted) < 5e-6
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [64, 75])  # without a short last block, and with one
@pytest.mark.parametrize("values", [3e14, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("logit", [54.0, -54.0, 0.0, 300.0, -300.0, 3e30])
def test_values_at_any_scale(logit: float, values: float, tokens: int) -> None:
    """Exponentials, alone or times values, leave the range of fp32 long before the result does."""
    make = torch.Generator().manual_seed(0)
    q, k, v = torch.zeros(3, 1, 2, tokens, 16)
    q[..., 0], k[..., 0] = 1, logit
    v = torch.randn(v.shape, generator=make).clamp(-1, 1) * values
    layout = block_layout(TokenGrid.flat(tokens), blocks=Blocks(32, 16))
    for ratios in ((1,), (1, 2, 4, 8)):
        levels = torch.randint(0, len(ratios), (1, 2, layout.M, layout.N), generator=make)
        plan = BlockPlan.from_levels(torch.tensor(ratios)[levels], layout)
        for dtype in (torch.float32, torch.bfloat16):
            args = [x.to(dtype) for x in (q, k, v)]
            out, lse = Torch().attend(*args, plan, 1.0)
            exact, _ = Reference().attend(*(x.double() for x in args), plan, 1.0)
            near, near_lse = Reference().attend(*args, plan, 1.0)
            rounding = min(abs(logit) * 1e-7, 1e-4)  # of the logits themselves, in fp32
            assert relative(out, exact) < Torch.tolerance[dtype] + rounding
            assert relative(near, exact) < Reference.tolerance[dtype] + rounding
            # In 16 bits PyTorch takes exponentials with fewer digits.
            close = 1e-5 if dtype == torch.float32 else 1e-4
            torch.testing.assert_close(lse, near_lse, atol=close, rtol=1e-5)


def test_what_weighs_nothing_adds_nothing() -> None:
    """However large it is: a weight of exp(−400) is 0, not a small number times 1e30."""
    q, k, v = torch.zeros(1, 1, 32, 16), torch.zeros(1, 1, 32, 16), torch.full((1, 1, 32, 16), 1e30)
    q[..., 0], k[..., 5, 0], v[..., 5, :] = 20, 20, 1
    layout = block_layout(TokenGrid.flat(32), blocks=Blocks(16, 16))
    plan = BlockPlan.from_levels(torch.ones(1, 1, 2, 2), layout)
    out, _ = Torch().attend(q, k, v, plan, 1.0)
    torch.testing.assert_close(out, torch.ones_like(out))


def test_overflow_is_not_hidden() -> None:
    """A row whose logits are no numbers is no row of zeros, which mean that no key was real."""
    q, k, v = torch.full((3, 1, 1, 32, 16), 1e30)
    layout = block_layout(TokenGrid.flat(32), blocks=Blocks(16, 16))
    plan = BlockPlan.from_levels(torch.ones(1, 1, 2, 2), layout)
    for backend in (Torch(), Reference()):
        assert backend.attend(q, k, v, plan, 1.0)[0].isnan().all()


@pytest.mark.parametrize("tokens", [41, 44, 48])
@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_causal_pooled_tails(tokens: int, ratio: int) -> None:
    """A pooled key is seen by queries not before its last *real* token."""
    q, k, v = tensors(tokens, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(tokens), blocks=Blocks(16, 16))
    levels = torch.where(layout.causal, ratio, 0)
    levels[:, 0] = 1
    plan = BlockPlan.from_levels(levels.expand(1, 1, -1, -1), layout, causal=True)
    out, lse = Torch().attend(q, k, v, plan, 0.25)
    wanted, wanted_lse = Reference().attend(q, k, v, plan, 0.25)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    # The last query sees every real key: its weights count them all.
    values = torch.ones_like(v)
    flat, total = Torch().attend(torch.zeros_like(q), k, values, plan, 0.25)
    assert float(total[0, 0, -1].exp()) == pytest.approx(tokens)
    torch.testing.assert_close(flat, values)


@pytest.mark.parametrize("backend", [Torch(), Reference()])
def test_fp64_is_really_fp64(backend: object) -> None:
    q, k, v = tensors(100, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(100), blocks=Blocks(16, 16))
    plan = BlockPlan.from_levels(torch.ones(1, 1, layout.M, layout.N), layout)
    out, _ = backend.attend(q, k, v, plan, 0.25)  # type: ignore[attr-defined]
    assert relative(out, sdpa(q, k, v, 0.25)) < 1e-12


def test_stock_attention_pads() -> None:
    q, k, v = tensors(50, B=3, H=4, kv=2)
    padding = KeyPadding(length=torch.tensor([50, 20, 0], dtype=torch.int32))
    out = stock(q, k, v, 0.25, padding)
    assert relative(out[1:2], sdpa(q[1:2], k[1:2, :, :20], v[1:2, :, :20], 0.25)) < 5e-6
    assert (out[2] == 0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("lengths", [(50, 20, 0), (20, 20, 20), (0, 0, 0), (50, 50, 50), None])
def test_dense_attention_never_looks_into_the_padding(lengths: tuple[int, ...] | None) -> None:
    q, k, v = tensors(50, B=3, H=4, kv=2)
    real = torch.rand(3, 50, generator=torch.Generator().manual_seed(1)) < 0.5
    given = {"key_mask": real}
    if lengths is not None:
        real = torch.arange(50) < torch.tensor(lengths)[:, None]
        given = {"key_length": torch.tensor(lengths)}
    junk_k, junk_v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))
    for method in (Dense(), FastestDense()):
        for lse in (False, True):
            out = attend(q, junk_k, junk_v, method=method, lse=lse, **given).out
            for b in range(3):
                keys, values = k[b, :, real[b]][None], v[b, :, real[b]][None]
                wanted = sdpa(q[b : b + 1], keys, values) if real[b].any() else out[b] * 0
                assert relative(out[b : b + 1], wanted.view(1, *out.shape[1:])) < 5e-6


def test_plans_shared_by_heads_and_samples() -> None:
    q, k, v = tensors(70, B=2, H=4, kv=2)
    layout = block_layout(TokenGrid.flat(70), blocks=Blocks(16, 16))
    levels = torch.eye(layout.M, dtype=torch.int64)[None, None] + 1
    levels[levels == 1] = 0
    one = BlockPlan.from_levels(levels, layout)
    many = BlockPlan.from_levels(levels.expand(2, 4, -1, -1), layout)
    for backend in (Torch(), Reference()):
        a, b = (backend.attend(q, k, v, plan, 0.25)[0] for plan in (one, many))
        torch.testing.assert_close(a, b)


def test_plans_given_as_lists_run() -> None:
    q, k, v = tensors(200)
    plan = attend(q, k, v, method=Psa(q_block=32, k_block=16), backend="torch").plan
    assert plan is not None
    listed = BlockPlan(plan.layout, plan.ratios, given=plan.lists)
    q, k, v = plan.layout.q.arrange(q), plan.layout.k.arrange(k), plan.layout.k.arrange(v)
    for backend in (Torch(), Reference()):
        a, b = (backend.attend(q, k, v, p, 0.25)[0] for p in (plan, listed))
        assert torch.equal(a, b)
