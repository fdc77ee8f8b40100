"""The judge reads the words of the second world: texture, background, camera, light."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from training import adherence
from training.adherence import Tally, asked_of, scores, tallies, wrong
from training.judge import Clip, lesson
from training.judge.probe import TABLES, fit, load
from training.judge.view import asked_view
from training.world import words
from training.world.film import film, unit
from training.world.scene import Scenes, sample_scenes

COUNT = 12


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    """Held out; every light, many views, and all sorts of textures and backgrounds."""
    scenes = sample_scenes(COUNT, 43, unseen=True)
    scenes.light[:] = torch.arange(COUNT) % len(words.LIGHTS)
    return scenes


@pytest.fixture(scope="module")
def clips(scenes: Scenes) -> list[torch.Tensor]:
    """As files hold them: uint8 [F, H, W, 3]."""
    made = [film(scenes[slice(i, i + 1)], 17, 128, 128)[0] for i in range(COUNT)]
    return [((clip.permute(1, 2, 3, 0) + 1) * 127.5).round().byte() for clip in made]


def test_true_films_are_read_back(scenes: Scenes, clips: list[torch.Tensor]) -> None:
    """The first half of films; whole ones are measured (`benchmarks/results/nano-judge.json`)."""
    right = dict.fromkeys(("texture", "ground", "view", "light"), 0)
    for i, frames in enumerate(clips):
        clip = Clip(frames)
        colour = words.COLOUR_NAMES[scenes.colour[i]]
        right["texture"] += clip.texture(colour) == words.TEXTURES[scenes.texture[i]]
        right["ground"] += clip.ground == words.GROUNDS[scenes.ground[i]]
        right["view"] += clip.view == asked_view(words.VIEWS[scenes.view[i]])
        right["light"] += clip.light == words.LIGHTS[scenes.light[i]]
    assert min(right.values()) >= COUNT - 1, right


def test_floats_are_read_as_bytes_are(clips: list[torch.Tensor]) -> None:
    one, two = Clip(clips[0]), Clip(clips[0].float() / 255)
    for name in ("verdict", "things", "ground", "view", "light"):
        assert getattr(one, name) == getattr(two, name)


@pytest.mark.parametrize(("high", "wide", "frames"), [(32, 48, 9), (40, 24, 5), (16, 16, 1)])
def test_nothing_is_read_from_nothing(high: int, wide: int, frames: int) -> None:
    grey = Clip(torch.full((frames, high, wide, 3), 128, dtype=torch.uint8))
    assert grey.texture("red") is None
    assert (grey.ground, grey.light, grey.things) == ("plain", "", 0)
    assert grey.view in ("still", None)
    red = Clip(torch.tensor([0.9, 0.1, 0.1]).expand(frames, high, wide, 3))
    assert (red.view, red.ground, red.things) == (None, None, 1)
    noise = torch.rand(frames, high, wide, 3, generator=torch.Generator().manual_seed(0))
    for colour in words.COLOUR_NAMES:
        assert Clip(noise).texture(colour) in (None, *words.TEXTURES)
    assert Clip(noise).ground in (None, *words.GROUNDS)


@pytest.mark.parametrize("way", ["left", "right", "up", "down", "in", "out"])
def test_directions_are_those_of_the_picture(way: str) -> None:
    """Independent of the film: a blurred carpet of noise is moved by hand."""
    dice = torch.Generator().manual_seed(1)
    carpet = torch.nn.functional.interpolate(
        torch.rand(1, 1, 24, 24, generator=dice), (192, 192), mode="bicubic"
    )
    axis = {"left": (1, 0), "right": (-1, 0), "up": (0, 1), "down": (0, -1)}.get(way, (0, 0))
    frames = []
    for t in torch.arange(17) / unit(17):
        grow = torch.exp(t * {"in": -0.45, "out": 0.45}.get(way, 0.0))
        line = torch.linspace(-0.3, 0.3, 64) * grow
        y, x = torch.meshgrid(line, line, indexing="ij")
        # A height of the picture is 0.6 here.
        grid = torch.stack((x + 0.6 * 0.3 * t * axis[0], y + 0.6 * 0.3 * t * axis[1]), -1)
        frames.append(torch.nn.functional.grid_sample(carpet, grid[None], align_corners=False))
    grey = 0.3 + 0.4 * torch.cat(frames)[:, 0, :, :, None].expand(-1, -1, -1, 3)
    assert Clip(grey).view == way


def test_a_camera_moves_the_background_the_other_way() -> None:
    said = {view: asked_view(view) for view in words.VIEWS}
    assert said[""] == "still"
    assert said["the background drifts left"] == said["the camera pans right"] == "left"
    assert said["the background drifts down"] == said["the camera pans up"] == "down"
    assert (said["the camera zooms in"], said["the camera zooms out"]) == ("in", "out")


def test_the_probes_are_those_of_the_lesson() -> None:
    """A shorter lesson teaches nearly the same, and the shipped probes pass it."""
    learned = lesson.lessons(60)
    for name, (features, answers) in learned.items():
        known = load(name, torch.device("cpu"))
        assert known.weight.shape == (2 * features.shape[1] + 1, len(TABLES[name]))
        right = known.scores(features).argmax(1) == answers
        assert float(right.float().mean()) > 0.95, name
        shuffled = answers[torch.randperm(len(answers))]
        assert float((known.scores(features).argmax(1) == shuffled).float().mean()) < 0.5
        again = fit(features, answers, len(TABLES[name])).scores(features).argmax(1) == answers
        assert float(again.float().mean()) > 0.95, name


def test_only_what_is_named_is_asked() -> None:
    asked = asked_of("a small red ball grows quickly over a grey background")
    assert [asked[a] for a in adherence.DETAILS] == [None] * 5  # growing has no pace of its own
    asked = asked_of(
        "a large blue finely dotted star moves up slowly over a navy leafy background, in front of "
        "it a red ring, the camera pans left, a shadow passes"
    )
    assert asked == {
        "colour": "blue", "shape": "star", "motion": "up", "speed": "slowly", "texture": "dotted",
        "ground": "leafy", "view": "right", "light": "a shadow passes", "things": 2,
    }  # fmt: skip


def test_rows_hold_what_was_named_and_tallies_count_it(
    scenes: Scenes, clips: list[torch.Tensor]
) -> None:
    sentences = scenes.captions()
    found = scores(sentences, clips)
    assert json.loads(json.dumps(found)) == found
    for row, sentence in zip(found["rows"], sentences, strict=True):
        named = {a for a in adherence.DETAILS if asked_of(sentence)[a] is not None}
        assert named == {a for a in adherence.DETAILS if f"asked_{a}" in row}
        assert {k.removeprefix("asked_") for k in row if k.startswith("asked_")} == {
            k.removeprefix("seen_") for k in row if k.startswith("seen_")
        }
    assert found["tallies"]["light"]["asked"] == sum(bool(i) for i in scenes.light.tolist())
    assert found["colour"] == found["tallies"]["colour"]["right"] / COUNT


def test_a_wrong_verdict_is_counted_and_named() -> None:
    row: dict[str, Any] = {"asked_texture": "dotted", "seen_texture": "dotted", "asked_view": "up",
           "seen_view": "still", "asked_things": 2, "seen_things": 3}  # fmt: skip
    assert wrong(row) == ["view: still, asked up", "things: 3, asked 2"]
    found = tallies([row])
    assert (found["texture"], found["view"], found["light"]) == (
        Tally(1, 1), Tally(0, 1), Tally(0, 0)
    )  # fmt: skip
    assert (found["no_more"].right, found["no_less"].right) == (0, 1)


def test_intervals_are_wilsons() -> None:
    """Against values of the formula that were worked out by hand."""
    assert Tally(10, 20).interval == pytest.approx((0.2993, 0.7007), abs=2e-4)
    assert Tally(0, 10).interval == pytest.approx((0.0, 0.2775), abs=2e-4)
    assert Tally(64, 64).interval == pytest.approx((0.9434, 1.0), abs=2e-4)
    assert Tally(0, 0).interval == (0.0, 1.0)
