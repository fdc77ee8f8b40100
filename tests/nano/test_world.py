"""The world nano knows: sentences, films, and the judge that reads films back."""

from __future__ import annotations

import pytest
import torch

from jali.nano import grammar
from jali.nano.grammar import understand
from training.film import film
from training.judge import Verdict, judge
from training.scene import COLOUR_NAMES, MOTION_NAMES, Scenes, held_out, prompts, sample_scenes


def frames_of(scenes: Scenes, index: int, size: int = 64, count: int = 33) -> torch.Tensor:
    clip = film(scenes[slice(index, index + 1)], count, size, size)[0]
    return ((clip.permute(1, 2, 3, 0) + 1) * 127.5).round().byte()


def test_scenes_are_the_same_for_the_same_seed() -> None:
    one, two, other = (sample_scenes(20, seed) for seed in (3, 3, 4))
    assert one.captions(1) == two.captions(1)
    assert torch.equal(one.centre, two.centre)
    assert one.captions(1) != other.captions(1)


def test_training_and_evaluation_share_no_combination() -> None:
    seen, unseen = sample_scenes(500, 1), sample_scenes(100, 2, unseen=True)
    assert not held_out(seen.colour, seen.shape, seen.motion).any()
    assert held_out(unseen.colour, unseen.shape, unseen.motion).all()
    # every word is still learned in other company
    for name, count in (("colour", 8), ("shape", 8), ("motion", 8)):
        assert len(getattr(seen, name).unique()) == count
        assert len(getattr(unseen, name).unique()) == count


def test_a_caption_says_what_the_scene_is() -> None:
    scenes = sample_scenes(200, 5)
    for i, sentence in enumerate(scenes.captions()):
        wish = understand(sentence)
        assert wish.colour == COLOUR_NAMES[scenes.colour[i]]
        assert wish.shape == grammar.SHAPES[scenes.shape[i]]
        assert wish.motion == MOTION_NAMES[scenes.motion[i]]


def test_short_captions_never_say_anything_else() -> None:
    scenes = sample_scenes(300, 6)
    for i, (sentence, said) in enumerate(scenes.told(seed=1)):
        for kind, index in said.items():
            assert index == int(getattr(scenes, kind)[i])
        assert ("background" in sentence) >= ("ground_colour" in said)
        assert len(sentence.encode()) < 160


def test_articles() -> None:
    text = " ".join(sample_scenes(300, 7).captions())
    assert " a orange" not in text
    assert " an orange" in text


def test_prompts_outside_the_grammar_are_partly_understood() -> None:
    assert understand("an astronaut rides a horse") == grammar.Wish(None, None, None)
    assert understand("A RED thing, behind it a blue ball").colour == "red"
    assert understand("a dog over a green star").shape is None


def test_a_film_is_in_range_and_any_window_of_it_is_the_same_film() -> None:
    scenes = sample_scenes(3, 8)
    whole = film(scenes, 9, 48, 48)
    assert whole.shape == (3, 3, 9, 48, 48)
    assert whole.min() >= -1
    assert whole.max() <= 1
    corner = torch.tensor([[8.0, 16.0]] * 3)
    start = torch.full((3,), 4)
    part = film(scenes, 5, 16, 16, pixels_per_unit=48, corner=corner, start=start)
    # light from a side spans the window, so only scenes without it are compared
    plain = scenes.light < 3
    expected = whole[:, :, 4:9, 16:32, 8:24]
    torch.testing.assert_close(part[plain], expected[plain], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_judge_reads_true_films(seed: int) -> None:
    scenes = sample_scenes(12, seed, unseen=True)
    right = [0, 0, 0]
    for i in range(len(scenes)):
        seen = judge(frames_of(scenes, i))
        right[0] += seen.colour == COLOUR_NAMES[scenes.colour[i]]
        right[1] += seen.shape == grammar.SHAPES[scenes.shape[i]]
        right[2] += seen.motion == MOTION_NAMES[scenes.motion[i]]
    assert right[0] == 12
    assert min(right) >= 11


def test_the_judge_sees_nothing_in_grey_and_noise_is_not_a_pass() -> None:
    assert judge(torch.full((9, 32, 32, 3), 128, dtype=torch.uint8)) == Verdict(None, None, None)
    dice = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (9, 32, 32, 3), generator=dice, dtype=torch.uint8)
    verdict = judge(noise)
    assert verdict.motion not in ("left", "right", "up", "down")


@pytest.mark.parametrize("motion", ["left", "right", "up", "down"])
def test_directions_are_those_of_the_picture(motion: str) -> None:
    """Independent of the film: a red square is moved by hand."""
    frames = torch.full((17, 48, 48, 3), 0.5)
    dx, dy = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}[motion]
    for t in range(17):
        x, y = 18 + dx * (t - 8), 18 + dy * (t - 8)
        frames[t, y : y + 12, x : x + 12] = torch.tensor([0.9, 0.1, 0.1])
    assert judge(frames) == Verdict("red", "square", motion)


def test_default_prompts_are_held_out_and_stable() -> None:
    some = prompts(8)
    assert some == prompts(8)
    assert len(set(some)) == 8
