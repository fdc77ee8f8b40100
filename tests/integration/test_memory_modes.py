"""Offloading, adapters, fused projections, casting: in either order with sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

import jali

BLOCKS: dict[str, Any] = {"q_block": 64, "k_block": 64}
SPARSE: dict[str, Any] = {"warmup_frac": 0, "dense_first_layer": False, **BLOCKS}


def model_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def sequential_offload(pipe: Any) -> None:
    """diffusers gives the device a number, and accelerate takes "cpu:0" for another one."""
    import accelerate

    offload = accelerate.cpu_offload

    def without_number(model: Any, device: torch.device, **more: Any) -> Any:
        return offload(model, torch.device(device.type), **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate, "cpu_offload", without_number)
        pipe.enable_sequential_cpu_offload(device="cpu")
    assert next(pipe.transformer.parameters()).device.type == "meta"


def group_offload(kind: str) -> Callable[[Any], None]:
    def enable(pipe: Any) -> None:
        more = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        pipe.transformer.enable_group_offload(
            onload_device=torch.device("cpu"), offload_device=torch.device("cpu"),
            offload_type=kind, **more,
        )  # fmt: skip

    return enable


def layerwise_casting(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )


def lora(pipe: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(5)
    pipe.transformer.add_adapter(
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["to_q", "to_k", "to_v", "to_out.0"],
            init_lora_weights=False,
        )
    )


def fuse(pipe: Any) -> None:
    pipe.fuse_qkv_projections() if hasattr(pipe, "fuse_qkv_projections") else (
        pipe.transformer.fuse_qkv_projections()
    )


def vae_tiling(pipe: Any) -> None:
    pipe.vae.enable_tiling()


ENABLE = {
    "model offload": model_offload,
    "sequential offload": sequential_offload,
    "group offload, blocks": group_offload("block_level"),
    "group offload, leaves": group_offload("leaf_level"),
    "layerwise casting": layerwise_casting,
    "lora": lora,
    "fused projections": fuse,
    "vae tiling": vae_tiling,
}


@pytest.mark.parametrize("first", [True, False], ids=["before us", "after us"])
@pytest.mark.parametrize("name", ENABLE)
def test_in_either_order(name: str, first: bool) -> None:
    """Dense equals the stock pipeline with the same feature; sparse sees every place, twice."""
    if name.startswith("group") and tiny.OLD:
        pytest.skip("group offloading wants an accelerator in diffusers 0.36")
    stock = tiny.wan(2)
    ENABLE[name](stock)
    expected = tiny.generate(stock, tiny.WAN_CALL)
    pipe = tiny.wan(2)
    if first:
        ENABLE[name](pipe)
    with jali.sparse_processor_mode(pipe, method="dense"):
        if not first:
            ENABLE[name](pipe)
        assert torch.equal(tiny.generate(pipe, tiny.WAN_CALL), expected)
    with jali.sparse_processor_mode(pipe, 0.3, **SPARSE) as run:
        for _ in range(2):  # offloading puts its hooks in anew after every generation
            out = tiny.generate(pipe, tiny.WAN_CALL)
            places = [(r.layer, r.step, r.branch) for r in run.stats().rows]
            assert len(set(places)) == len(places) == 2 * 3 * 2
            assert torch.isfinite(out).all()
            assert run.stats().cost < 0.6
    assert torch.equal(tiny.generate(pipe, tiny.WAN_CALL), expected)


def first_block_cache(pipe: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.02))


# A third of its tokens are text, padded or not, and rows of text read everything.
HUNYUAN15_CALL = tiny.hunyuan15_call()
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "CogVideoX": (lambda: tiny.cogvideox(layers=2), tiny.COG_CALL, 2),
    "HunyuanVideo": (tiny.hunyuan, tiny.HUNYUAN_CALL, 3),
    "HunyuanVideo 1.5": (tiny.hunyuan15, HUNYUAN15_CALL, 2),
    "LTX": (lambda: tiny.ltx(2), tiny.LTX_CALL, 2),
    "Flux": (tiny.flux, tiny.FLUX_CALL, 3),
    "Qwen-Image": (tiny.qwen, tiny.qwen_call(), 3),
}
if not tiny.OLD:
    OTHERS["LTX-2"] = (tiny.ltx2, tiny.ltx2_call(), 2)
FOR_OTHERS = {
    "model offload": model_offload,
    "sequential offload": sequential_offload,
    "group offload": group_offload("leaf_level"),
    "layerwise casting": layerwise_casting,
    "lora": lora,
    "first-block cache": first_block_cache,
}


@pytest.mark.parametrize("name", FOR_OTHERS)
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str, name: str) -> None:
    if name.startswith("group") and tiny.OLD:
        pytest.skip("group offloading wants an accelerator in diffusers 0.36")
    build, call, layers = OTHERS[family]
    pipe = build()
    if name == "first-block cache" and family in ("HunyuanVideo 1.5", "LTX-2"):
        with pytest.raises(ValueError, match="not registered"):
            FOR_OTHERS[name](pipe)
        pytest.skip(f"diffusers has no first-block cache for {family}")
    FOR_OTHERS[name](pipe)
    expected = tiny.generate(pipe, call, steps=2)
    with jali.sparse_processor_mode(pipe, method="dense"):
        assert torch.equal(tiny.generate(pipe, call, steps=2), expected)
    with jali.sparse_processor_mode(pipe, 0.3, **SPARSE) as run:
        assert torch.isfinite(tiny.generate(pipe, call, steps=2)).all()
    rows = run.stats().rows
    seen = {(row.layer, row.step) for row in rows}
    # A cache may skip the layers behind the first one in a later step.
    skipped = name == "first-block cache"
    every = {(layer, step) for layer in range(layers) for step in range(2)}
    assert seen == every or (skipped and {(0, 0), (0, 1)} <= seen <= every)
    assert all(row.reason is None for row in rows)
    assert run.stats().cost < 0.7
    assert torch.equal(tiny.generate(pipe, call, steps=2), expected)


def test_lora_scale_still_works() -> None:
    pipe = tiny.wan(2)
    expected = tiny.generate(pipe, tiny.WAN_CALL)
    lora(pipe)
    with jali.sparse_processor_mode(pipe, method="dense"):
        with_lora = tiny.generate(pipe, tiny.WAN_CALL)
        without = tiny.generate(pipe, tiny.WAN_CALL, attention_kwargs={"scale": 0.0})
    assert not torch.equal(with_lora, expected)
    assert torch.allclose(without, expected, atol=1e-6)


class TestFusedCogVideoX:
    """Its fusing replaces every processor, so it goes first; the other order is said in words."""

    def test_fused_first(self) -> None:
        pipe = tiny.cogvideox()
        pipe.fuse_qkv_projections()
        expected = tiny.generate(pipe, tiny.COG_CALL)
        with jali.sparse_processor_mode(pipe, method="dense"):
            assert torch.equal(tiny.generate(pipe, tiny.COG_CALL), expected)
        with jali.sparse_processor_mode(pipe, 1.0, **SPARSE) as run:
            out = tiny.generate(pipe, tiny.COG_CALL)
        assert run.stats().dense == {}
        assert (out - expected).norm() <= 1e-4 * expected.norm()

    def test_fused_under_us_is_told(self, caplog: Any) -> None:
        pipe = tiny.cogvideox()
        with jali.sparse_processor_mode(pipe, 0.3, **SPARSE):
            pipe.fuse_qkv_projections()
            tiny.generate(pipe, tiny.COG_CALL)
        assert "processors were replaced" in caplog.text
        tiny.generate(pipe, tiny.COG_CALL)


FUSED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Flux": (tiny.flux, tiny.FLUX_CALL),
    "LTX": (lambda: tiny.ltx(2), tiny.LTX_CALL),
}


@pytest.mark.parametrize("first", [True, False], ids=["before us", "after us"])
@pytest.mark.parametrize("family", FUSED)
def test_fused_in_either_order(family: str, first: bool) -> None:
    build, call = FUSED[family]
    pipe = build()
    expected = tiny.generate(pipe, call)
    if first:
        fuse(pipe)
    with jali.sparse_processor_mode(pipe, 1.0, **SPARSE) as run:
        if not first:
            fuse(pipe)
        assert any(name.endswith(".to_qkv") for name, _ in pipe.transformer.named_modules())
        out = tiny.generate(pipe, call)
    assert run.stats().dense == {}
    assert (out - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.skipif(tiny.OLD, reason="diffusers 0.36 has no LTX-2")
def test_diffusers_cannot_fuse_ltx2() -> None:
    """Its attention between video and audio has keys of another width, and no stock LTX-2 fuses."""
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        tiny.ltx2_transformer().fuse_qkv_projections()


def test_saving_is_not_disturbed(tmp_path: Any) -> None:
    from diffusers import WanTransformer3DModel

    model = tiny.wan_transformer(2)
    names = set(model.state_dict())
    with jali.sparse_processor_mode(model, 0.3, warmup_frac=0):
        assert set(model.state_dict()) == names
        model.save_pretrained(tmp_path)
    WanTransformer3DModel.from_pretrained(tmp_path)
