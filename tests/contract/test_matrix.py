"""Every method × every backend × odd geometries agrees with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    CAUSAL,
    DEVICES,
    FLEX_GEOMETRIES,
    FLEX_METHODS,
    GEOMETRIES,
    METHODS,
    PLACES,
    Geometry,
    defined,
    spoiled,
)
from hypothesis import given
from hypothesis import strategies as st

from jali import BlockPlan, Box, Dense, Method, Site, Text, TokenGrid, attend
from jali.attend import Attended
from jali.backends import BACKENDS, Reference, Task, choose
from jali.checks import check_call, check_padding
from jali.correction import correct, probe
from jali.kernels.lists import MEAN
from jali.methods import Query
from jali.planning.plan import full_plan
from jali.tokens.layout import Blocks, block_layout
from jali.tokens.padding import KeyPadding
from oracle import relative, sdpa, tensors

FITTED = 4.0  # times the tolerance: what is fitted on rounded rows is added to all
LSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.2e-1}


def executed(result: Attended, geometry: Geometry, device: str, causal: bool) -> BlockPlan:
    if result.executed is not None:
        return result.executed
    layout = block_layout(geometry.q, geometry.k, offset=geometry.offset, device=device)
    return full_plan(layout, causal)


# Backends of one case come one after the other and mostly execute the same plan: what is wanted of
# it is worked out once.
_last: dict[str, Any] = {}


def wanted(
    case: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan,
    padding: KeyPadding | None, method: Method, site: Site,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The fp64 reference in the caller's order, remembered while case and plan stay the same, and
    corrected where the method has probes."""
    layout = plan.layout
    plan_of = (layout, plan.ratios, plan.causal)
    same = _last.get("case") == case and _last["plan"] == plan_of
    if not (same and torch.equal(_last["levels"], plan.levels)):
        if padding is not None:
            real = layout.k.arrange(padding.valid(layout.k.tokens))
            if plan.orders is not None:  # one mask has to serve the orders of all heads
                each = real[:, None].expand_as(plan.orders.k).gather(2, plan.orders.k)
                assert (each == each[:, :1]).all()
                real = each[:, 0]
            padding = KeyPadding(mask=real)
        arranged = plan.arrange(q, k, v)
        scale = q.shape[3] ** -0.5
        arranged = tuple(x.double() for x in arranged)
        found = Reference().attend(*arranged, plan, scale, padding)
        _last.update(case=case, plan=plan_of, levels=plan.levels)
        _last["wanted"] = found, arranged, padding
    (out, lse), arranged, padding = _last["wanted"]
    if method.probes:
        query = Query(*arranged[:2], layout, site, q.shape[3] ** -0.5, padding)
        out = correct(out.clone(), probe(query, arranged[2], plan, method.probes))
    return plan.restore(out), plan.restore(lse)


