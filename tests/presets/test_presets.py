"""Presets: those of the package run, PSA's file loads as it is, and wrong files are refused."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import yaml

from jali import (
    AdaBsa,
    Budget,
    Dense,
    Entropy,
    FrameWindows,
    Gilbert,
    Local,
    Psa,
    Raster,
    RateDistortion,
    RfV2,
    Schedule,
    Site,
    Tiled,
    TokenGrid,
    attend,
)
from jali.methods import METHODS, Method
from jali.planning.curve import Curve
from jali.presets import Preset, load_preset, presets, read_file, resolve_model
from jali.presets.method import read_method, write_method
from jali.tokens.order import Order

# PSA's own table: section, preset, rule, upper bounds of ratios 1/2/4/8, key block, cap, order,
# dense first steps, nominal density, and what the section says of the model.
TABLE = [
    ("Wan2.1_14b", "psa_balanced", "thr", (0.4, 0.5, 0.6, 0.8), 128, False, True, 15, None),
    ("Wan2.1_1.3b", "psa_balanced", "thr", (0.5, 0.6, 0.7, 0.8), 128, True, True, 15, None),
    ("Wan2.1_1.3b", "psa_topk", "topk", (0.05, 0.1, 0.15, 0.25), 32, False, True, 15, 0.1),
    ("Wan2.2_A14B", "psa_balanced", "thr", (0.5, 0.6, 0.6, 0.8), 32, False, True, 12, None),
    ("Wan2.2_5B", "psa_balanced", "thr", (0.6, 0.7, 0.7, 0.8), 32, False, True, 15, None),
    ("CogVideo1.5_5b", "psa_balanced", "topk", (0.1, 0.15, 0.15, 0.35), 32, False, True, 15, 0.15),
    ("CogVideo_5b", "psa_balanced", "topk", (0.1, 0.15, 0.15, 0.35), 128, False, False, 15, 0.15),
    ("CogVideo_5b", "psa_4steps", "topk", (0.05, 0.15, 0.25, 0.5), 128, False, False, 0, 0.15625),
]
GEOMETRY = {
    "Wan2.1_14b": ((16, 16, 4), 0, (69, 720, 1280), (18, 45, 80)),
    "Wan2.1_1.3b": ((16, 16, 4), 0, (69, 720, 1280), (18, 45, 80)),
    "Wan2.2_A14B": ((16, 16, 4), 0, (69, 768, 1280), (18, 48, 80)),
    "Wan2.2_5B": ((32, 32, 4), 0, (121, 704, 1280), (31, 22, 40)),
    "CogVideo1.5_5b": ((16, 16, 8), 226, (81, 768, 1360), (11, 48, 85)),
    "CogVideo_5b": ((16, 16, 4), 226, (49, 480, 720), (13, 30, 45)),
}
MODELS = {
    "Wan2.1_14b": "wan-t2v-14b",
    "Wan2.1_1.3b": "wan-t2v-1.3b",
    "Wan2.2_A14B": "wan2.2-t2v-a14b",
    "Wan2.2_5B": "wan2.2-ti2v-5b",
    "CogVideo1.5_5b": "cogvideox1.5-5b",
    "CogVideo_5b": "cogvideox-5b",
}
CUSTOM = """
CogVideo_5b:
  attention_configs:
    my_custom_preset:
      type: psa
      description: "My custom PSA configuration"
      use_rearrange: true
      block_size:
        m: 128
        n: 64
        tile_n: 32
      mask_ratios:
        1: [0.0, 0.5]
        2: [0.5, 0.7]
        4: [0.7, 0.9]
        0: [0.9, 1.0]
      mask_mode: thresholdbound
      warmup_steps: 10
