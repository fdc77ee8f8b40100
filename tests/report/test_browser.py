"""The page as people meet it: opened in Chromium, played, dragged, clicked, resized."""

from __future__ import annotations

import base64
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import example
import numpy as np
import pytest
import torch

from jali.clips.clip import write_mp4
from jali.evaluation.report import compare_page, write_page

SIZE = example.SMALL
WIDE = {"width": 1200, "height": 900}
PHONE = {"width": 360, "height": 740}

Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Open]:
    """Opens a page; afterwards nothing may have been complained about or fetched."""
    with opener(browser) as open_page:
        yield lambda **options: open_page(page_file, **options)


@contextmanager
def opener(browser: Any) -> Iterator[Open]:
    """Opens pages in windows of their own, which it closes again."""
    tabs: list[Tab] = []

    def open_page(path: Path, viewport: dict[str, int] = WIDE, **options: Any) -> Any:
        tabs.append(Tab(browser.new_context(viewport=viewport, **options).new_page()))
        return tabs[-1].open(path)

    yield open_page
    for tab in tabs:
        tab.page.context.close()
    assert not [complaint for tab in tabs for complaint in tab.complaints]


class Tab:
    """A page of the browser, and what it complained about or fetched."""

    def __init__(self, page: Any) -> None:
        self.page, self.complaints, self.address = page, list[str](), ""
        page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", lambda request: self._fetched(request.url))

    def open(self, path: Path) -> Any:
        """From the start, whatever it showed before."""
        self.address = path.as_uri()
        self.page.mouse.move(0, 0)
        self.page.goto(self.address)
        self.page.wait_for_selector("body[data-ready]")
        return self.page

    def _fetched(self, url: str) -> None:
        if url.split("#")[0] != self.address and not url.startswith(("blob:", "data:")):
            self.complaints.append(f"fetched {url}")


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Tab]:
    """One window for all tests that need no special one: opening it takes longer than a page."""
    context = browser.new_context(viewport=WIDE)
    yield Tab(context.new_page())
    context.close()


@pytest.fixture
def page(tab: Tab, page_file: Path) -> Iterator[Any]:
    """The page, opened; afterwards nothing may have been complained about or fetched."""
    tab.complaints.clear()
    yield tab.open(page_file)
    assert not tab.complaints


def spent(root: Path, run: str, index: int = 0) -> dict[str, Any]:
    return json.loads((root / run / f"{example.clip_name(index)}.sites.json").read_text())


