"""Kinds of heads, told from q and k."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from jali.evaluation.demo.heads import make_heads
from jali.nano import folder
from jali.planning.site import Site
from jali.tokens.grid import Box, Text, TokenGrid
from training.head_kind import heads_of, main

HERE = Site(0, 1, 0, 1)


def test_made_up_heads_are_what_they_were_made_to_be() -> None:
    made = make_heads((6, 12, 16))
    heads = heads_of(made.q, made.k, made.grid, HERE, 64**-0.5)
    kinds = dict(zip(made.kinds, heads, strict=True))
    for name in ("local", "temporal", "frame"):
        assert kinds[name].kind == name, kinds[name]
    assert kinds["diffuse"].kind == "global"
    assert kinds["diffuse"].entropy > kinds["local"].entropy


def test_even_attention_has_entropy_and_distance_one() -> None:
    grid = TokenGrid((Text(5), Box(3, 4, 6)))
    q, k = torch.zeros(1, 2, 77, 8), torch.randn(1, 1, 77, 8)
    for head in heads_of(q, k, grid, HERE, 1.0):
        assert head.entropy == pytest.approx(1, abs=1e-5)
        assert head.distance == pytest.approx((1, 1, 1), abs=1e-4)
        assert head.kind == "global"


def test_a_head_that_sees_itself_only() -> None:
    grid = TokenGrid((Box(2, 4, 4), Text(3)))
    eye = torch.eye(35)[None, None] * 100
    (head,) = heads_of(eye, eye, grid, HERE, 1.0)
    assert head.entropy == pytest.approx(0, abs=1e-5)
    assert head.distance == pytest.approx((0, 0, 0), abs=1e-5)
    assert head.kind == "local"


def test_an_image_is_near_in_time() -> None:
    q = torch.zeros(1, 1, 30, 4)
    (head,) = heads_of(q, q, TokenGrid((Box(1, 5, 6),)), HERE, 1.0)
    assert head.distance[0] == 0
    assert head.kind == "frame"


def test_text_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="no such grid"):
        heads_of(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), TokenGrid((Text(4),)), HERE, 1.0)


def test_a_model_in_a_folder_at_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "heads.json"
    arguments = ["--weights", str(folder()), "--size", "32", "48", "9", "--steps", "2"]
    given = ["head_kind", *arguments, "--look-at", "0", "--output", str(made)]
    monkeypatch.setattr(sys, "argv", given)
    main()
    told = json.loads(made.read_text("utf-8"))
    assert (told["size"], told["steps"]) == ([32, 48, 9], 2)
    places = {(r["step"], r["layer"], r["head"]) for r in told["rows"]}
    assert places == {(0, layer, head) for layer in range(8) for head in range(4)}
    assert {r["kind"] for r in told["rows"]} <= {"local", "temporal", "frame", "global"}


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "heads.json"
    given = ["head_kind", "--weights", str(tmp_path / "none"), "--output", str(made)]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert not made.exists()