"""


def psa_file() -> dict[str, Any]:
    """PSA's attention_config.yaml, with every key the original has."""
    data: dict[str, Any] = {}
    for section, ((w, h, d), text, _, _) in GEOMETRY.items():
        scale = {"width_divisor": w, "height_divisor": h, "depth_divisor": d}
        dense = {"type": "dense", "description": "Dense baseline without sparsity."}
        data[section] = {
            "default_attention": "psa_balanced",
            "video_scale": scale,
            "text_length": text,
            "attention_configs": {"baseline": dense},
        }
    for section, name, mode, (u1, u2, u4, u8), n, cap, rearrange, warmup, _ in TABLE:
        data[section]["attention_configs"][name] = {
            "type": "psa",
            "description": "…",
            "use_rearrange": rearrange,
            "use_sim_mask": cap,
            "block_size": {"m": 128, "n": n, "tile_n": 32},
            "mask_ratios": {
                1: [0.0, u1], 2: [u1, u2], 4: [u2, u4], 8: [u4, u8], 0: [u8, 1.0],
            },
            "mask_mode": {"thr": "thresholdbound", "topk": "topk"}[mode],
            "attn_impl": "old_mask_type" if cap else "new_mask_type",
            "tile_size": [2, 8, 8],
            "warmup_steps": warmup,
            "rearrange_method": "Gilbert",
            "verbose": True,
            "sim_thresholds": {"x2": 0.7, "x4": 0.65, "x8": 0.6},
        }  # fmt: skip
    return data


def write(folder: Path, data: Any) -> Path:
    path = folder / "attention_config.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    return path


def edited(folder: Path, **changes: Any) -> Path:
    """PSA's file, the 14B preset changed (None removes a key)."""
    data = psa_file()
    preset = data["Wan2.1_14b"]["attention_configs"]["psa_balanced"]
    preset.update(changes)
    for key in [key for key, value in preset.items() if value is None]:
        del preset[key]
    return write(folder, data)


def bare(method: Method) -> Method:
    return method.inner if isinstance(method, Schedule) else method


def load_14b(path: Path) -> Preset:
    return load_preset("psa_balanced", "wan-t2v-14b", path)


# What comes with the package


def late_budget(preset: Preset, site: Site) -> float | None:
    """What is asked of one call, where budgets fall along a run that costs the nominal cost."""
    assert isinstance(preset.method, Schedule)
    assert preset.method.curve == Curve(preset.nominal_cost or 0)
    return preset.method.at(site).mean_budget


@pytest.mark.parametrize("preset", presets(), ids=lambda p: f"{p.model}-{p.name}")
def test_every_shipped_preset_runs_at_its_nominal_cost(preset: Preset) -> None:
    torch.manual_seed(0)
    grid = TokenGrid.video(9, 16, 16) if "flux" not in str(preset.model) else TokenGrid.flat(2304)
    q, k, v = (torch.randn(1, 2, grid.tokens, 16) for _ in range(3))
    late = Site(step=40, steps=50, layer=3, layers=30)
    done = attend(q, k, v, method=preset.method, grid=grid, site=late)
    assert done.out.isfinite().all()
    if isinstance(preset.method, Dense):
        assert done.plan is None
        assert preset.nominal_cost == 1
        return
    assert done.plan is not None
    asked = preset.nominal_cost if preset.method.total is None else late_budget(preset, late)
    if asked is None:  # cumulative importance: spread out in random data
        assert 0.1 < done.plan.cost < 1
    else:
        # Shares are of whole blocks; own and first-frame blocks may come on top.
        rounding = 1 / done.plan.layout.N
        assert asked - rounding < done.plan.cost < asked + 0.3
    first = attend(q, k, v, method=preset.method, grid=grid, site=Site(0, 50, 3, 30))
    assert (first.plan is None) == (preset.name != "psa_4steps")


def test_every_model_has_the_recommended_ones() -> None:
    for model in {preset.model for preset in presets()}:
        names = [preset.name for preset in presets(model)]
        assert len(set(names)) == len(names)
        assert {"baseline", "entropy_balanced", "rf_v2_balanced", "ada_bsa_balanced"} <= set(names)
    assert bare(load_preset("rf_v2_balanced", "wan-t2v-1.3b").method) == RfV2(sparsity=0.8)
    assert bare(load_preset("rf_v2_balanced", "flux.1-dev").method) == RfV2(sparsity=0.6)
    assert load_preset("entropy-balanced").method == Schedule(Entropy(), curve=Curve(0.5))
    assert load_preset("rd_balanced").method == Schedule(RateDistortion(), curve=Curve(0.5))
    assert load_preset("entropy_balanced").model is None
    assert load_preset("psa_4steps").model == "cogvideox-5b"