def until(page: Any, condition: str, seconds: float = 10) -> None:
    """Wait until an expression holds. (The page's own rules forbid the driver's way of waiting.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never came true: {condition}"
        page.wait_for_timeout(20)


def positions(page: Any) -> list[float]:
    """Where each film is, in frames."""
    seconds = page.evaluate(
        "[...document.querySelectorAll('#stage video')].map(v => v.currentTime)"
    )
    return [second * SIZE.fps for second in seconds]


# Pixels travel as base64: a list of numbers takes seconds.
PIXELS = """source => {
  const [width, height] = [source.videoWidth || source.width, source.videoHeight || source.height];
  const context = new OffscreenCanvas(width, height).getContext('2d');
  context.drawImage(source, 0, 0);
  const bytes = context.getImageData(0, 0, width, height).data;
  let text = '';
  for (let i = 0; i < bytes.length; i += 8192) {
    text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  }
  return [width, height, btoa(text)];
}"""


def pixels(element: Any) -> np.ndarray:
    """What a video or canvas shows, uint8 [H, W, 3]."""
    width, height, text = element.evaluate(PIXELS)
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width, 4)[..., :3]


def pictures(page: Any) -> list[np.ndarray]:
    """What each film shows."""
    until(page, "[...document.querySelectorAll('#stage video')].every(v => !v.seeking)")
    # A frame that was sought is drawn with the picture after; a busy machine takes its time.
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return [pixels(video) for video in page.locator("#stage video").all()]


def frame_shown(picture: np.ndarray, clip: int) -> int:
    """Which frame of the clip a picture looks like most."""
    frames = example.film(clip, SIZE).astype(np.float32)
    return int(np.abs(frames - picture).mean((1, 2, 3)).argmin())


def test_it_opens_with_the_headline_and_three_players(page: Any) -> None:
    assert page.inner_text("h1").replace("\xa0", " ").startswith("1.7× to 2.1× faster at ")
    assert page.locator("#stage video:visible").count() == 3
    assert page.locator("#costs").is_visible()
    assert [frame_shown(picture, 0) for picture in pictures(page)] == [0, 0, 0]


def test_films_play_in_step(page: Any) -> None:
    page.click("#play")
    assert page.get_attribute("#play", "aria-label") == "Pause"
    until(page, "document.querySelector('#stage video').currentTime > 0.15")
    seen = []
    for _ in range(12):
        seen.append(positions(page))
        page.wait_for_timeout(50)
    page.click("#play")
    lead = [each[0] for each in seen]
    assert max(lead) - min(lead) > 2, "the films stand still"
    assert max(max(each) - min(each) for each in seen) < 1, seen
    stopped = positions(page)
    page.wait_for_timeout(250)  # three frames, were it still playing
    assert positions(page) == pytest.approx(stopped, abs=0.5)


def test_a_film_that_falls_out_of_step_is_brought_back(page: Any) -> None:
    # Eleven seconds at this speed: the start after the end, which aligns all, is far away.
    page.select_option("#speed", "0.1")
    page.click("#play")
    until(page, "document.querySelector('#stage video').currentTime > 0.05")
    # Pushed and read in one go: the next picture may already bring it back.
    ahead = page.evaluate(
        """() => {
          const [lead, other] = document.querySelectorAll('#stage video');
          other.currentTime += 5 / 12;
          return (other.currentTime - lead.currentTime) * 12;
        }"""
    )
    assert ahead > 3
    until(
        page,
        """(() => {
          const [a, b, c] = [...document.querySelectorAll('#stage video')].map(v => v.currentTime);
          return Math.max(a, b, c) - Math.min(a, b, c) < 1 / 12;
        })()""",
        seconds=5,
    )
    assert page.get_attribute("#play", "aria-label") == "Pause"


def test_a_film_starts_again_at_its_end(page: Any) -> None:
    page.evaluate("document.querySelector('#time').value = 11")
    page.dispatch_event("#time", "input")
    page.click("#play")
    until(page, "document.querySelector('#stage video').currentTime < 0.5")
    assert page.get_attribute("#play", "aria-label") == "Pause"


def test_speed_changes_all_films(page: Any) -> None:
    page.select_option("#speed", "0.5")
    rates = page.evaluate("[...document.querySelectorAll('#stage video')].map(v => v.playbackRate)")
    assert rates == [0.5] * 3


def test_steps_show_exactly_the_next_frame(page: Any) -> None:
    for _ in range(4):
        page.click("#forward")
    page.click("#back")
    shown: list[int] = []
    for _ in range(5):
        if shown != [3, 3, 3]:  # a busy machine may still draw the frame before
            shown = [frame_shown(picture, 0) for picture in pictures(page)]
    assert shown == [3, 3, 3]
    assert page.inner_text("#clock").startswith("frame 4 / 13")
    assert page.get_attribute("#time", "aria-valuetext") == "frame 4 of 13"


def test_the_keyboard_does_it_too(page: Any) -> None:
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#time") == "2"
    page.keyboard.press("2")
    assert page.get_attribute("#stage", "data-view") == "wipe"
    page.keyboard.press("]")
    page.wait_for_selector("body[data-ready='1']")
    assert page.input_value("#clip") == "1"
    page.keyboard.press(" ")
    until(page, "document.querySelector('#stage video').currentTime > 0.1")


def test_another_prompt_brings_other_films(page: Any) -> None:
    options = page.locator("#clip option").all_inner_texts()
    assert options == [f"{i + 1}. {example.PROMPTS[i]}" for i in range(2)]
    assert page.inner_text("#clip-name") == "Clip 1 of 2 ▾"
    assert page.inner_text("#prompt-text") == example.PROMPTS[0]
    before = pictures(page)[0]
    page.select_option("#clip", "1")
    page.wait_for_selector("body[data-ready='1']")
    after = pictures(page)[0]
    own, other = (np.abs(after - example.film(i, SIZE)[0].astype(float)).mean() for i in (1, 0))
    assert own < 4 < other
    assert np.abs(before.astype(float) - after).mean() > 10


def test_the_wipe_follows_pointer_and_keys(page: Any) -> None:
    page.click("[data-view=wipe]")
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40, steps=4)
    page.mouse.up()
    assert abs(cut(page) - 25) < 1
    page.focus("#wipe")
    page.keyboard.press("ArrowRight")
    assert abs(cut(page) - 27) < 1
    assert page.locator("#stage video:visible").count() == 2


def cut(page: Any) -> float:
    style = "getComputedStyle(document.querySelector('.right-side')).clipPath"
    return float(re.findall(r"([\d.]+)%", page.evaluate(style))[-1])


def at_sizes(page: Any, *sizes: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The window in these sizes, one after the other, and then as it was."""
    try:
        for width, height in sizes:
            page.set_viewport_size({"width": width, "height": height})
            yield width, height
    finally:
        page.set_viewport_size(WIDE)


