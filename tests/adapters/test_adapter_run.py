"""Any host: its calls are those of `attend`, its run keeps what they share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import jali
from jali.adapters import Run, attention
from jali.integration.choice import chosen_method
from jali.methods import METHODS
from jali.planning.tables import Tables

GRID = (3, 8, 16)
B, H, S, D = 2, 3, 384, 16


def tensors(seed: int = 0, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return tuple(torch.randn(batch, H, S, D) for _ in range(3))  # type: ignore[return-value]


def last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def call(run: Run, *qkv: Tensor, step: int = 0, layer: int = 0, **more: object) -> Tensor:
    given = {"layout": "bhsd", "grid": GRID, "steps": 4, "layers": 2, "branch": "cond"} | more
    return attention(*qkv, step=step, layer=layer, run=run, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_call_is_one_of_attend(name: str, layout: str) -> None:
    """Every method, both layouts: what `attend` gives for the same method at the same site."""
    q, k, v = tensors()
    run = Run(name)
    given = (q, k, v) if layout == "bhsd" else (last(q), last(k), last(v))
    out = call(run, *given, step=3, layer=1, layout=layout)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    site = jali.Site(3, 4, 1, 2, "cond")
    method = chosen_method(name, None, None, None, None, {})
    expected = jali.attend(q, k, v, method=method, grid=GRID, site=site, tables=Tables())
    assert torch.equal(out, expected.out)
    (row,) = run.stats().rows
    assert (row.step, row.layer, row.branch) == (3, 1, "cond")
    cost = 1.0 if expected.executed is None else expected.executed.cost
    assert row.cost == pytest.approx(cost, abs=1e-6)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_two_branches_in_a_batch_are_two_calls(name: str, layout: str) -> None:
    q, k, v = tensors()
    together, apart = Run(name), Run(name)
    turn = last if layout == "bshd" else (lambda x: x)
    both = ("uncond", "cond")
    for step in range(4):
        qs, ks, vs = turn(q + step), turn(k), turn(v)
        out = call(together, qs, ks, vs, step=step, branch=both, layout=layout)
        rows = [
            call(apart, qs[i : i + 1], ks[i : i + 1], vs[i : i + 1], step=step, branch=b,
                 layout=layout)
            for i, b in enumerate(both)
        ]  # fmt: skip
        assert torch.equal(out, torch.cat(rows))
    assert together.stats().by("branch") == pytest.approx(apart.stats().by("branch"))
    assert len(together.stats().rows) == 8
    assert together.tables.made == apart.tables.made


def test_padding_is_of_its_branch() -> None:
    q, k, v = tensors()
    for padding in (
        {"key_length": [300, 384]},
        {"key_mask": torch.arange(S) < torch.tensor([[300], [384]])},
    ):
        run = Run("entropy", mean_budget=0.5, warmup_frac=0, dense_first_layer=False)
        out = call(run, q, k, v, branch=("uncond", "cond"), **padding)
        first = jali.attend(
            q[:1], k[:1], v[:1], method=run.method, grid=GRID, key_length=[300],
        ).out  # fmt: skip
        assert torch.allclose(out[:1], first, atol=1e-5)
        full = jali.attend(q[1:], k[1:], v[1:], method=run.method, grid=GRID).out
        assert torch.allclose(out[1:], full, atol=1e-5)


def test_a_whole_run_costs_its_total() -> None:
    q, k, v = tensors(batch=1)
    run = Run("entropy", total=0.6, q_block=16, k_block=16)
    for step in range(4):
        for layer in range(2):
            call(run, q, k, v, step=step, layer=layer)
    stats = run.stats()
    assert stats.cost == pytest.approx(0.6, abs=0.03)
    assert "asked 0.60 in total" in run.summary()


def test_the_host_does_the_dense_calls_where_it_can() -> None:
    q, k, v = tensors()
    run = Run("entropy", mean_budget=0.5, warmup_frac=1, dense_first_layer=False, min_tokens=100)
    ours = call(run, q, k, v)
    hosts = torch.zeros(1)
    assert call(run, q, k, v, dense=lambda: hosts) is hosts
    assert call(run, q, k, v, step=1, dense=lambda: hosts) is not hosts
    assert torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    short = tuple(x[:, :, :64] for x in (q, k, v))
    assert call(run, *short, step=1, grid=(1, 8, 8), dense=lambda: hosts) is hosts
    assert run.stats().dense == {"first steps": 2, "fewer than 100 tokens": 1}
    assert [row.backend for row in run.stats().rows][1] == "host"


def test_what_is_no_grid_or_no_self_attention_is_dense_and_said() -> None:
    q, k, v = tensors()
    run = Run("entropy", mean_budget=0.3, warmup_frac=0, dense_first_layer=False)
    out = call(run, q, k, v, grid="a sequence of text")
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    call(run, q, k[:, :, :77], v[:, :, :77])
    assert run.stats().dense == {"a sequence of text": 1, "not self-attention": 1}
    assert run.stats().rows[1].dense_work == B * S * 77 * H * D


def test_a_generation_begins_where_the_step_falls_or_when_it_is_told() -> None:
    q, k, v = tensors()
    run = Run("rd", mean_budget=0.5, warmup_frac=0, dense_first_layer=False)
    for step in (0, 0, 1, 2):  # a solver of second order calls a step twice
        call(run, q, k, v, step=step)
    assert len(run.stats().rows) == 4
    assert run.tables.bytes > 0
    run.finish()
    assert (run.tables.bytes, len(run.stats().rows)) == (0, 4)
    call(run, q, k, v, step=2)  # in the middle, as image to image does
    assert len(run.stats().rows) == 1
    call(run, q, k, v, step=1)
    assert len(run.stats().rows) == 1
    run.begin()
    assert not run.stats().rows


def test_a_run_that_is_never_sparse_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("entropy", mean_budget=0.5, warmup_frac=4)
    call(run, *tensors())
    assert "nothing will be sparse" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layout": "sbhd"}, "layout must be 'bhsd' or 'bshd', got 'sbhd'"),
        ({"layout": "bshd"}, "is [batch, heads, tokens, head_dim]"),
        ({"step": 4}, "need 0 <= step < steps, got step=4, steps=4"),
        ({"layer": 2}, "need 0 <= layer < layers"),
        ({"grid": (3, 8, 15)}, "3×8×15 has 360 tokens, but the tensor has 384"),
        ({"branch": ("a", "b", "c")}, "a batch of 2 does not hold 3 branches"),
        ({"branch": ()}, "does not hold 0 branches"),
        ({"key_length": [1]}, "key_length must be 2 ints"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, object], said: str) -> None:
    run = Run("entropy", mean_budget=0.5, warmup_frac=0, dense_first_layer=False)
    with pytest.raises((ValueError, TypeError)) as error:
        call(run, *tensors(), **given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "entropie"}, "did you mean 'entropy'"),
        ({"total": 0.4, "mean_budget": 0.3}, "ask for the same in two ways"),
        ({"backend": "cuda"}, "cuda"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"recipe": "missing.yaml"}, "there is no recipe file missing.yaml"),
        ({"recipe": "missing.yaml", "total": 0.3}, "the recipe says it"),
        ({"budgett": 3}, "rd has no option 'budgett'"),
    ],
)
def test_a_run_that_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(Exception, match=said):
        Run(**given)  # type: ignore[arg-type]


def test_no_diffusers_is_needed() -> None:
    """Hosts have models of their own."""
    code = (
        "import sys; sys.modules['diffusers'] = None; sys.modules['transformers'] = None\n"
        "import torch; from jali.adapters import Run, attention\n"
        "x = torch.randn(1, 2, 256, 16)\n"
        "attention(x, x, x, layout='bhsd', grid=(1, 16, 16), step=0, steps=1, layer=0, layers=1,"
        " run=Run('rd', total=0.5))"
    )
    source = Path(jali.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