def test_esa_is_what_esa_publishes_for_every_model() -> None:
    """Every option is written out in the files: none follows a default of this package."""
    published = Entropy(
        Budget(0.5, floor=0.05, ceiling=1.0), sharpness=1.0, samples=4, seed=None, q_block=256,
        k_block=128, order=Raster(), tail=False, means=None,
    )  # fmt: skip
    expected = Schedule(published, dense_steps=0.2, dense_layers=(0,))
    for model in {preset.model for preset in presets()}:
        assert load_preset("esa", model).method == expected
    for kind in ("video", "image"):
        file = resources.files("jali.presets") / "data" / f"{kind}.yaml"
        written = yaml.safe_load(file.read_text(encoding="utf-8"))["presets"]["esa"]
        assert set(written["options"]) == {each.name for each in fields(Entropy)}


@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r[0]}-{r[1]}")
def test_the_shipped_psa_presets_are_those_of_psas_file(row: Any, tmp_path: Path) -> None:
    section, name, mode, bounds, n, cap, rearrange, warmup, density = row
    path = write(tmp_path, psa_file())
    loaded, shipped = load_preset(name, section, path), load_preset(name, section)
    assert loaded.method == shipped.method
    assert loaded.model == shipped.model == MODELS[section]
    assert loaded.tile_n == shipped.tile_n == 32
    method = bare(loaded.method)
    assert isinstance(method, Psa)
    assert method.mode == {"thr": "thresholdbound", "topk": "topk"}[mode]
    assert tuple(method.ranges[r][1] for r in (1, 2, 4, 8)) == bounds
    assert (method.q_block, method.k_block) == (128, n)
    assert method.order == (Gilbert() if rearrange else Raster())
    assert method.similarity == ((0.7, 0.65, 0.6) if cap else None)
    assert isinstance(loaded.method, Schedule) == (warmup > 0)
    assert not warmup or loaded.method.dense_steps == warmup
    assert loaded.nominal_cost == (None if density is None else pytest.approx(density))


def test_the_presets_travel_in_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    shipped = [Path(name).stem for name in names if name.startswith("jali/presets/data/")]
    assert {str(preset.model) for preset in presets()} <= set(shipped)


# Names


def test_models_by_any_of_their_names() -> None:
    for section, model in MODELS.items():
        assert resolve_model(section) == resolve_model(section.upper()) == model
    for old, model in [("wan21_1.3b", "wan-t2v-1.3b"), ("cogvideo1.5_5b", "cogvideox1.5-5b")]:
        assert resolve_model(old) == model
    with pytest.raises(ValueError, match=r"'wan-t2v-1\.3'; did you mean 'wan-t2v-1\.3b'"):
        resolve_model("wan-t2v-1.3")


def test_wrong_names_suggest_near_ones(tmp_path: Path) -> None:
    path = write(tmp_path, psa_file())
    with pytest.raises(ValueError, match="'psa_balance'; did you mean 'psa_balanced'"):
        load_preset("psa_balance", "wan-t2v-14b")
    with pytest.raises(ValueError, match="'psa_balance'; did you mean 'psa_balanced'"):
        load_preset("psa_balance", "wan-t2v-14b", path)
    with pytest.raises(ValueError, match=r"'baselin'; did you mean 'baseline'"):
        load_preset("baselin")
    with pytest.raises(ValueError, match=r"'baselin'; did you mean 'baseline'"):
        load_preset("baselin", config=path)
    with pytest.raises(ValueError, match="differs between models, so name one of: cogvideox-5b"):
        load_preset("psa_balanced")
    with pytest.raises(ValueError, match=r"several models, so name one of: Wan2\.1_14b"):
        load_preset("psa_balanced", config=path)
    with pytest.raises(ValueError, match="has no model 'hunyuan-video'"):
        load_preset("psa_balanced", "hunyuan-video", path)
    with pytest.raises(ValueError, match="name a preset, or a model"):
        load_preset(None)
    with pytest.raises(FileNotFoundError, match="no preset file"):
        load_preset("baseline", config=tmp_path / "none.yaml")


def test_a_model_without_a_name_takes_its_default(tmp_path: Path) -> None:
    assert load_preset(None, "wan-t2v-1.3b").name == "psa_balanced"
    assert load_preset(None, "flux.1-dev").name == "rd_balanced"
    assert load_preset(None, "CogVideo_5b", write(tmp_path, psa_file())).name == "psa_balanced"
    with pytest.raises(ValueError, match="has no default preset, name one of my_custom_preset"):
        load_preset(None, config=write(tmp_path, CUSTOM))