def test_the_wipe_and_its_controls_fit_the_window(page: Any) -> None:
    for size in at_sizes(page, *itertools.product((390, 800, 1400), (600, 700, 900))):
        page.click("[data-view=wipe]")
        tools, player = (page.locator(f".{n}").first.bounding_box() for n in ("tools", "player"))
        assert tools["y"] >= -1, size
        assert player["y"] + player["height"] <= size[1] + 1, size
        assert page.locator("#stage").bounding_box()["height"] > 180, size


def test_the_bar_covers_no_film(page: Any) -> None:
    for size in at_sizes(page, (390, 800), (800, 800), (1400, 800)):
        for view in ("side", "wipe", "difference"):
            page.click(f"[data-view={view}]")
            for offset in (0, 200, 500):
                page.evaluate(f"scrollTo(0, {offset})")
                bar, stage = (page.locator(n).bounding_box() for n in (".controls", "#stage"))
                above = bar["y"] + bar["height"] <= stage["y"] + 1
                below = bar["y"] >= stage["y"] + stage["height"] - 1
                assert above or below, (size, view, offset)


# Pairs of texts that lie over each other, of those that a plot shows.
COLLISIONS = """selector => {
  const all = [...document.querySelectorAll(selector)].filter(e => e.textContent.trim())
    .map(e => [e.textContent, e.getBoundingClientRect()]).filter(([, box]) => box.width);
  return all.flatMap(([one, a], i) => all.slice(i + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1
  ).map(([other]) => `${one} / ${other}`));
}"""


def test_labels_of_axes_do_not_collide(browser: Any, tmp_path: Path) -> None:
    size = replace(SIZE, layers=30, heads=12)
    for run, budget, noise in (("dense", None, 0.0), ("entropy", 0.3, 0.035)):
        example.make_run(tmp_path / run, size, clips=1, method=run, budget=budget, noise=noise)
    file = tmp_path / "page.html"
    write_page(file, compare_page([tmp_path / "dense", tmp_path / "entropy"], ["psnr", "ssim"]))
    with opener(browser) as open_page:
        page = open_page(file)
        for size in at_sizes(page, (390, 800), (800, 800), (1400, 800)):
            page.wait_for_timeout(200)  # until it is drawn anew
            assert not page.evaluate(COLLISIONS, ".plot text"), size
            curve = ".curve b, .curve small, .curve output, .curve-box span"
            assert not page.evaluate(COLLISIONS, curve), size
            assert page.evaluate(INSIDE, ".curve-box span, .plot text"), size
            scale = "e => e.viewBox.baseVal.width / e.clientWidth"
            assert page.locator(".plot svg").evaluate(scale) == pytest.approx(1, abs=0.02), (
                "words keep their size"
            )


