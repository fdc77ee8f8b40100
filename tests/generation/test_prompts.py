"""Shipped prompts, and prompt files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from jali.generation.prompts import default_prompts, parse, read_prompts
from jali.integration.models.registry import MODELS


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_prompts_of_its_own_kind(model: str) -> None:
    prompts = default_prompts(model)
    assert len(set(prompts)) == len(prompts) >= 16
    assert all(20 < len(prompt) < 300 for prompt in prompts)
    assert default_prompts(model) == prompts
    if model == "nano":
        from jali.nano.grammar import understand

        wishes = [understand(prompt) for prompt in prompts]
        assert all(wish.colour and wish.shape and wish.motion for wish in wishes)


def test_videos_move_and_images_do_not_share_their_prompts() -> None:
    assert not set(default_prompts("wan-t2v-1.3b")) & set(default_prompts("flux.1-dev"))
    assert default_prompts("Wan2.1_1.3b") == default_prompts("wan-t2v-1.3b")


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("# mine\n\n  a cat  \na dog # with a collar\n", encoding="utf-8")
    assert read_prompts(file) == ("a cat", "a dog # with a collar")
    assert parse("") == ()
    for content, words in ((b"# only\n", "holds no prompts"), (b"\xff\xfe\x00", "as a text file")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_prompts(file)
    with pytest.raises(ValueError, match="there is no prompt file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="as a text file"):
        read_prompts(tmp_path)