# PSA's file


def test_the_custom_preset_of_psas_readme_loads_and_runs(tmp_path: Path) -> None:
    preset = load_preset("my_custom_preset", "cogvideox-5b", write(tmp_path, CUSTOM))
    assert preset.method == Schedule(
        Psa(
            {1: (0.0, 0.5), 2: (0.5, 0.7), 4: (0.7, 0.9), 0: (0.9, 1.0)},
            mode="thresholdbound",
            k_block=64,
        ),
        dense_steps=10,
    )
    assert preset.text_length is None
    assert preset.tile_n == 32
    assert "use_sim_mask is not given: off" in preset.notes[0]
    torch.manual_seed(0)
    grid = TokenGrid.video(4, 12, 13, text=20)
    q, k, v = (torch.randn(1, 2, grid.tokens, 16) for _ in range(3))
    done = attend(q, k, v, method=preset.method, grid=grid, site=Site(20, 50, 0, 1))
    assert done.out.isfinite().all()
    assert done.plan is not None
    assert done.plan.ratios == (1, 2, 4)


def test_what_a_file_leaves_out_is_as_psas_loader_has_it(tmp_path: Path) -> None:
    keys = ("block_size", "mask_mode", "attn_impl", "tile_size", "warmup_steps", "use_sim_mask")
    keys += ("rearrange_method", "verbose", "sim_thresholds", "use_rearrange", "description")
    preset = load_14b(edited(tmp_path, **dict.fromkeys(keys)))
    ranges = load_14b(edited(tmp_path)).method.inner.ranges  # type: ignore[attr-defined]
    assert preset.method == Psa(ranges, mode="thresholdbound", q_block=128, k_block=128)
    assert preset.tile_n == 32
    assert preset.notes


def test_orders(tmp_path: Path) -> None:
    def order(**changes: Any) -> Any:
        return bare(load_14b(edited(tmp_path, **changes)).method).token_order

    assert order() == Gilbert()
    assert order(use_rearrange=False) == Raster()
    assert order(rearrange_method="STA", tile_size=[2, 4, 4]) == Tiled((2, 4, 4))
    assert order(rearrange_method="STA", tile_size=None) == Tiled((2, 8, 8))
    for name in ("SemanticAware", "Hybrid"):
        with pytest.raises(ValueError, match=r"rearrange_method is '\w+', which sorts .* k-means"):
            order(rearrange_method=name)
    with pytest.raises(ValueError, match="must be Gilbert or STA, got 'Hilbert'"):
        order(rearrange_method="Hilbert")


def test_similarity_thresholds_nested_and_flat(tmp_path: Path) -> None:
    def cap(**changes: Any) -> Any:
        method = bare(load_14b(edited(tmp_path, **changes)).method)
        assert isinstance(method, Psa)
        return method.similarity

    assert cap() is None
    assert cap(use_sim_mask=True) == (0.7, 0.65, 0.6)
    assert cap(use_sim_mask=True, sim_4x_threshold=0.5) == (0.7, 0.5, 0.6)
    assert cap(use_sim_mask=True, sim_thresholds=None) == (0.0, 0.0, -1.0)
    assert cap(use_sim_mask=None) is None


def test_warm_up_is_a_count_or_a_share(tmp_path: Path) -> None:
    def steps(value: Any) -> Any:
        method = load_14b(edited(tmp_path, warmup_steps=value)).method
        return method.dense_steps if isinstance(method, Schedule) else None

    assert steps(15) == 15
    assert steps(0.3) == pytest.approx(0.3)
    assert isinstance(steps(0.3), float)
    assert steps(0) is None
    with pytest.raises(ValueError, match=r"psa_balanced\.warmup_steps: .* got -1"):
        steps(-1)


def test_mask_modes(tmp_path: Path) -> None:
    for name in ("topk", "thresholdbound"):
        for suffix in ("", "_newtype"):
            method = bare(load_14b(edited(tmp_path, mask_mode=name + suffix)).method)
            assert isinstance(method, Psa)
            assert method.mode == name
    with pytest.raises(ValueError, match=r"mask_mode must be one of topk, .*, got 'energybound'"):
        load_14b(edited(tmp_path, mask_mode="energybound"))


