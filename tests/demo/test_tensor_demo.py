"""`jali demo --tensors`: the made-up layer, its comparison, its files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jali.evaluation.demo import HEAD_KINDS, compare_methods, make_heads
from jali.evaluation.inspection.plan_picture import footprint
from jali.methods import METHODS

Jali = Callable[..., Any]
SHAPE = (4, 16, 16)


def test_made_up_heads_are_decided_by_their_seed() -> None:
    one, same, other = (make_heads(SHAPE, seed=seed) for seed in (1, 1, 2))
    assert one.q.shape == one.k.shape == one.v.shape == (1, 6, 1024, 64)
    assert one.kinds == tuple(kind.name for kind in HEAD_KINDS)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))


def test_heads_look_where_their_kind_says() -> None:
    """Shares of exact attention: near in space, on one's own frame, on the sink."""
    made = make_heads(SHAPE)
    attention = torch.softmax(made.q[0] @ made.k[0].mT / 8, dim=-1)
    frame = torch.arange(1024) // 256
    own = frame[:, None] == frame
    kinds = {kind: attention[i] for i, kind in enumerate(made.kinds)}
    on_frame = {kind: float((a * own).sum(-1).mean()) for kind, a in kinds.items()}
    on_sink = {kind: float(a[:, :48].sum(-1).mean()) for kind, a in kinds.items()}
    assert max(on_frame, key=on_frame.__getitem__) == "frame"
    assert max(on_sink, key=on_sink.__getitem__) == "sink"
    entropy = {
        kind: float(-(a * a.clamp_min(1e-30).log()).sum(-1).mean()) for kind, a in kinds.items()
    }
    assert entropy["local"] < entropy["temporal"] < entropy["diffuse"]


def test_a_comparison_has_every_method() -> None:
    made = make_heads(SHAPE)
    found = compare_methods(made, 0.5, repeats=1)
    assert {row.method for row in found.rows} == set(METHODS) - {"dense"}
    errors = {row.method: row.error for row in found.rows}
    assert errors["psa"] < errors["random"]
    for row in found.rows:
        assert row.budget == 0.5
        assert 0 < row.cost <= 1
        assert row.seconds >= row.planning >= 0
        assert row.speed_up == pytest.approx(found.dense_seconds / row.seconds)
    read, own = footprint(found.plans["psa"], 0, 1)
    assert read.shape == own.shape == SHAPE
    assert own.sum() == found.plans["psa"].blocks.q
    assert read[own].min() == 1  # its own tokens are read in full
    with pytest.raises(ValueError, match="above 0"):
        compare_methods(made, 0.0)


def test_the_command(jali: Jali, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from jali.evaluation.demo import tensors

    monkeypatch.setattr(tensors, "QUICK", (2, 8, 16))
    folder = tmp_path / "out"
    done = jali("demo", "--tensors", "--quick", "--output-dir", folder)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.rstrip().replace("\n", "").endswith("index.html")
    for name in set(METHODS) - {"dense"}:
        assert name in done.stdout
        assert (folder / f"plan-{name}.png").stat().st_size > 1000
    told = json.loads((folder / "demo.json").read_text())
    assert told["budget"] == 0.25
    assert told["tokens"] == 256
    assert sorted(path.name for path in folder.iterdir()) == told["files"]
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    # Another one takes its place, pictures included; stdout is JSON and nothing else.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = jali("demo", "--tensors", "--quick", "--json", "--budget=0.5", "--output-dir", folder)
    assert json.loads(done.stdout) == json.loads((folder / "demo.json").read_text())
    assert json.loads(done.stdout)["budget"] == 0.5
    assert [path.name for path in folder.iterdir()] == ["demo.json"]


def test_without_matplotlib(jali: Jali, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jali.evaluation.demo import tensors

    monkeypatch.setattr(tensors, "QUICK", (2, 8, 16))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = jali("demo", "--tensors", "--quick", "--output-dir", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "jali[report]" in done.stdout.replace("\n", "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["demo.json"]
