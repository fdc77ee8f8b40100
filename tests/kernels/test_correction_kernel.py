"""The kernels of probes against the plain code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali import Budget, Entropy, RateDistortion, TokenGrid, attend, correction
from jali.correction import LEAST, RIDGE, TINY, Probes, correct
from jali.kernels.correction import correct_rows, rows_attention
from jali.tokens.padding import KeyPadding
from oracle import relative, sdpa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(b: int, s: int, h: int, d: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A [B,H,S,D] view of BSHD memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, s, h, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)


def rows_of(total: int, count: int) -> Tensor:
    return torch.linspace(0, total - 1, count).long().to(DEVICE)


@pytest.mark.parametrize(
    ("shape", "rows", "lengths"),
    [
        ((1, 2, 1, 700, 32), 16, None),  # some stretches of keys
        ((2, 2, 2, 300, 40), 32, (300, 130)),
        ((2, 1, 1, 260, 16), 64, (260, 0)),  # no real key
        ((1, 1, 1, 90, 64), 48, None),  # a single block of keys
    ],
)
def test_rows_in_parts(shape: tuple[int, ...], rows: int, lengths: tuple[int, ...] | None) -> None:
    b, h, kv, s, d = shape
    q, k, v = tokens(b, s, h, d, 1), tokens(b, s, kv, d, 2), tokens(b, s, kv, d, 3)
    padding = None
    if lengths is not None:
        padding = KeyPadding.of_lengths(lengths, torch.device(DEVICE))
        for i, n in enumerate(lengths):
            k[i, :, n:], v[i, :, n:] = torch.nan, torch.inf
    at = rows_of(s, rows)
    parts, lse = rows_attention(q, k, v, at, d**-0.5, padding and padding.length)
    found = Probes(at, parts, lse, torch.ones(1, 1, 1, dtype=torch.bool), s).exact
    for i in range(b):
        n = s if lengths is None else lengths[i]
        want = sdpa(q[i : i + 1, :, at], k[i : i + 1, :, :n], v[i : i + 1, :, :n])
        if n == 0:
            want = torch.zeros_like(want)
        torch.testing.assert_close(found[i : i + 1], want, atol=3e-5, rtol=1e-3)


def case(
    dtype: torch.dtype, b: int, h: int, s: int, d: int, rows: int, parts: int, alike: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A sparse output that lacks something in common, and the dense one of some rows, in parts
    whose weights differ."""
    out, own, turn = tokens(b, s, h, d, 4), tokens(b, s, h, d, 5), tokens(1, d, h, d, 6)
    exact = out + alike * (0.3 * out @ turn + 1.5) + 0.3 * own
    at = rows_of(s, rows)
    lse = torch.randn(b, h, parts, rows, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    several = exact[:, :, None, at] + tokens(b * parts, rows, h, d, 8).reshape(b, h, parts, rows, d)
    rest = exact[:, :, at] - (several * lse.softmax(2)[..., None]).sum(2)
    several = several + rest[:, :, None]
    return out.to(dtype), several.to(dtype).contiguous(), lse.contiguous(), at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alike", [0.0, 1.0])
@pytest.mark.parametrize(
    ("shape", "rows", "parts"),
    [((1, 2, 200, 32), 64, 3), ((2, 2, 150, 40), 32, 1), ((1, 1, 130, 16), 32, 2),
     ((1, 1, 300, 128), 48, 1)],
)  # fmt: skip
def test_what_rows_lack(
    dtype: torch.dtype, alike: float, shape: tuple[int, ...], rows: int, parts: int
) -> None:
    b, h, s, d = shape
    out, several, lse, at = case(dtype, b, h, s, d, rows, parts, alike)
    generator = torch.Generator().manual_seed(9)
    sparse = (torch.rand(b, 1, -(-s // 16), generator=generator) < 0.8).to(DEVICE)
    padding = KeyPadding.of_lengths((s - 30, s)[:b], torch.device(DEVICE))
    given = Probes(at, several, None, sparse, 16, padding)
    rounding = torch.finfo(dtype).eps ** 2
    exact = Probes(at, several.float(), lse, sparse, 16).exact[:, :, None]
    want = correct(out.double(), given._replace(parts=exact))
    kept = out.clone(memory_format=torch.preserve_format)
    found = correct_rows(
        kept, several, lse, at, sparse, 16, padding.length, RIDGE, LEAST, TINY, rounding, 16
    )  # fmt: skip
    assert found is kept
    assert relative(found, want) < (1e-5 if dtype == torch.float32 else 6e-3)
    everything = ~sparse.repeat_interleave(16, -1)[:, 0, :s]
    for i in range(b):
        assert torch.equal(found[i][:, everything[i]], out[i][:, everything[i]])
    assert alike == 0 or not torch.equal(found, out)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e18, 1e30])
def test_sizes_of_values_do_not_matter(size: float) -> None:
    out, several, lse, at = case(torch.float32, 1, 1, 120, 16, 32, 2, 1.0)
    sparse = torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE)
    numbers = at, sparse, 120, None, RIDGE, LEAST, TINY, 1e-12, 16
    want = correct_rows(out.clone(), several, lse, *numbers)
    found = correct_rows(out * size, several * size, lse, *numbers)
    torch.testing.assert_close(found / size, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_that_differ_by_rounding_alone_say_nothing(
    dtype: torch.dtype, by_kernel: bool
) -> None:
    """A fit on such differences would be as steep as they are small."""
    generator = torch.Generator().manual_seed(3)
    up = torch.randint(0, 2, (1, 1, 300, 16), generator=generator).to(DEVICE)
    out = (1 + up * torch.finfo(dtype).eps).to(dtype)
    exact = out + (100 * up.float() @ tokens(1, 16, 1, 16, 6)).to(dtype)
    at = rows_of(300, 32)
    sparse = torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE)
    lse = torch.zeros(1, 1, 1, 32, device=DEVICE) if by_kernel else None
    probes = Probes(at, exact[:, :, None, at].contiguous(), lse, sparse, 300)
    found = correct(out.clone(), probes)
    assert found.isfinite().all()
    assert (found - exact).float().norm() < (out - exact).float().norm()


def test_what_is_no_number_takes_no_part() -> None:
    out, several, lse, at = case(torch.float32, 1, 2, 160, 32, 32, 2, 1.0)
    sparse = torch.ones(1, 1, 10, dtype=torch.bool, device=DEVICE)
    rest = RIDGE, LEAST, TINY, 1e-12, 16
    broken, other = out.clone(), several.clone()
    broken[0, 0, at[3]] = torch.nan
    other[0, 1, 1, 5] = torch.inf
    found = correct_rows(broken, other, lse, at, sparse, 16, None, *rest)
    for head, gone in ((0, 3), (1, 5)):
        few = [i for i in range(32) if i != gone]
        kept = torch.tensor([*few, few[-1]], device=DEVICE)[:32]
        want = correct(
            out.clone(),
            Probes(
                at[kept[:31]], Probes(at, several, lse, sparse, 16).exact[:, :, None, kept[:31]],
                None, sparse, 16,
            ),
        )  # fmt: skip
        rows = torch.arange(160, device=DEVICE) != at[3]
        torch.testing.assert_close(found[:, head, rows], want[:, head, rows], atol=1e-4, rtol=1e-4)
    assert found[0, 0, at[3]].isnan().all()


def test_few_that_are_asked_say_nothing() -> None:
    out, several, lse, at = case(torch.float32, 2, 2, 160, 32, 32, 2, 1.0)
    sparse = torch.zeros(2, 1, 10, dtype=torch.bool, device=DEVICE)
    sparse[0, :, :5], sparse[1, :, :4] = True, True  # 16 probes, and 13
    numbers = at, sparse, 16, None, RIDGE, LEAST, TINY, 1e-12
    found = correct_rows(out.clone(), several, lse, *numbers, 16)
    assert torch.equal(found[1], out[1])
    changed = (found[0] != out[0]).any(-1)
    assert changed[:, :80].all()
    assert not changed[:, 80:].any()
    assert torch.equal(correct_rows(out.clone(), several, lse, *numbers, 17), out)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_nothing_leaves_the_range(by_kernel: bool) -> None:
    """Rows that few resemble may be told far too much."""
    out, several, lse, at = case(torch.float16, 1, 2, 160, 16, 32, 1, 1.0)
    out[0, 0, 1] = 60000.0  # no probe
    out[0, 1, 1] = torch.inf
    assert 1 not in at
    sparse = torch.ones(1, 1, 10, dtype=torch.bool, device=DEVICE)
    probes = Probes(at, several, lse if by_kernel else None, sparse, 16)
    plain, found = out.clone(), correct(out, probes)
    assert not torch.equal(found[0, 0, 2:], plain[0, 0, 2:])
    assert found[0, 0].isfinite().all()
    assert found[0, 0, 1].max() >= 60000
    assert not found[0, 1, 1].isfinite().any()


@pytest.mark.parametrize("padded", [False, True])
def test_a_whole_call(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: with text, and grouped heads."""
    grid = TokenGrid.video(3, 8, 16, text=20)
    q, k = tokens(2, grid.tokens, 4, 32, 1) + 1, tokens(2, grid.tokens, 2, 32, 2)
    v = tokens(2, grid.tokens, 2, 32, 3) + 2 * k
    lengths = [grid.tokens, grid.tokens - 50] if padded else None
    for method in (
        Entropy(Budget(0.3), q_block=32, k_block=16, probes=64),
        RateDistortion(0.3, q_block=32, k_block=16, probes=32),
    ):
        monkeypatch.setattr(correction, "_use_kernel", lambda *_: False)
        want = attend(q, k, v, method=method, grid=grid, key_length=lengths).out
        monkeypatch.setattr(correction, "_use_kernel", lambda *_: True)
        found = attend(q, k, v, method=method, grid=grid, key_length=lengths).out
        torch.testing.assert_close(found[0], want[0], atol=1e-4, rtol=1e-3)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from jali.correction import RIDGE
from jali.kernels.correction import _apply_kernel, _fit_kernel, _steps
types = {
    **dict.fromkeys(("out", "parts", "weight"), "*bf16"),
    **dict.fromkeys(("lses", "shift"), "*fp32"),
    "rows": "*i64", "sparse": "*i1", "key_length": "*i32",
    **dict.fromkeys(("ridge", "least", "tiny", "rounding"), "fp32"),
}
D = 64
sizes = {"D": D, "D_PAD": D}
fit = {"R": 64, "C": 32, "STEPS": _steps(1 + D / RIDGE), "HAS_LENGTH": True}
apply = {"TILE": 64, "PRECISION": "ieee"}
for capability in (80, 90, 100, 120):
    target = GPUTarget("cuda", capability, 32)
    for kernel, own in ((_fit_kernel, fit), (_apply_kernel, apply)):
        constants = sizes | own
        given = {n: types.get(n, "i32") for n in kernel.arg_names if n not in constants}
        source = ASTSource(kernel, given, constants)
        options = {"num_warps": 4, "num_stages": 1}
        assert compile(source, target=target, options=options).asm["cubin"]
print("compiled")
"""


def test_it_compiles_for_gpus(compiles: Callable[[str], None]) -> None:
    """For each generation: a reduction of a product in two steps does not for data-center
    Blackwell."""
    compiles(COMPILE)