SKELETON = """
ModelName:
  default_attention: psa_balanced    # Default preset to use
  video_scale:                       # Video dimension divisors
    width_divisor: 16
    height_divisor: 16
    depth_divisor: 4
  text_length: 226                   # Text token length (model-specific)
  attention_configs:
    preset_name:                     # e.g., psa_balanced, psa_4steps, baseline
      type: psa                      # "psa" for sparse attention, "dense" for baseline
      description: "..."
"""


def test_the_skeleton_of_psas_readme_has_psas_own_levels(tmp_path: Path) -> None:
    path = write(tmp_path, SKELETON)
    preset = load_preset("preset_name", "ModelName", path)
    levels = {1: (0.0, 0.05), 2: (0.05, 0.15), 4: (0.15, 0.25), 8: (0.25, 0.5), 0: (0.5, 1.0)}
    assert preset.method == Psa(levels, "thresholdbound", q_block=128, k_block=128)
    assert [note.split()[0] for note in preset.notes] == ["use_sim_mask", "mask_ratios"]
    # PSA refuses the default only when it is asked for.
    with pytest.raises(
        ValueError, match=r"has no preset 'psa_balanced' \(its default\); known: pre"
    ):
        load_preset(None, "ModelName", path)


def test_levels_of_a_file_are_aligned_where_it_says_so(tmp_path: Path) -> None:
    found = bare(load_14b(edited(tmp_path, aligned=True)).method)
    assert isinstance(found, Psa)
    assert found.aligned
    assert not bare(load_14b(edited(tmp_path)).method).aligned  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"tile_n must be 32 where aligned is true, got 64"):
        load_14b(edited(tmp_path, aligned=True, block_size={"m": 128, "n": 128, "tile_n": 64}))


def test_a_type_is_of_any_case(tmp_path: Path) -> None:
    assert load_14b(edited(tmp_path, type="PSA")).method == load_14b(edited(tmp_path)).method
    assert load_14b(edited(tmp_path, type="Dense")).method == Dense()


def test_the_other_reading_of_the_ranges(tmp_path: Path) -> None:
    method = bare(load_14b(edited(tmp_path, axis="step")).method)
    assert isinstance(method, Psa)
    assert method.axis == "step"


WHERE = "Wan2.1_14b.attention_configs.psa_balanced"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"use_rearange": True}, "has no key 'use_rearange'; did you mean 'use_rearrange'?"),
    ({"block_size": {"m": 128, "n": "128"}}, ".block_size.n must be an int, got '128'"),
    ({"block_size": {"m": 128, "k": 64}}, ".block_size has no key 'k'; known: m, n, tile_n"),
    ({"block_size": 128}, ".block_size must be a mapping"),
    ({"use_sim_mask": "yes"}, ".use_sim_mask must be true or false, got 'yes'"),
    ({"mask_ratios": {}}, "mask_ratios is empty"),
    ({"mask_ratios": {1: [0.0]}}, ".mask_ratios.1 must be a list of 2"),
    ({"mask_ratios": {1: [0.0, "x"]}}, ".mask_ratios.1[1] must be a finite number, got 'x'"),
    ({"mask_ratios": {1: [0.0, 0.4], 2: [0.5, 0.6]}}, "starts at 0.5, but the level before it"),
    ({"mask_ratios": {3: [0.0, 0.4]}}, "mask_ratios has keys 1, 2, 4, 8 and 0"),
    ({"block_size": {"m": 128, "n": 4}}, "key blocks of 4 cannot be pooled 8×"),
    ({"sim_thresholds": {"x3": 0.7}}, ".sim_thresholds has no key 'x3'"),
    ({"type": "sparse"}, ".type must be one of psa, dense, got 'sparse'"),
    ({"attn_impl": "triton"}, ".attn_impl must be one of new_mask_type, old_mask_type"),
    ({"warmup_steps": "15"}, ".warmup_steps must be a finite number, got '15'"),
    ({"text_length": -1}, ".text_length must be a count >= 0, got -1"),
    ({"tile_size": [2, 8]}, ".tile_size must be a list of 3"),
    ({"verbose": 1}, ".verbose must be true or false"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_values_are_named_with_their_place(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_14b(edited(tmp_path, **changes))
    assert str(caught.value).startswith(WHERE)
    assert str(caught.value).count(WHERE) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no models"),
        ("- a\n- b", "it holds no models"),
        ("a: [", "is not a preset file"),
        ("a: {attention_configs: {}}\na: {attention_configs: {}}", "line 2: the key 'a' is given"),
        ("some: {thing: 1}", "neither jali's format"),
        ("M: {attention_configs: {}, video_scal: {}}", "M has no key 'video_scal'; did you mean"),
        ("M: {attention_configs: {}, video_scale: {width_divisor: 16}}", "needs the key 'height"),
        ("presets: {a: {method: entropie}}", ".presets.a.method is unknown: 'entropie'; did you"),
        ("model: m\npresets: {a: {method: psa, options: {n: 1}}}", "m.presets.a.options has no"),
        (
            "model: m\npresets: {a: {method: rf_v2, options: {sparsity: 2}}}",
            "m.presets.a.options: sparsity must be in [0, 1], got 2",
        ),
        (
            "model: m\npresets: {a: {method: rf_v2, options: {compat: 1}}}",
            "m.presets.a.options.compat must be true or false, got 1",
        ),
        (
            "model: m\npresets: {a: {method: dense, schedule: {warmup: 1}}}",
            "m.presets.a.schedule has no key 'warmup'",
        ),
    ],
)
def test_wrong_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_file(write(tmp_path, text))