INSIDE = """selector => [...document.querySelectorAll(selector)].every(e => {
  const box = e.getBoundingClientRect();
  return box.left >= 0 && box.right <= innerWidth;
})"""


def test_tables_scroll_inside(page: Any) -> None:
    for _ in at_sizes(page, (800, 800)):
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == 800
        assert page.evaluate(INSIDE, ".scroll")
        scrolls = "e => getComputedStyle(e.closest('.scroll')).overflowX === 'auto'"
        assert all(table.evaluate(scrolls) for table in page.locator("table").all())


def test_any_two_runs_can_be_put_against_each_other(page: Any) -> None:
    page.click("[data-view=wipe]")
    page.select_option("#right", "2")
    page.select_option("#left", "1")
    assert page.locator(".left-side .who").inner_text() == "entropy 0.3"
    assert page.locator(".right-side .who").inner_text() == "psa 0.15"
    page.select_option("#left", "2")
    assert page.locator(".right-side .who").inner_text() == "entropy 0.3", "they change places"


def frame_drawn(page: Any, frame: int) -> np.ndarray:
    """The difference as it is drawn, once its film has come to the frame."""
    until(
        page,
        f"document.querySelector('.canvas canvas').dataset.frame === '{frame}'",
    )
    return pixels(page.locator(".canvas canvas")).astype(float)


def test_the_difference_is_that_of_the_lossless_files(page: Any) -> None:
    page.click("[data-view=difference]")
    for _ in range(9):
        page.click("#forward")
    a, b = (example.film(0, SIZE, noise)[9].astype(float) for noise in (0, 0.035))
    apart = np.abs(a - b).mean(-1)
    for gain in (8, 3):
        page.evaluate(f"document.querySelector('#gain').value = {gain}")
        page.dispatch_event("#gain", "input")
        drawn = frame_drawn(page, 9)
        wanted = np.minimum(apart * gain, 255)
        assert np.abs(drawn - wanted[..., None]).mean() < 0.05 * gain * apart.mean() + 1
        assert page.inner_text("#gain-value") == f"×{gain}"
    assert f"mean {apart.mean():.2f} of 255" in page.inner_text(".canvas figcaption")
    assert drawn.max() > 10


def test_the_difference_is_from_the_reference(page: Any) -> None:
    page.click("[data-view=wipe]")
    page.select_option("#left", "2")
    page.select_option("#right", "0")
    page.click("[data-view=difference]")
    assert page.locator(".left-side .who").inner_text() == "dense"
    assert page.locator(".right-side .who").inner_text() == "psa 0.15"
    assert page.locator("#left").is_hidden()
    assert page.locator("#right option").first.is_disabled()
    page.click("#play")
    until(page, "+document.querySelector('.canvas canvas').dataset.frame > 1")


def test_what_only_a_codec_did_is_no_difference(browser: Any, tmp_path: Path) -> None:
    """The same lossless frames, and an mp4 that shows something else."""
    for run, noise in (("dense", 0.0), ("entropy", 0.06)):
        made = example.make_run(tmp_path / run, clips=1, method=run)
        name = f"{example.clip_name(0)}.mp4"
        write_mp4(made / name, torch.from_numpy(example.film(0, SIZE, noise)), SIZE.fps)
    file = tmp_path / "page.html"
    write_page(file, compare_page([tmp_path / "dense", tmp_path / "entropy"], []))
    with opener(browser) as open_page:
        page = open_page(file)
        page.click("[data-view=difference]")
        assert not frame_drawn(page, 0).any()
        assert "mean 0.00 of 255" in page.inner_text(".canvas figcaption")


