"""The second world: sentences are read back, textures stick, things are counted."""

from __future__ import annotations

import pytest
import torch

from jali.generation.prompts import default_prompts
from jali.nano.grammar import MOTIONS, SHAPES, understand
from training.judge import count_things, judge, speed
from training.latents import LONGEST
from training.world import words
from training.world.film import film, surface, unit
from training.world.scene import Scenes, held_out, prompts, sample_scenes
from training.world.sentence import asked_objects, read
from training.world.words import KINDS


def changed(scenes: Scenes, **values: torch.Tensor | float) -> Scenes:
    """The same scenes with some of their numbers replaced."""
    for name, value in values.items():
        getattr(scenes, name)[:] = value
    return scenes


def test_scenes_are_the_same_for_the_same_seed_and_films_too() -> None:
    one, two, other = (sample_scenes(20, seed) for seed in (3, 3, 4))
    assert one.captions(1) == two.captions(1) != other.captions(1)
    assert torch.equal(film(one[:2], 2, 16, 16), film(two[:2], 2, 16, 16))
    assert not torch.equal(film(one[:2], 2, 16, 16), film(other[:2], 2, 16, 16))


def test_training_and_evaluation_share_no_combination() -> None:
    seen, unseen = sample_scenes(500, 1), sample_scenes(100, 2, unseen=True)
    assert not held_out(seen.colour, seen.shape, seen.motion).any()
    assert held_out(unseen.colour, unseen.shape, unseen.motion).all()
    for kind, table in KINDS.items():  # every word is learned
        some = getattr(seen, kind)
        assert set(range(len(table))) == set(some[some >= 0].tolist()), kind


@pytest.mark.parametrize("seed", [None, 1])
def test_a_sentence_is_read_back(seed: int | None) -> None:
    """All that is said is true; without a seed all that is true is said."""
    scenes = sample_scenes(400, 6, aspect=5 / 3)
    for i, sentence in enumerate(scenes.captions(seed)):
        said = read(sentence)
        for kind, table in KINDS.items():
            true = int(getattr(scenes, kind)[i])
            there = kind.partition("_")[0] not in ("behind", "front") or (
                int(getattr(scenes, kind.partition("_")[0] + "_colour")[i]) >= 0
            )
            silent = not there or table[true] in ("", "plain")
            if kind in said or (seed is None and not silent):
                assert said.get(kind) == true, (sentence, kind)
        # an object that is there is always told, or the model would learn to add some
        assert asked_objects(sentence) == int(scenes.objects()[i])


def test_old_words_keep_their_meaning() -> None:
    sentence = "a large red striped ball moves right over a grey cloudy background, it gets darker"
    said = read(sentence)
    assert {kind: KINDS[kind][i] for kind, i in said.items()} == {
        "size": "large", "colour": "red", "texture": "striped", "shape": "ball",
        "motion": "moves right", "ground_colour": "grey", "ground": "cloudy",
        "light": "it gets darker",
    }  # fmt: skip
    for sentence in sample_scenes(100, 5).captions():
        wish, said = understand(sentence), read(sentence)
        assert (wish.colour, wish.shape) == (
            words.COLOUR_NAMES[said["colour"]],
            SHAPES[said["shape"]],
        )
        assert wish.motion == list(MOTIONS)[said["motion"]]


def test_no_sentence_outgrows_its_buffer() -> None:
    longest = {kind: max(map(len, table)) for kind, table in KINDS.items()}
    main = 2 + sum(longest[k] + 1 for k in ("size", "fine", "texture", "motion", "speed"))
    main += 2 + longest["colour"] + longest["shape"] + 1
    ground = len(" over an ") + longest["ground_colour"] + longest["ground"] + len("  background")
    thing = len(" an  ") + longest["colour"] + longest["shape"]
    clauses = sorted(
        (thing + len(", behind it"), thing + len(", in front of it"), longest["view"] + 2,
         longest["light"] + 2)
    )  # fmt: skip
    assert main + ground + sum(clauses[-2:]) < LONGEST  # and scenes have two of them at most
    scenes = sample_scenes(3000, 7)
    extra = scenes.objects() - 1 + (scenes.view > 0) + (scenes.light > 0)
    assert int(extra.max()) == 2


def test_any_window_of_a_film_is_the_same_film() -> None:
    scenes = sample_scenes(24, 8)
    whole = film(scenes, 9, 48, 48)
    assert whole.shape == (24, 3, 9, 48, 48)
    assert -1 <= whole.min() < whole.max() <= 1
    corner, start = torch.tensor([[8.0, 16.0]] * 24), torch.full((24,), 4)
    part = film(scenes, 5, 16, 16, pixels_per_unit=48, corner=corner, start=start)
    torch.testing.assert_close(part, whole[:, :, 4:9, 16:32, 8:24], atol=2e-4, rtol=0)


def test_things_are_round_at_every_aspect() -> None:
    for aspect in (1.0, 5 / 3):
        scenes = changed(
            sample_scenes(1, 3, aspect), shape=0, texture=0, motion=7, velocity=0.0, growth=0.0,
            behind_colour=-1, front_colour=-1, light=0, ground=0, colour=0, ground_colour=0,
            centre=torch.tensor([aspect / 2, 0.5]),
        )  # fmt: skip
        clip = film(scenes, 1, 60, int(60 * aspect))[0, :, 0]
        red = clip[0] - clip[1] > 0.8
        assert abs(int(red.any(0).sum()) - int(red.any(1).sum())) <= 1