def test_the_grid_of_a_run_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path, psa_file())
    for section, (_, text, size, box) in GEOMETRY.items():
        preset = load_preset("psa_balanced", section, path)
        preset.check(TokenGrid.video(*box, text=text), size)
        with pytest.raises(ValueError, match=rf"for {text} text tokens, but this run has 77"):
            preset.check(TokenGrid.video(*box, text=77))
        with pytest.raises(ValueError, match="by its video_scale, but this run has 1×2×3"):
            preset.check(TokenGrid.video(1, 2, 3, text=text), size)
    own = load_preset("psa_balanced", "cogvideox-5b")  # takes its grid from the call
    own.check(TokenGrid.video(1, 2, 3), (1, 16, 16))


# jali's own format


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        """
presets:
  soft:
    description: Mine.
    method: entropy
    options: {budget: {mean: 0.3, ceiling: 0.9}, order: {tiled: [2, 4, 4]}, q_block: 64}
    schedule: {dense_steps: 0.1, dense_layers: [0, -1], min_tokens: 1000}
"""
    )
    preset = load_preset("soft", "wan-t2v-14b", path)
    assert preset.method == Schedule(
        Entropy(Budget(0.3, ceiling=0.9), order=Tiled((2, 4, 4)), q_block=64),
        dense_steps=0.1,
        dense_layers=(0, -1),
        min_tokens=1000,
    )
    assert preset.model is None
    assert load_preset("soft", config=path) == preset


ROUND_TRIP = [
    *(kind() for kind in METHODS.values()),
    Schedule(Entropy(Budget(0.4, 0.1, 0.8), order=Tiled((2, 4, 4))), 3, 0.1, (0, -1), 7),
    Schedule(Psa(similarity=(0.7, 0.6, 0.5), order=Raster()), dense_steps=1.0),
    Schedule(RfV2(), budgets=(0.5, 0.2)),
    AdaBsa(0.5, 0.9, keep_sink=False),
    Local(Budget(0.3)),
]


@pytest.mark.parametrize("method", ROUND_TRIP, ids=lambda m: str(m)[:60])
def test_methods_survive_yaml_and_json(method: Method) -> None:
    import json

    plain = write_method(method)
    for text, load in ((yaml.safe_dump(plain), yaml.safe_load), (json.dumps(plain), json.loads)):
        again = read_method(load(text), "here")
        assert again == method
        if isinstance(method, Schedule):  # 1.0 is all steps, 1 is one
            assert type(again.dense_steps) is type(method.dense_steps)  # type: ignore[attr-defined]


# A method of one's own


