"""Every example of the pages on presets and on coming from PSA runs, on small models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import checkpoints

from jali import presets
from jali.integration.models import pipeline as models
from jali.integration.models.lora import lora_source
from jali.integration.models.registry import model_card

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("presets.md", "coming-from-psa.md")
SAME = {"wan-t2v-14b": "wan-t2v-1.3b"}  # one small checkpoint serves both
PSA_FILE = """
CogVideo_5b:
  attention_configs:
    my_custom_preset:
      type: psa
      block_size: {m: 128, n: 64, tile_n: 32}
      mask_ratios: {1: [0.0, 0.5], 2: [0.5, 0.7], 4: [0.7, 0.9], 0: [0.9, 1.0]}
      mask_mode: thresholdbound
      warmup_steps: 10
    psa_balanced:
      mask_ratios: {1: [0.0, 1.0]}
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


EXAMPLES = [(page, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize(
    ("page", "code"), EXAMPLES, ids=[f"{p}-{i}" for i, (p, _) in enumerate(EXAMPLES)]
)
def test_examples_run(
    page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, generate = models.load_pipeline, models.generate_video

    def load_small(name: str, lora: str | None = None, **options: Any) -> Any:
        if lora is not None:
            assert lora_source(lora).file  # loading one is tested elsewhere
        card = model_card(name)
        folder = checkpoints.save(SAME.get(card.name, card.name), tmp_path / card.name)
        pipe = load(name, path=folder, device="cpu", **options)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate_small(pipe: Any, prompt: str, model_name: str, **options: Any) -> torch.Tensor:
        small = {"height": 16, "width": 32, "num_frames": 9, "max_sequence_length": 16}
        steps = min(options.pop("steps", 2), 4)
        return generate(pipe, prompt, model_name, steps=steps, **(options | small))

    monkeypatch.setattr(models, "load_pipeline", load_small)
    monkeypatch.setattr(models, "generate_video", generate_small)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attention_config.yaml").write_text(PSA_FILE)
    (tmp_path / "mine.yaml").write_text(blocks("presets.md", "yaml")[0])
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    if "video" in names:
        assert names["video"].shape == (9, 16, 32, 3)


def test_the_table_of_presets_is_the_packages() -> None:
    text = (DOCS / "presets.md").read_text()
    table = text.split("<!-- presets -->")[1].split("<!-- /presets -->")[0]
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.split("\n")[3:-1]
    ]
    expected = [
        [
            str(preset.model),
            preset.name,
            "by the data" if preset.nominal_cost is None else f"{preset.nominal_cost:.3g}",
        ]
        for preset in presets()
    ]
    assert [[model, name, cost] for model, name, _, cost, _ in rows] == expected


@pytest.mark.parametrize("page", PAGES)
def test_pages_only_link_to_pages_that_exist(page: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
        assert (DOCS / link).exists(), link