@pytest.mark.parametrize("motion", ["right", "grows", "spins"])
@pytest.mark.parametrize(
    "texture", [i for i, t in enumerate(words.TEXTURES) if t not in ("plain", "shiny")]
)
def test_a_texture_sticks_to_its_surface(texture: int, motion: str) -> None:
    """What is seen at a point of the surface in the first frame is seen there in a later one."""
    speeds = {"velocity": 0.0, "growth": 0.0, "spin": 0.0}
    how: dict[str, torch.Tensor | float] = {
        "right": {"velocity": torch.tensor([0.3, 0.0])}, "grows": {"growth": 0.5},
        "spins": {"spin": 1.0},
    }[motion]  # fmt: skip
    scenes = changed(
        sample_scenes(1, 11), shape=1, texture=texture, light=0, behind_colour=-1, front_colour=-1,
        centre=torch.tensor([0.35, 0.5]), radius=0.25, colour=5, **(speeds | how),
    )  # fmt: skip
    size = 192
    moments = [film(scenes, 1, size, size, start=torch.tensor([start])) for start in (0, 16)]
    clip = torch.cat(moments, 2)
    line = (torch.arange(size) + 0.5) / size
    x, y, t = line.view(1, 1, 1, -1), line.view(1, 1, -1, 1), torch.tensor(0.5).view(1, 1, 1, 1)
    u, v, _ = surface(scenes, x, y, t)
    # The same surface point at time 0.
    angle = scenes.angle.view(1, 1, 1, 1)
    px, py = u * angle.cos() - v * angle.sin(), v * angle.cos() + u * angle.sin()
    grid = torch.stack((2 * (0.35 + 0.25 * px) - 1, 2 * (0.5 + 0.25 * py) - 1), -1)[:, 0]
    before = torch.nn.functional.grid_sample(clip[:, :, 0], grid, align_corners=False)
    inside = (torch.maximum(u.abs(), v.abs()) < 0.7)[0, 0]
    after = clip[0, :, 1][:, inside]
    spread = float(after.std(1).mean())
    away = float((before[0][:, inside] - after).abs().mean())
    assert spread > 0.1
    assert away < 0.25 * spread
    # and not by being the same everywhere: half a turn away it is something else
    wrong = torch.nn.functional.grid_sample(clip[:, :, 0], grid + 0.07, align_corners=False)
    assert float((wrong[0][:, inside] - after).abs().mean()) > 2 * away


def test_backgrounds_have_detail_and_move_with_the_camera() -> None:
    count = len(words.GROUNDS)
    scenes = changed(
        sample_scenes(count, 4), ground=torch.arange(count), ground_colour=0, light=0, view=0,
        behind_colour=-1, front_colour=-1, radius=0.01, drift=0.0, zoom=0.0, growth=0.0,
    )  # fmt: skip
    still = film(scenes, 17, 64, 64)[:, :, :, :20]
    assert (still.std((1, 2, 3, 4))[1:] > 0.04).all()
    torch.testing.assert_close(still[:, :, 0, :12], still[:, :, 16, :12], atol=0.02, rtol=0)
    panned = film(changed(scenes, drift=torch.tensor([0.25, 0.0])), 17, 64, 64)
    moved = torch.tensor([g != "hilly" for g in words.GROUNDS])
    # a quarter of a height in a unit: 8 pixels in 16 frames
    expected, seen = panned[moved, :, 0, :12, 8:48], panned[moved, :, 16, :12, 16:56]
    assert float((expected - seen).abs().mean()) < 0.02
    hills = panned[~moved]  # three ridges with three speeds
    hills = hills[:, :, :, 24:]
    assert float((hills[:, :, 0, :, 8:48] - hills[:, :, 16, :, 16:56]).abs().mean()) > 0.01


def test_the_judge_reads_true_films() -> None:
    count = 16
    scenes = sample_scenes(count, 41, unseen=True)
    captions = scenes.captions()
    right = dict.fromkeys(("colour", "shape", "motion", "speed", "things"), 0)
    for i, sentence in enumerate(captions):
        clip = (film(scenes[slice(i, i + 1)], 33, 64, 64)[0].permute(1, 2, 3, 0) + 1) / 2
        wish, seen = understand(sentence), judge(clip)
        for name in ("colour", "shape", "motion"):
            right[name] += getattr(wish, name) == getattr(seen, name)
        moves = int(scenes.motion[i]) < 4
        right["speed"] += not moves or speed(clip, unit(33)) == words.SPEEDS[scenes.speed[i]]
        right["things"] += count_things(clip) == asked_objects(sentence)
    assert right == dict.fromkeys(right, count)


def test_things_are_counted_independently_of_the_film() -> None:
    clip = torch.full((6, 64, 64, 3), 0.5)
    assert count_things(clip) == 0
    red, blue = torch.tensor([0.9, 0.1, 0.1]), torch.tensor([0.1, 0.3, 0.9])
    clip[:, 8:24, 8:24] = red
    assert count_things(clip) == 1
    clip[:, 36:56, 36:44] = red
    assert count_things(clip) == 2
    clip[:, 20:60, 14:20] = blue  # before the first, and beside the second
    assert count_things(clip) == 3
    split = torch.full((6, 64, 64, 3), 0.5)
    split[:, 20:40, 8:56] = red
    split[:, 10:50, 28:34] = blue  # one bar before another does not make two of it
    assert count_things(split) == 2


def test_prompts_are_held_out_and_stable() -> None:
    some = prompts(16)
    assert some == prompts(16)
    assert len(set(some)) == 16


def test_the_prompts_of_the_package_are_held_out_and_none_that_evidence_uses() -> None:
    shipped = default_prompts("nano")
    assert shipped == prompts(24, seed=2)
    assert not {*shipped} & {*prompts(64), *prompts(64, seed=1)}