def test_curves_show_the_values_under_cursor_and_pointer(page: Any, root: Path) -> None:
    pairs = json.loads((root / "psa" / "metrics.json").read_text())["pairs"]
    values = pairs[0]["psnr"]["per_frame"]
    assert page.locator(".curve").count() == 3
    first = page.locator(".curve").first
    assert first.locator("output span").all_inner_texts()[1] == f"{values[0]:.2f}"
    first.scroll_into_view_if_needed()
    box = first.locator(".curve-box").bounding_box()
    over = (box["x"] + box["width"] * 9 / 12, box["y"] + 20)
    page.mouse.move(*over)
    assert first.locator("output span").all_inner_texts()[1] == f"{values[9]:.2f}"
    assert page.input_value("#time") == "0"
    page.mouse.click(*over)
    assert page.input_value("#time") == "9"
    left = first.locator("i:not(.hover)").evaluate("e => e.style.left")
    assert float(left.rstrip("%")) == pytest.approx(75)
    assert f"{values[9]:.2f} dB" in page.locator("figcaption").all_inner_texts()[2]


def cell(page: Any, name: str, column: int, columns: int, layer: int) -> tuple[float, float]:
    """Where a cell of a heat-map is on the screen; 26 and 20 pixels are for the numbers."""
    page.locator(name).scroll_into_view_if_needed()
    box = page.locator(name).bounding_box()
    x = box["x"] + 26 + (box["width"] - 26) * (column + 0.5) / columns
    return x, box["y"] + (box["height"] - 20) * (layer + 0.5) / SIZE.layers


def test_the_heat_map_tells_and_chooses(page: Any, root: Path) -> None:
    rows = spent(root, "entropy")["rows"]
    costs = [row["cost"] for row in rows if (row["layer"], row["step"]) == (3, 7)]
    where = cell(page, "#map-steps", 7, SIZE.steps, 3)
    page.mouse.move(*where)
    assert page.inner_text("#tip").startswith("layer 3, step 7\ncost ")
    page.mouse.click(*where)
    said = page.inner_text("#site")
    assert said.startswith("layer 3, step 7: cost ")
    assert float(said.split("cost ")[1].split(",")[0]) == pytest.approx(np.mean(costs), abs=1e-3)
    assert page.inner_text("#map-step-name") == "step 7"
    page.focus("#map-steps")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#site").startswith("layer 4, step 6: cost ")
    assert page.input_value("#time") == "0", "the arrows must not move the films as well"


def test_the_maps_begin_with_layer_by_head_over_all_sparse_steps(page: Any, root: Path) -> None:
    assert page.locator(".maps canvas").first.get_attribute("id") == "map-heads"
    assert page.inner_text("#map-step-name") == "all sparse steps"
    rows = [
        row for row in spent(root, "entropy")["rows"] if row["layer"] == 5 and not row["reason"]
    ]
    page.mouse.move(*cell(page, "#map-heads", 2, SIZE.heads, 5))
    said = page.inner_text("#tip")
    assert said.startswith("layer 5, head 2, all sparse steps\ncost ")
    wanted = np.mean([row["heads"][2] for row in rows])
    assert float(said.split("cost ")[1]) == pytest.approx(wanted, abs=1e-3)
    page.mouse.move(*cell(page, "#map-heads", 1, SIZE.heads, 0))
    assert "dense: first steps, layer 0" in page.inner_text("#tip")
    page.select_option("#step", "7")
    assert page.inner_text("#map-step-name") == "step 7"


