"""Bad input gets a ValueError or TypeError that names the value and the rule, before any work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jali import (
    AdaBsa,
    Budget,
    Dense,
    Entropy,
    Gilbert,
    Local,
    Psa,
    Random,
    RfV2,
    Schedule,
    Site,
    TokenGrid,
    attend,
    make_method,
    sparse_attention,
)
from jali.methods import Method
from oracle import tensors

Q, K, V = tensors(96, B=2, H=4, D=16)


def api(**changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {"q": Q, "k": K, "v": V, "sparse_type": "rf_v2", "sparsity": 0.5}
    return sparse_attention(**{**given, **changes})


def call(**changes: Any) -> object:
    given: dict[str, Any] = {"q": Q, "k": K, "v": V, "method": "entropy"}
    given.update(changes)
    return attend(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def swapped(tokens: int, keys: int | None = None) -> dict[str, torch.Tensor]:
    """[B, S, H, D], as other libraries have it."""
    q, k = torch.zeros(1, tokens, 4, 16), torch.zeros(1, keys or tokens, 4, 16)
    return {"q": q, "k": k, "v": k}


E = ValueError
T = TypeError
TABLE: list[tuple[str, Callable[[], object], type[Exception], list[str]]] = [
    # sparse_attention: tensors and layout
    ("rank", lambda: api(q=Q[0]), E, ["q", "4 dimensions", "[4, 96, 16]"]),
    ("rank of v", lambda: api(v=V[..., 0]), E, ["v", "4 dimensions"]),
    ("not a tensor", lambda: api(q=[1.0]), T, ["q", "tensor"]),
    ("no tensor", lambda: api(k=None), T, ["k", "tensor"]),
    ("layout", lambda: api(input_layout="BSH"), E, ["input_layout", "'BSH'", "BSND"]),
    ("layout type", lambda: api(input_layout=3), T, ["input_layout", "3"]),
    ("heads", lambda: api(head_num=7), E, ["head_num=7", "4 heads"]),
    ("heads BSND", lambda: api(head_num=4, input_layout="BSND"), E, ["head_num=4", "96 heads"]),
    ("no heads", lambda: api(head_num=0), E, ["head_num=0"]),
    ("half a head", lambda: api(head_num=2.5), T, ["head_num", "2.5"]),
    ("sparse type", lambda: api(sparse_type="rf_v3"), E, ["'rf_v3'", "did you mean 'rf_v2'"]),
    ("no such type", lambda: api(sparse_type="xyz"), E, ["'xyz'", "ada_bsa", "None"]),
    ("type of type", lambda: api(sparse_type=3), T, ["sparse_type", "3"]),
    ("sparsity", lambda: api(sparsity=1.5), E, ["sparsity", "[0, 1]", "1.5"]),
    ("sparsity < 0", lambda: api(sparsity=-0.1), E, ["sparsity", "-0.1"]),
    ("sparsity nan", lambda: api(sparsity=math.nan), E, ["sparsity", "nan"]),
    ("sparsity text", lambda: api(sparsity="0.5"), T, ["sparsity", "'0.5'"]),
    ("sparsity dense", lambda: api(sparse_type=None, sparsity=2.0), E, ["sparsity", "2.0"]),
    ("scale nan", lambda: api(scale=math.nan), E, ["scale", "finite", "nan"]),
    ("scale inf", lambda: api(scale=math.inf, sparse_type=None), E, ["scale", "finite"]),
    ("scale text", lambda: api(scale="1"), T, ["scale", "'1'"]),
    ("inner", lambda: api(inner_precise=4), E, ["inner_precise", "0 or 1", "4"]),
    ("unknown", lambda: api(sparsitty=0.5), T, ["'sparsitty'", "did you mean 'sparsity'"]),
    ("unknown 2", lambda: api(zzz=0.5), T, ["'zzz'", "latent_shape_q"]),
    (
        "other's option",
        lambda: api(cdf_threshold=0.5),
        E,
        ["cdf_threshold=0.5", "ada_bsa", "rf_v2"],
    ),
    ("other's flag", lambda: api(keep_sink=False), E, ["keep_sink=False", "ada_bsa"]),
    ("other's flag 2", lambda: api(keep_recent=False, sparse_type=None), E, ["keep_recent=False"]),
    ("compat", lambda: api(compat=True, sparse_type="psa"), E, ["compat", "psa"]),
    ("block dense", lambda: api(block_size=64, sparse_type=None), E, ["block_size=64"]),
    ("cdf", lambda: api(sparse_type="ada_bsa", cdf_threshold=1.5), E, ["cdf_threshold", "1.5"]),
    ("cdf nan", lambda: api(sparse_type="ada_bsa", cdf_threshold=math.nan), E, ["cdf", "nan"]),
    ("block", lambda: api(block_size=0), E, ["block", "0"]),
    ("block ada", lambda: api(sparse_type="ada_bsa", block_size=100), E, ["multiple of 8", "100"]),
    (
        "grid",
        lambda: api(latent_shape_q=[2, 6, 9]),
        E,
        ["latent_shape_q", "[2, 6, 9]", "108", "96"],
    ),
    (
        "grid + text",
        lambda: api(latent_shape_q=[2, 6, 8], txt_len=7),
        E,
        ["txt_len 7", "103", "96"],
    ),
    ("grid rank", lambda: api(latent_shape_q=[8, 12]), E, ["latent_shape_q", "[8, 12]"]),
    ("grid sign", lambda: api(latent_shape_q=[-2, -6, 8]), E, ["latent_shape_q", "[-2, -6, 8]"]),
    ("grid type", lambda: api(latent_shape_q="abc"), T, ["latent_shape_q", "'abc'"]),
    ("grid float", lambda: api(latent_shape_q=[2, 6, 8.0]), T, ["latent_shape_q", "8.0"]),
    ("key grid", lambda: api(latent_shape_k=[2, 6, 9]), E, ["latent_shape_k", "[2, 6, 9]", "96"]),
    (
        "grid dense",
        lambda: api(sparse_type=None, latent_shape_q=[1, 1, 5], sparsity=0.0),
        E,
        ["latent_shape_q", "96"],
    ),
    ("text", lambda: api(txt_len=97), E, ["txt_len", "97", "96"]),
    ("text < 0", lambda: api(txt_len=-1), E, ["txt_len", "-1"]),
    ("dtypes", lambda: api(k=K.half()), T, ["dtype", "float16", "float32"]),
    ("ints", lambda: api(q=Q.int(), k=K.int(), v=V.int()), T, ["q", "int32"]),
    ("devices", lambda: api(k=K.to("meta")), E, ["device", "meta", "cpu"]),
    ("grad", lambda: api(q=Q.clone().requires_grad_()), E, ["gradients", "inference"]),
    ("grad v", lambda: api(v=V.clone().requires_grad_()), E, ["gradients", "inference"]),
    ("empty", lambda: api(q=Q[:, :, :0]), E, ["q", "empty", "[2, 4, 0, 16]"]),
    ("empty batch", lambda: api(q=Q[:0], k=K[:0], v=V[:0]), E, ["q", "empty"]),
    ("k and v", lambda: api(v=V[:, :, :9]), E, ["k and v", "[2, 4, 9, 16]"]),
    ("batch", lambda: api(q=Q[:1]), E, ["batch", "1 and 2"]),
    ("head dim", lambda: api(q=Q[..., :8]), E, ["head dim", "8 and 16"]),
    ("gqa", lambda: api(k=K[:, :3], v=V[:, :3]), E, ["multiple", "4 and 3"]),
    ("backend", lambda: api(backend="tritn"), E, ["'tritn'", "did you mean 'triton'"]),
    ("backend dense", lambda: api(sparse_type=None, backend="zzz"), E, ["'zzz'", "reference"]),
    ("backend cannot", lambda: api(backend="triton"), E, ["'triton'", "CUDA"]),
    ("causal", lambda: api(is_causal=True), E, ["rf_v2", "causal"]),
    ("causal type", lambda: api(is_causal=0.5), T, ["is_causal", "0.5"]),
    (
        "causal keys",
        lambda: api(is_causal=True, sparse_type="ada_bsa", q=Q[:, :, :9]),
        E,
        ["causal", "offset"],
    ),
    (
        "causal dense keys",
        lambda: api(is_causal=True, sparse_type=None, sparsity=0.0, q=Q[:, :, :9]),
        E,
        ["causal"],
    ),
    ("mask", lambda: api(attn_mask=torch.ones(2, 96)), E, ["attn_mask", "bool", "float32"]),
    ("mask shape", lambda: api(attn_mask=torch.ones(96, 96).bool()), E, ["attn_mask", "[96, 96]"]),
    ("mask type", lambda: api(attn_mask="no"), T, ["attn_mask", "'no'"]),
    (
        "dense mask",
        lambda: api(sparse_type=None, sparsity=0.0, attn_mask=torch.ones(5, 5).bool()),
        E,
        ["attn_mask", "[5, 5]"],
    ),
    (
        "causal mask",
        lambda: api(
            sparse_type=None, sparsity=0.0, is_causal=True, attn_mask=torch.ones(2, 96).bool()
        ),
        E,
        ["causal"],
    ),
    # attend
    ("a rank", lambda: call(q=Q[0]), E, ["q", "4 dimensions"]),
    ("a none", lambda: call(q=None), T, ["q", "tensor", "NoneType"]),
    ("a grid", lambda: call(grid=(2, 6, 9)), E, ["grid 2×6×9", "108", "96"]),
    ("a grid 2", lambda: call(grid=(2, 6)), E, ["triple", "(2, 6)"]),
    ("a key grid", lambda: call(key_grid=TokenGrid.flat(9)), E, ["key_grid", "9 tokens", "96"]),
    ("a grid short", lambda: call(grid=(1, 6, 8)), E, ["48", "96", "2×6×8 would fit"]),
    ("a grid text", lambda: call(grid=(2, 6, 7)), E, ["84", "96", "text=12) would fit"]),
    ("a grid pixels", lambda: call(grid=(5, 96, 128)), E, ["in tokens, so 2×6×8"]),
    ("a swapped", lambda: call(grid=(2, 6, 8), **swapped(96)), E, ["96 heads", "transpose(1, 2)"]),
    ("a swapped row", lambda: call(**swapped(300)), E, ["300 heads of 4", "transpose(1, 2)"]),
    (
        "a swapped dense",
        lambda: call(grid=(2, 6, 8), method="dense", **swapped(96)),
        E,
        ["transpose(1, 2)"],
    ),
    ("a swapped keys", lambda: call(**swapped(96, keys=7)), E, ["96 and 7", "transpose(1, 2)"]),
    (
        "swapped",
        lambda: api(latent_shape_q=[2, 6, 8], **swapped(96)),
        E,
        ["transpose(1, 2)", "input_layout"],
    ),
    ("a offset", lambda: call(offset=1), E, ["offset", "96 keys", "got 1"]),
    ("a offset type", lambda: call(offset=0.5), E, ["offset", "0.5"]),
    ("a method", lambda: call(method="entrpy"), E, ["'entrpy'", "did you mean 'entropy'"]),
    ("a method type", lambda: call(method=3), T, ["3"]),
    ("a scale", lambda: call(scale=math.inf), E, ["scale", "inf"]),
    ("a backend", lambda: call(backend="x"), E, ["'x'", "torch", "reference"]),
    ("a backend dense", lambda: call(backend="x", method="dense"), E, ["'x'", "torch"]),
    ("a named", lambda: call(backend="triton"), E, ["'triton' cannot run this", "CUDA"]),
    ("a causal", lambda: call(causal=True, method="psa"), E, ["psa", "causal", "entropy"]),
    ("a causal order", lambda: call(causal=True, method=Entropy(order=Gilbert())), E, ["causal"]),
    ("a causal keys", lambda: call(causal=True, q=Q[:, :, :9]), E, ["causal", "offset"]),
    (
        "a causal grid",
        lambda: call(causal=True, grid=(1, 8, 12), key_grid=(1, 12, 8)),
        E,
        ["offset"],
    ),
    ("a causal pad", lambda: call(causal=True, key_length=[9, 9]), E, ["causal", "padded"]),
    ("a lengths", lambda: call(key_length=[5]), E, ["key_length", "2", "[1]"]),
    ("a lengths >", lambda: call(key_length=[5, 97]), E, ["key_length", "0..96", "97"]),
    ("a lengths <", lambda: call(key_length=torch.tensor([5, -1])), E, ["key_length", "-1"]),
    ("a lengths float", lambda: call(key_length=[5.5, 6]), E, ["key_length", "ints"]),
    ("a length", lambda: call(key_length=5), E, ["key_length", "2 ints"]),
    ("a both", lambda: call(key_length=[5, 5], key_mask=torch.ones(2, 96).bool()), E, ["not both"]),
    ("a mask", lambda: call(key_mask=torch.ones(2, 95).bool()), E, ["key_mask", "[2, 96]", "95"]),
    ("a mask dtype", lambda: call(key_mask=torch.ones(2, 96)), E, ["key_mask", "bool"]),
    ("a mask type", lambda: call(key_mask=[1]), T, ["key_mask", "[1]"]),
    ("a grad", lambda: call(k=K.clone().requires_grad_()), E, ["gradients", "inference"]),
    ("a devices", lambda: call(k=K.to("meta")), E, ["one device", "meta"]),
    (
        "a fp8",
        lambda: call(
            q=Q.to(torch.float8_e5m2), k=K.to(torch.float8_e5m2), v=V.to(torch.float8_e5m2)
        ),
        T,
        ["float8"],
    ),
    # methods
    (
        "option",
        lambda: make_method("rf_v2", sparsty=1),
        E,
        ["'sparsty'", "did you mean 'sparsity'"],
    ),
    (
        "other option",
        lambda: make_method("rf_v2", cdf_threshold=0.5),
        E,
        ["'cdf_threshold'", "window"],
    ),
    ("added", lambda: make_method(Dense(), sparsity=1), T, ["sparsity"]),
    ("rf sparsity", lambda: RfV2(1.2), E, ["sparsity", "1.2"]),
    ("rf window", lambda: RfV2(window=(2, 8)), E, ["window", "(2, 8)"]),
    ("ada nan", lambda: AdaBsa(math.nan), E, ["sparsity", "nan"]),
    ("sharp", lambda: Entropy(sharpness=-1), E, ["sharpness", "-1"]),
    ("sharp text", lambda: Entropy(sharpness="x"), T, ["sharpness", "'x'"]),  # type: ignore[arg-type]
    ("sharp inf", lambda: Entropy(sharpness=math.inf), E, ["sharpness", "inf"]),
    ("samples", lambda: Entropy(samples=0), E, ["samples", "0"]),
    ("samples float", lambda: Entropy(samples=2.5), T, ["samples", "2.5"]),
    ("q_block", lambda: Entropy(q_block=0), E, ["q_block", "0"]),
    ("k_block", lambda: Random(k_block=-4), E, ["k_block", "-4"]),
    ("local block", lambda: Local(q_block=0), E, ["q_block", "0"]),
    ("psa block", lambda: Psa(k_block=12), E, ["12", "multiple of 8"]),
    ("psa mode", lambda: Psa(mode="top"), E, ["mode", "'top'", "thresholdbound"]),
    ("psa axis", lambda: Psa(axis="time"), E, ["axis", "'time'", "'step'"]),
    ("psa key", lambda: Psa({3: (0, 1)}), E, ["mask_ratios", "3"]),
    ("psa empty", lambda: Psa({}), E, ["mask_ratios", "empty"]),
    ("psa pair", lambda: Psa({1: 0.5}), E, ["mask_ratios[1]", "pair", "0.5"]),
    ("psa gap", lambda: Psa({1: (0, 0.2), 2: (0.3, 1)}), E, ["mask_ratios[2]", "0.3", "0.2"]),
    ("psa range", lambda: Psa({1: (0, 1.2)}), E, ["mask_ratios[1]", "1.2"]),
    ("psa nan", lambda: Psa({1: (0, math.nan)}), E, ["mask_ratios[1]", "nan"]),
    ("psa sim", lambda: Psa(similarity=(1.0, math.nan, 0.0)), E, ["similarity", "nan"]),
    ("psa end", lambda: Psa({1: (0, 0.2), 0: (0.2, 0.9)}), E, ["mask_ratios[0]", "0.9"]),
    ("steps", lambda: Schedule(Entropy(), dense_steps=-1), E, ["dense_steps", "-1"]),
    ("steps share", lambda: Schedule(Entropy(), dense_steps=1.5), E, ["dense_steps", "1.5"]),
    ("steps nan", lambda: Schedule(Entropy(), dense_last_steps=math.nan), E, ["dense_last", "nan"]),
    ("tokens nan", lambda: Schedule(Entropy(), min_tokens=math.nan), T, ["min_tokens", "nan"]),
    ("tokens", lambda: Schedule(Entropy(), min_tokens=-1), E, ["min_tokens", "-1"]),
    ("layers", lambda: Schedule(Entropy(), dense_layers=(0.5,)), T, ["dense_layers", "0.5"]),
    ("wraps", lambda: Schedule("entropy"), T, ["'entropy'"]),
    ("budgets", lambda: Schedule(Entropy(), budgets=(0.5, 1.5)), E, ["budgets", "1.5"]),
    ("dense budget", lambda: Schedule(Dense(), budgets=(0.5,)), E, ["dense", "0.5"]),
    ("budget", lambda: Entropy().with_budget(1.1), E, ["1.1"]),
    ("psa budget", lambda: Psa().with_budget(math.nan), E, ["budget", "nan"]),
    ("site", lambda: Site(5, 5), E, ["step=5", "steps=5"]),
    ("site layer", lambda: Site(0, 1, -1, 3), E, ["layer=-1"]),
    ("floor", lambda: Budget(0.2, floor=0.3), E, ["floor", "0.3"]),
    (
        "compat text",
        lambda: call(method=RfV2(compat=True), grid=TokenGrid.video(1, 8, 11, text=8)),
        E,
        ["compat", "88", "128"],
    ),
    (
        "compat keys",
        lambda: call(method=RfV2(compat=True), q=Q[:, :, :9]),
        E,
        ["compat", "one sequence"],
    ),
    (
        "compat gqa",
        lambda: call(method=RfV2(compat=True), k=K[:, :2], v=V[:, :2]),
        E,
        ["compat", "2 key heads"],
    ),
    (
        "compat pad",
        lambda: call(method=RfV2(compat=True), key_length=[9, 9]),
        E,
        ["compat", "padded"],
    ),
    (
        "compat causal",
        lambda: call(method=AdaBsa(compat=True), causal=True),
        E,
        ["compat", "causal"],
    ),
    ("compat ada", lambda: call(method=AdaBsa(compat=True), q=Q[:, :, :9]), E, ["compat"]),
    ("compat ada pad", lambda: call(method=AdaBsa(compat=True), key_length=[9, 9]), E, ["compat"]),
]


@pytest.mark.parametrize(
    ("make", "error", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_bad_input(make: Callable[[], object], error: type[Exception], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert isinstance(caught.value, error), repr(caught.value)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


@pytest.mark.parametrize(
    "make",
    [row[1] for row in TABLE if row[0].startswith("a ") or "compat" in row[0]],
    ids=[row[0] for row in TABLE if row[0].startswith("a ") or "compat" in row[0]],
)
def test_errors_come_before_any_work(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither scored nor attended when the call is refused."""
    import jali.backends.torch
    import jali.methods.ada_bsa
    import jali.methods.entropy
    import jali.methods.rf_v2

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was done before the call was refused")

    for module, name in (
        (jali.methods.ada_bsa, "antidiagonal_scores"),
        (jali.methods.entropy, "sampled_scores"),
        (jali.methods.rf_v2, "mean_scores"),
        (jali.methods.rf_v2, "block_means"),
        (jali.backends.torch.Torch, "attend"),
    ):
        monkeypatch.setattr(module, name, work)
    with pytest.raises((ValueError, TypeError)):
        make()


def test_a_named_backend_gives_all_its_reasons() -> None:
    from jali.backends import Task, choose, why_not

    task = Task(torch.device("cpu"), torch.float64, 17, 4, 4, 9, 9)
    for name, reasons in why_not(task).items():
        if not reasons:
            continue
        with pytest.raises(ValueError, match=re.escape(f"'{name}' cannot run this")) as caught:
            choose(name, task)
        assert all(reason in str(caught.value) for reason in reasons)


def test_methods_are_abstract() -> None:
    with pytest.raises(TypeError):
        Method()  # type: ignore[abstract]