@dataclass(frozen=True)
class Mine(Entropy):
    """Option types that no method of the package has."""

    mode: Literal["fast", "exact", 3] = "fast"
    label: str | int = "x"
    limit: int | float | None = None
    weights: tuple[float, ...] = (0.5,)
    pair: tuple[str, bool] = ("a", True)
    levels: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    other: Budget | None = None
    orders: tuple[Order, ...] = (Raster(),)

    name: ClassVar[str] = "mine"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    monkeypatch.setitem(METHODS, "mine", Mine)
    return Mine


def test_a_method_of_ones_own_is_read_and_written(mine: type[Method], tmp_path: Path) -> None:
    several: list[Method] = [
        mine(),
        Mine(Budget(0.2), mode=3, label=7, limit=2.5, weights=(1, 0.25), pair=("b", False)),
        Mine(levels={2: (0.0, 0.5)}, other=Budget(0.3, 0.1), orders=(Gilbert(), Tiled((1, 2, 2)))),
        Schedule(Mine(order=FrameWindows()), dense_steps=0.1),
    ]
    for method in several:
        test_methods_survive_yaml_and_json(method)
    plain = {"presets": {"own": {**write_method(several[3]), "description": "Mine."}}}
    assert load_preset("own", config=write(tmp_path, plain)).method == several[3]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "slow"}, ".options.mode must be one of fast, exact, 3, got 'slow'"),
        ({"mode": True}, ".options.mode must be one of fast, exact, 3, got True"),
        ({"label": 1.5}, ".options.label must be str or int, got 1.5"),
        ({"limit": "2"}, ".options.limit must be a finite number, got '2'"),
        ({"weights": 0.5}, ".options.weights must be a list, got 0.5"),
        ({"pair": ["a"]}, ".options.pair must be a list of 2, got ['a']"),
        ({"weights": "1,2"}, ".options.weights must be a list in brackets, got '1,2'"),
        ({"pair": ["a", 1]}, ".options.pair[1] must be true or false, got 1"),
        ({"levels": {"two": [0, 1]}}, ".options.levels: the key 'two' must be an int"),
        ({"levels": {2: [0]}}, ".options.levels.2 must be a list of 2"),
        ({"other": {"floor": 0.1}}, ".options.other needs the key 'mean'"),
        ({"orders": ["spiral"]}, ".options.orders[0] must be one of raster, gilbert,"),
        ({"orders": [{"tiled": [0, 1, 1]}]}, ".options.orders[0]: window must be three sizes"),
        ({"labl": 1}, ".options has no key 'labl'; did you mean 'label'?"),
    ],
)
def test_its_wrong_options_are_named(
    mine: type[Method], option: dict[str, Any], message: str
) -> None:
    assert mine.name in METHODS
    with pytest.raises(ValueError, match=re.escape(f"here{message}")):
        read_method({"method": "mine", "options": option}, "here")


@dataclass(frozen=True)
class Strange(Entropy):
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    name: ClassVar[str] = "strange"


@dataclass(frozen=True)
class Needy(Entropy):
    taps: int = field(kw_only=True)

    name: ClassVar[str] = "needy"


@dataclass(frozen=True)
class Lost(Entropy):
    taps: Nowhere = 3  # type: ignore[name-defined]  # noqa: F821

    name: ClassVar[str] = "lost"


def test_what_has_no_plain_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Schedule inside a Schedule"):
        write_method(Schedule(Schedule(Dense())))
    with pytest.raises(ValueError, match=r"Strange\(.* is not in jali.methods.METHODS: dense,"):
        write_method(Strange())
    monkeypatch.setitem(METHODS, "strange", Strange)
    monkeypatch.setitem(METHODS, "needy", Needy)
    with pytest.raises(ValueError, match=r"Strange.device: device\(.* has no plain form"):
        write_method(Strange())
    with pytest.raises(ValueError, match=r"options.device holds a value of type .*torch.device"):
        read_method({"method": "strange", "options": {"device": "cpu"}}, "here")
    monkeypatch.setitem(METHODS, "lost", Lost)
    with pytest.raises(TypeError, match=r"Lost declares a type .* name 'Nowhere' is not defined"):
        read_method({"method": "lost", "options": {"taps": 4}}, "here")
    with pytest.raises(ValueError, match=r"here.options needs the key 'taps'"):
        read_method({"method": "needy"}, "here")