def test_a_finger_gets_the_numbers_too(opened: Open) -> None:
    page = opened(viewport=PHONE, is_mobile=True, has_touch=True)
    for name, columns in (("#map-heads", SIZE.heads), ("#map-steps", SIZE.steps)):
        page.touchscreen.tap(*cell(page, name, 3, columns, 5))
        assert page.inner_text("#tip").startswith("layer 5, ")
        box = page.locator("#tip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
    assert page.inner_text("#site").startswith("layer 5, step 3: cost ")
    page.tap("#cost-title")
    assert page.locator("#tip").is_hidden()
    page.locator("#head-plot [data-tip]").first.tap()
    assert page.inner_text("#tip").startswith("layer ")


def test_dense_calls_say_why(page: Any) -> None:
    page.mouse.move(*cell(page, "#map-steps", 0, SIZE.steps, 5))
    assert "dense: first steps" in page.inner_text("#tip")
    page.mouse.move(*cell(page, "#map-steps", 6, SIZE.steps, 0))
    assert "dense: layer 0" in page.inner_text("#tip")


def test_heads_of_the_chosen_step(page: Any, root: Path) -> None:
    page.select_option("#branch", label="uncond")
    page.mouse.click(*cell(page, "#map-steps", 8, SIZE.steps, 6))
    page.mouse.click(*cell(page, "#map-heads", 2, SIZE.heads, 5))
    wanted = next(
        row["heads"][2]
        for row in spent(root, "entropy")["rows"]
        if (row["layer"], row["step"], row["branch"]) == (5, 8, "uncond")
    )
    assert f"head 2: {wanted:.3f}" in page.inner_text("#site")


def test_another_run_has_other_costs(page: Any) -> None:
    before = page.inner_text("#site")
    page.click("#site-runs >> text=psa 0.15")
    assert page.inner_text("#site") != before
    assert "asked 0.15" in page.text_content("#head-plot")
    page.click("#site-runs >> text=dense")
    assert page.locator("#heads").is_hidden(), "a dense run gives no budgets"
    assert page.locator("#plans").is_hidden()


def test_budgets_per_head_have_values(page: Any, root: Path) -> None:
    rows = [r for r in spent(root, "entropy")["rows"] if r["layer"] == 2 and r["reason"] is None]
    mean = np.mean([round(row["heads"][1], 3) for row in rows])
    dots = page.locator("#head-plot [data-tip]")
    assert dots.count() == (SIZE.layers - 1) * SIZE.heads
    tips = dots.evaluate_all("all => all.map(each => each.dataset.tip)")
    tip = next(tip for tip in tips if tip.startswith("layer 2, head 1\n"))
    assert float(tip.split("mean ")[1].split(",")[0]) == pytest.approx(mean, abs=1e-3)
    dots.first.hover()
    assert page.inner_text("#tip").startswith("layer ")


def test_plans_lie_over_the_frames(page: Any, root: Path) -> None:
    page.locator("#plans").scroll_into_view_if_needed()
    frames, height, _ = SIZE.grid
    until(page, f"document.querySelectorAll('#strip canvas').length === {frames}")
    plan = spent(root, "entropy")["plans"][0]
    levels = np.frombuffer(base64.b64decode(plan["levels"]), np.uint8)
    levels = levels.reshape(SIZE.grid)
    picture = pixels(page.locator("#strip canvas").first).astype(float)
    real = example.film(0, SIZE)[0].astype(float)
    scale = picture.shape[1] // SIZE.width
    shown = picture[::scale, ::scale]
    side = SIZE.height // height
    mask = np.kron(levels[0], np.ones((side, side)))
    assert np.abs(shown - real)[mask == 1].mean() < 12, "what is read is clear"
    for level, tint, weight in ((0, (9, 11, 16), 0.8), (8, (118, 60, 190), 0.52)):
        wanted = real * (1 - weight) + np.array(tint) * weight
        assert (mask == level).any()
        assert np.abs(shown - wanted)[mask == level].mean() < 6, f"level {level}"
    page.click("#plan-sites >> text=head 2")
    assert page.inner_text("#site").startswith("layer 6, step 8")
    page.locator("#strip button").nth(frames - 1).click()
    assert page.input_value("#time") == str(SIZE.frames - 1)


def test_dark_as_the_system_and_by_hand(opened: Open) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = opened(color_scheme="light"), opened(color_scheme="dark")
    assert light.evaluate(paper) == "rgb(250, 249, 245)"
    assert dark.evaluate(paper) == "rgb(17, 20, 26)"
    shot = "document.querySelector('#map-steps').toDataURL()"
    before = light.evaluate(shot)
    light.click("#theme")
    assert light.evaluate(paper) == dark.evaluate(paper)
    assert light.evaluate(shot) != before, "plots follow"
    light.reload()
    assert light.evaluate(paper) == dark.evaluate(paper), "the choice is kept"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read(opened: Open, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    read = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    for ink in ("--ink", "--muted", "--accent", *(f"--run-{i}" for i in range(6))):
        for paper in ("--paper", "--surface"):
            ratio = contrast(page.evaluate(read, ink), page.evaluate(read, paper))
            assert ratio >= 4.5, f"{ink} on {paper}: {ratio:.2f}"
    ratio = contrast(page.evaluate(read, "--warn"), page.evaluate(read, "--warn-soft"))
    assert ratio >= 4.5


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_it_fits_a_phone(opened: Open) -> None:
    page = opened(viewport=PHONE, is_mobile=True, has_touch=True)
    width = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    for view in ("side", "wipe", "difference"):
        page.tap(f"[data-view={view}]")
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert max(page.evaluate(width)) == 360, view
    outside = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter(e => {
          const box = e.getBoundingClientRect();
          return box.width && box.right > 361 && !e.closest('.scroll');
        }).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not outside
    small = page.evaluate(
        """() => [...document.querySelectorAll('button:not(.link), select')].filter(e => {
          const box = e.getBoundingClientRect();
          return box.width && (box.width < 32 || box.height < 32);
        }).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not small, "too small for a finger"


def test_everything_has_a_name_for_those_who_cannot_see_it(page: Any) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, video, [role]')]
          .filter(e => e.getClientRects().length && !(e.getAttribute('aria-label') ||
            e.textContent.trim() || e.labels?.[0]?.textContent.trim()))
          .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not nameless
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("document.title") == "entropy 0.3, psa 0.15 against dense"


def test_plain_folders_have_players_and_curves_alone(
    browser: Any, root: Path, tmp_path: Path
) -> None:
    for run in ("dense", "psa"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "a.mp4").write_bytes(
            (root / run / f"{example.clip_name(0)}.mp4").read_bytes()
        )
    file = tmp_path / "plain.html"
    write_page(file, compare_page([tmp_path / "dense", tmp_path / "psa"], ["psnr"]))
    with opener(browser) as open_page:
        page = open_page(file)
        assert page.locator("#costs").is_hidden()
        assert page.locator("#stage video:visible").count() == 2
        assert page.locator(".curve").count() == 1
        page.click("#play")
        until(page, "document.querySelector('#stage video').currentTime > 0.1")


def test_a_lossless_clip_is_made_playable(browser: Any, root: Path, tmp_path: Path) -> None:
    for run in ("dense", "psa"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "a.mkv").write_bytes(
            (root / run / f"{example.clip_name(0)}.mkv").read_bytes()
        )
    file = tmp_path / "plain.html"
    write_page(file, compare_page([tmp_path / "dense", tmp_path / "psa"], []))
    with opener(browser) as open_page:
        page = open_page(file)
        page.click("#forward")
        assert [frame_shown(picture, 0) for picture in pictures(page)] == [1, 1]


def test_a_hostile_prompt_is_only_text(browser: Any, tmp_path: Path) -> None:
    words = (
        "</script><img src=x onerror=alert(1)> {{data}} <b>bold</b> & \"quotes\" 'single' \\u003c"
    )
    for run in ("dense", "entropy"):
        made = example.make_run(tmp_path / run, clips=1, method=run)
        text = (made / "manifest.json").read_text()
        (made / "manifest.json").write_text(
            text.replace(json.dumps(example.PROMPTS[0]), json.dumps(words))
        )
    file = tmp_path / "page.html"
    write_page(file, compare_page([tmp_path / "dense", tmp_path / "entropy"], []))
    with opener(browser) as open_page:
        page = open_page(file)
        assert page.inner_text("#prompt-text") == words
        assert page.locator("#clip").is_hidden(), "one prompt, once"
        assert page.locator("body").inner_text().count("bold") == 1
        assert page.locator("img, #prompt-text b").count() == 0