def agrees(
    name: str,
    geometry: Geometry,
    backend: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    D: int = 16,
    causal: bool = False,
    key_length: list[int] | None = None,
    key_mask: torch.Tensor | None = None,
    seed: int = 0,
    site: Site = Site(3, 10, 1, 2),  # noqa: B008
    spread: float = 2.0,
) -> Attended | None:
    """Run one call and hold it against the fp64 reference on the same inputs and plan; only the
    call gets to see what lies in padded keys and values."""
    q, k, v = tensors(
        geometry.q, geometry.k, B=geometry.B, H=geometry.H, kv=geometry.kv, D=D, dtype=dtype,
        device=device, seed=seed, spread=spread,
    )  # fmt: skip
    method = METHODS[name]
    padded: dict[str, Any] = {"key_length": key_length, "key_mask": key_mask}
    where: dict[str, Any] = {"grid": geometry.q, "key_grid": geometry.k, "offset": geometry.offset}
    padding = check_padding(key_length, key_mask, k)
    junk_k, junk_v = k, v
    if padding is not None:
        junk_k, junk_v = (spoiled(x, padding.valid(k.shape[2])) for x in (k, v))
    call = check_call(q, k, v, method, **where, padding=padding, causal=causal)
    reasons = BACKENDS[backend].why_not(call.task)
    if reasons:  # a named backend never falls back
        with pytest.raises(ValueError, match="cannot run this"):
            choose(backend, call.task)
        return None
    try:
        result = attend(
            q, junk_k, junk_v, method=method, site=site, backend=backend, causal=causal, lse=True,
            **where, **padded,
        )  # fmt: skip
    except ValueError as error:
        # An order may scatter the padding; then a mask is left, which few backends know.
        if key_length is None or not ("key masks" in str(error) or "key padding" in str(error)):
            raise
        return None
    assert result.out.shape == q.shape
    assert result.out.dtype == dtype
    assert result.backend == backend
    plan = executed(result, geometry, device, causal)
    real = None if key_mask is None else tuple(key_mask.flatten().tolist())
    lengths = None if key_length is None else tuple(key_length)
    case = (geometry, device, dtype, D, seed, spread, lengths, real)
    dense = result.plan is None
    out, lse = wanted(
        case, q, k, v, plan, call.padding, Dense() if dense else method.at(site), site
    )
    assert result.out.isfinite().all()
    probed = FITTED if method.probes else 1.0
    assert relative(result.out, out) <= probed * BACKENDS[backend].tolerance[dtype]
    assert result.lse is not None
    torch.testing.assert_close(result.lse.cpu(), lse.cpu(), atol=LSE[dtype], rtol=1e-2)
    assert (plan.levels != 0).any(-1).all()
    return result


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_reference(method: str, geometry: str, device: str, backend: str) -> None:
    if not defined(method, GEOMETRIES[geometry]):
        pytest.skip("compat is undefined here")
    if backend == "flex" and (method not in FLEX_METHODS or geometry not in FLEX_GEOMETRIES):
        pytest.skip("flex compiles anew for every shape")
    if device == "cuda":  # what the fast kernels are made for
        agrees(method, GEOMETRIES[geometry], backend, device, torch.bfloat16, D=64, spread=1.0)
    else:
        agrees(method, GEOMETRIES[geometry], backend, device)


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("method", ["entropy", "psa_levels", "rf_v2", "ada_bsa"])
def test_head_dims_and_dtypes(
    method: str, D: int, dtype: torch.dtype, device: str, backend: str
) -> None:
    if backend == "flex" and method != "entropy":
        pytest.skip("flex compiles anew for every shape")
    agrees(method, GEOMETRIES["text_back"], backend, device, dtype, D, spread=1.0)


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_every_dtype(
    method: str, dtype: torch.dtype, device: str, backend: str
) -> None:
    if backend == "flex" and method not in FLEX_METHODS:
        pytest.skip("flex compiles anew for every shape")
    agrees(method, GEOMETRIES["primes"], backend, device, dtype, 32, spread=1.0)


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("geometry", ["batch", "several", "chunk_end", "other_keys"])
@pytest.mark.parametrize("method", METHODS)
def test_key_lengths(method: str, geometry: str, device: str, backend: str) -> None:
    if "compat" in method:
        pytest.skip("the original knows no padding")
    shape = GEOMETRIES[geometry]
    keys = (shape.k or shape.q).tokens
    lengths = [keys - 3, 0, 21][: shape.B]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    result = agrees(method, shape, backend, device, dtype, key_length=lengths, spread=1.0)
    if result is not None and 0 in lengths:
        assert (result.out[1] == 0).all()
        assert result.lse is not None
        assert (result.lse[1] == -torch.inf).all()


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("geometry", ["batch", "gqa", "chunk_end"])
@pytest.mark.parametrize("method", METHODS)
def test_key_masks(method: str, geometry: str, device: str, backend: str) -> None:
    if "compat" in method:
        pytest.skip("the original knows no padding")
    shape = GEOMETRIES[geometry]
    keys = (shape.k or shape.q).tokens
    make = torch.Generator().manual_seed(5)
    mask = torch.rand(shape.B, keys, generator=make) < 0.7
    mask[-1] = False
    result = agrees(method, shape, backend, device, key_mask=mask.to(device))
    if result is not None:
        assert (result.out[-1] == 0).all()


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("geometry", ["text_front", "primes", "one", "gqa", "chunk", "chunk_flat"])
@pytest.mark.parametrize("method", [m for m in CAUSAL if "gilbert" not in m])
def test_causal(method: str, geometry: str, device: str, backend: str) -> None:
    agrees(method, GEOMETRIES[geometry], backend, device, causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", [m for m in CAUSAL if "gilbert" not in m])
def test_changing_the_future_changes_nothing_causal(method: str, device: str) -> None:
    """Rows before a token must not depend on it. (Only v: the plan may look at q and k.)"""
    q, k, v = tensors(200, device=device)
    other = v.clone()
    other[:, :, 100:] += 5
    first, second = (
        attend(q, k, x, method=METHODS[method], causal=True).out[:, :, :100] for x in (v, other)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_auto_runs_everything(method: str, device: str) -> None:
    q, k, v = tensors(GEOMETRIES["primes"].q, D=80, device=device)
    result = attend(q, k, v, method=METHODS[method], grid=GEOMETRIES["primes"].q)
    assert result.out.isfinite().all()


SEGMENTS = st.one_of(
    st.builds(Text, st.integers(1, 40)),
    st.builds(Box, st.integers(1, 5), st.integers(1, 11), st.integers(1, 11)),
)
GRIDS = st.builds(lambda s: TokenGrid(tuple(s)), st.lists(SEGMENTS, min_size=1, max_size=4))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    grid = draw(GRIDS)
    kv = draw(st.sampled_from([1, 2]))
    more = {"B": draw(st.integers(1, 3)), "H": kv * draw(st.integers(1, 3)), "kv": kv}
    kind = draw(st.sampled_from(["square", "square", "chunk", "other"]))
    if kind == "square":
        return Geometry(grid, **more)
    keys = draw(GRIDS)
    if kind == "other":
        return Geometry(grid, keys, None, **more)
    before, after = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    parts = [*map(Text, filter(None, [before])), *grid.segments, *map(Text, filter(None, [after]))]
    return Geometry(grid, TokenGrid(tuple(parts)), before, **more)


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("method", METHODS)
@given(geometry=geometries(), seed=st.integers(0, 99), data=st.data())
def test_any_geometry(
    method: str, device: str, backend: str, geometry: Geometry, seed: int, data: st.DataObject
) -> None:
    if not defined(method, geometry):
        return
    keys = (geometry.k or geometry.q).tokens
    lengths = None
    if "compat" not in method and data.draw(st.booleans()):
        sizes = st.lists(st.integers(0, keys), min_size=geometry.B, max_size=geometry.B)
        lengths = data.draw(sizes)
    agrees(
        method,
        geometry,
        backend,
        device,
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        D=data.draw(st.sampled_from([16, 24, 40])),
        key_length=lengths,
        seed=seed,
        spread=1.0,
    )


@pytest.mark.parametrize(("device", "backend"), PLACES)
@given(data=st.data(), seed=st.integers(0, 99))
def test_any_plan(device: str, backend: str, data: st.DataObject, seed: int) -> None:
    """Backends promise every plan, not only those that methods make."""
    sizes = st.integers(1, 90)
    Sq, Sk = data.draw(sizes), data.draw(sizes)
    causal = data.draw(st.booleans())
    offset = None
    if causal:
        Sk = max(Sq, Sk)
        offset = data.draw(st.integers(0, Sk - Sq))
    q_block, k_block = data.draw(st.sampled_from([(16, 8), (8, 16), (32, 24), (5, 16)]))
    layout = block_layout(
        TokenGrid.flat(Sq), TokenGrid.flat(Sk), blocks=Blocks(q_block, k_block), offset=offset,
        device=device,
    )  # fmt: skip
    make = torch.Generator().manual_seed(seed)
    shape = (data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 4])))
    levels = torch.tensor([0, 0, 1, 2, 4, 8, MEAN])[
        torch.randint(0, 7, (*shape, layout.M, layout.N), generator=make)
    ]
    levels[..., 0] = torch.where((levels == 0).all(-1), 1, levels[..., 0])
    plan = BlockPlan.from_levels(levels, layout, causal)
    q, k, v = tensors(Sq, Sk, B=2, H=4, kv=2, device=device, seed=seed)
    task = Task(
        q.device, q.dtype, q.shape[3], 4, 2, Sq, Sk, plan.ratios, None, causal
    )  # fmt: skip
    if BACKENDS[backend].why_not(task):
        return
    plan = plan.coarsen(BACKENDS[backend].fitting(plan.blocks, task))
    out, lse = BACKENDS[backend].attend(q, k, v, plan, 0.25)
    wanted, wanted_lse = Reference().attend(q.double(), k.double(), v.double(), plan, 0.25)
    assert relative(out, wanted) <= BACKENDS[backend].tolerance[q.dtype]
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("method", ["entropy", "psa_threshold"])
def test_large_logits_and_values(method: str, device: str, backend: str) -> None:
    """Up to a million and 1e30; products and pooled keys are exact in every dtype, so that nothing
    but the arithmetic of the softmax can differ."""
    make = torch.Generator().manual_seed(0)
    q, k, v = torch.zeros(3, 1, 2, 300, 64)
    q[..., 0] = 1024
    steps = torch.randint(-16, 17, (1, 2, 38), generator=make).repeat_interleave(8, -1)
    k[..., 0] = 512.0 * steps[..., :300]
    v = torch.randn(v.shape, generator=make) * 1e30
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    task = check_call(q, k, v, METHODS[method]).task
    if BACKENDS[backend].why_not(task):
        return
    result = attend(q, k, v, method=METHODS[method], backend=backend)
    layout = result.executed.layout
    inputs = (layout.q.arrange(q), layout.k.arrange(k), layout.k.arrange(v))
    wanted, lse = Reference().attend(*(x.double() for x in inputs), result.executed, 64**-0.5)
    # The log of a pooled key's weight is added to a million, which fp32 knows to a sixteenth.
    rounding = 0 if result.executed.ratios == (1,) else 1 / 16
    limit = BACKENDS[backend].tolerance[dtype] + rounding
    assert relative(result.out, layout.q.restore(wanted)) <= limit
    torch.testing.assert_close(result.lse, layout.q.restore(lse), atol=1e-1, rtol=1e-6)


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("causal", [False, True])
def test_full_plan_is_sdpa(device: str, backend: str, causal: bool) -> None:
    """The reference itself is held against PyTorch."""
    q, k, v = tensors(133, H=6, kv=2, device=device)
    task = check_call(q, k, v, METHODS["dense"], causal=causal).task
    if BACKENDS[backend].why_not(task):
        pytest.skip("; ".join(BACKENDS[backend].why_not(task)))
    blocks = BACKENDS[backend].preferred(task)
    layout = block_layout(TokenGrid.flat(133), blocks=blocks, device=device)
    out, lse = BACKENDS[backend].attend(q, k, v, full_plan(layout, causal), 0.25)
    wanted = sdpa(q.double(), k.double(), v.double(), 0.25, is_causal=causal)
    assert relative(out, wanted) < BACKENDS[backend].tolerance[q.dtype]
    logits = (q @ k.repeat_interleave(3, 1).mT * 0.25).float()
    if causal:
        ahead = torch.ones(133, 133, dtype=torch.bool, device=device).triu(1)
        logits = logits.masked_fill(ahead, -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-4, rtol=1e-4)
