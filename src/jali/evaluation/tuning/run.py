"""The tuning itself: a total for every method on one half of the prompts, the other half judges."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jali.error import InputError, JobError, shorten
from jali.evaluation.arena.row import Row, ScheduleSpec, read_method_spec, split_methods
from jali.evaluation.arena.run import Game, Plan, Tell, measured_speed, prepare
from jali.evaluation.tuning.outcome import (
    Found,
    choose,
    elsewhere,
    found_of,
    measured_of,
    say_held_out,
    say_point,
    say_unmet,
)
from jali.evaluation.tuning.page import write_page
from jali.evaluation.tuning.place import Gain, Place
from jali.evaluation.tuning.refine import Refinement, layers_of
from jali.evaluation.tuning.search import START, TRIES, best_total, nearest_total, next_total
from jali.evaluation.tuning.size import (
    METHODS,
    PROBES,
    PROMPTS,
    check_output,
    check_saves,
    folder_of,
    make_target,
)
from jali.evaluation.tuning.trial import TimeOver, Trials
from jali.generation.folder import hold_folder
from jali.generation.machine import machine
from jali.generation.produce import check_sizes, load
from jali.generation.prompts import default_prompts
from jali.generation.settings import Settings
from jali.integration.fingerprint import Fingerprint
from jali.integration.recipe import Measured, Recipe, RunSize, Target
from jali.methods import Dense
from jali.planning.curve import Curve
from jali.value import check_count

log = logging.getLogger("jali")

CURVE = ScheduleSpec("exponential")
USUAL_TRIES = 4  # of a method, for the bar and for what fits into the minutes
MORE_TRIES = 4  # of a shape that was found better: it may need much less


def tune(
    pipe_or_model: Any,
    *,
    output: str | Path,
    target_psnr: float | None = None,
    target_ssim: float | None = None,
    target_lpips: float | None = None,
    speedup: float | None = None,
    methods: str | Iterable[str] = METHODS,
    prompts: Sequence[str] | None = None,
    batch: int = 1,
    minutes: float | None = None,
    probes: int = PROBES,
    saves: str = "time",
    settings: Settings | None = None,
    progress: Tell | None = None,
) -> Recipe:
    """The recipe for a wanted quality or speed, found with finished clips.

    For every method the total is searched at which the clips of one half of the prompts meet the
    target, on a curve that falls along the run; the fastest one is taken (of those that are fast
    enough, the nearest to dense). Other spreads of that total are tried, a linear curve and work
    moved to the steps and layers where probes gain by it, and kept where paired clips say that they
    are better. The other half of the prompts has no part in this: what their clips show is what the
    recipe states.

    Everything is kept beside the recipe as it is made; the same call goes on where one was cut.

    Args:
        pipe_or_model: a model's name, or a pipeline of `settings.model`.
        output: the recipe's file; clips, numbers and a page go to a folder of the same name with
            `-tuning` behind it.
        target_psnr, target_ssim, target_lpips, speedup: the target, exactly one: a mean over clips
            against the dense run of the same noise, or how many times as fast as dense.
        methods: names, which may have options, as in `"rd:samples=8"`.
        prompts: two texts or more; eight of those that ship with the model where none are given.
        batch: prompts in one call of the pipeline.
        minutes: keep to these, with fewer prompts and tries where it must be.
        probes: places (some steps, some layers) in which more work is tried; 0 for none.
        saves: "time", measured here, or "work", for a machine elsewhere: then the method with the
            least of it is taken, also where it is slower here.
        settings: steps, size, seed, device and the like; its method does not count.
        progress: hears what is made, how much is done, and of about how much.

    Raises:
        ValueError, TypeError: whatever cannot be, before anything slow.
        JobError: no method could run, or the minutes are over before there is an answer.

    Example:
        >>> recipe = tune("nano", target_psnr=35, output="nano.yaml")  # doctest: +SKIP
        >>> print(recipe)  # doctest: +SKIP
    """
    begun = time.monotonic()
    model = pipe_or_model if isinstance(pipe_or_model, str) else None
    if settings is None:
        if model is None:
            raise TypeError("a pipeline needs settings=Settings(model): they say which model it is")
        settings = Settings(model)
    request = make_request(
        settings,
        Path(output),
        make_target(psnr=target_psnr, ssim=target_ssim, lpips=target_lpips, speedup=speedup),
        split_methods(methods),
        default_prompts(settings.model)[:PROMPTS] if prompts is None else prompts,
        batch,
        None if model else pipe_or_model,
        probes,
        saves,
    )
    pipe = load(request.plan.dense) if model else pipe_or_model
    stop = None if minutes is None else begun + 60 * minutes
    return find_recipe(request, pipe, stop, progress or (lambda *_: None))


@dataclass(frozen=True)
class Request:
    """Everything that is known before weights are read."""

    plan: Plan
    target: Target
    output: Path
    methods: tuple[str, ...]
    probes: int
    saves: str

    @property
    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Groups of prompts, by where they begin: those that decide, and those held out."""
        firsts = tuple(self.plan.results.firsts)
        half = len(firsts) // 2
        return firsts[:half], firsts[half : 2 * half]


def make_request(
    settings: Settings,
    output: Path,
    target: Target,
    methods: Sequence[str],
    prompts: Sequence[str],
    batch: int = 1,
    pipe: Any = None,
    probes: int = PROBES,
    saves: str = "time",
) -> Request:
    """Check all that was asked for; nothing is loaded or written."""
    check_output(output)
    check_count("probes", probes, least=0)
    check_saves(saves, target.metric)
    if not isinstance(prompts, str) and len(prompts) < 2 * batch:
        raise InputError(
            f"tuning needs {2 * batch} prompts or more: one half finds the recipe, the other "
            f"judges it; got {len(prompts)}"
        )
    plan = prepare(settings, folder_of(output), methods, [START], [CURVE], prompts, batch, pipe)
    return Request(replace(plan, rows=()), target, output, tuple(methods), probes, saves)


def find_recipe(request: Request, pipe: Any, stop: float | None, tell: Tell) -> Recipe:
    """Search, judge, and write the recipe and its page."""
    plan = request.plan
    check_sizes(pipe, plan.dense)
    with hold_folder(plan.folder), measured_speed():
        game = Game(plan, pipe, stop, tell)
        tuning = _Tuning(request, game)
        found = tuning.run()
        game.results.write(plan.folder)
        gains, layers = tuning.gains, layers_of(pipe)
        write_page(plan.folder, found, game.results, tuning.deciding, gains, layers)
        found.write(request.output)
    return found


class _Tuning:
    """One session of a tuning."""

    def __init__(self, request: Request, game: Game) -> None:
        self.request, self.target, self.game = request, request.target, game
        self.specs = [read_method_spec(word) for word in request.methods]
        self.deciding, self.held_out = request.halves
        self.notes: list[str] = []
        self.gains: dict[Place, Gain] = {}
        self.was_cut = False  # before a total that meets the target was found

    def run(self) -> Recipe:
        half = len(self.deciding)
        self.game.all = half * (3 + USUAL_TRIES * len(self.specs))
        self.trials = Trials(self.game, self.game.get_ready(self._first_rows()))
        self._check_metric()
        try:
            self.trials.time_dense(self.deciding[0])
            self._fit_minutes()
            self.trials.reserve = self._reserve
            tried = self._search_all()
            chosen = self._choose(tried)
            if chosen is not None:
                chosen = self._refine(chosen)
        except TimeOver:
            raise JobError(
                f"the minutes were over before one total was tried on "
                f"{len(self.deciding)} prompts; the same command with more of them goes on"
            ) from None
        if chosen is None and (self.target.metric == "speedup" or self.was_cut):
            self.notes.append(say_unmet(tried, self.target))
            chosen = max(tried, key=lambda one: one.margin(self.target))
        elif chosen is None:
            self.notes.append(say_unmet(tried, self.target))
        elif self._must_be_faster and chosen.metrics["speedup"] < 1:
            self.notes.append(
                f"Nothing sparse that reaches {self.target} is faster here: "
                f"{say_point(chosen, self.target)}."
            )
            chosen = None
        return self._dense_recipe() if chosen is None else self._judge(chosen, tried)

    # Time

    def _first_rows(self) -> list[Row]:
        return [Row(spec, CURVE, START) for spec in self.specs]

    def _fit_minutes(self) -> None:
        """Take fewer prompts where all of them would not fit, by the time of one dense clip."""
        each = self.trials.dense_pace * (3 + USUAL_TRIES * len(self.specs))
        asked = len(self.deciding)
        fits = max(1, min(asked, int((self.trials.seconds_left + self.trials.dense_pace) / each))
                   if self.game.stop is not None else asked)  # fmt: skip
        if fits < asked:
            self.deciding, self.held_out = self.deciding[:fits], self.held_out[:fits]
            self.notes.append(
                f"The minutes were enough for {fits} of {asked} groups of prompts in each half."
                if self.game.results.batch > 1
                else f"The minutes were enough for {fits} of {asked} prompts in each half."
            )
            self.game.all = fits * (3 + USUAL_TRIES * len(self.specs))

    def _reserve(self) -> float:
        """For the held-out prompts."""
        return len(self.held_out) * (self.trials.dense_pace + self.trials.pace)

    # The totals

    def _check_metric(self) -> None:
        why = self.trials.scorer.unavailable.get(self.target.metric)
        if why is not None:
            raise JobError(f"{self.target.metric.upper()} cannot be measured here: {why}")

    def _search_all(self) -> list[Found]:
        """For every method, all points that were tried. One that fails is told and left out."""
        tried: list[Found] = []
        start = START
        for number, spec in enumerate(self.specs):
            try:
                own = self._search(Row(spec, CURVE, START), start, TRIES)
            except TimeOver:
                if not tried:
                    raise
                self.was_cut = True
                left = ", ".join(map(str, self.specs[number:]))
                self.notes.append(f"The minutes were over before {left} was tried.")
                break
            except (OSError, KeyboardInterrupt):
                raise
            except Exception as error:  # the other methods do not depend on this one
                why = f"{type(error).__name__}: {shorten(error)}"
                self.notes.append(f"{spec} failed and is left out: {why}.")
                log.warning("jali: %s", self.notes[-1])
                continue
            tried += own
            points = {float(one.row.total or 0): one.metrics[self.target.metric] for one in own}
            start = best_total(points, self.target) or nearest_total(points, self.target)
        if not tried:
            raise JobError("; ".join(self.notes))
        return tried

    def _search(self, like: Row, start: float, tries: int) -> list[Found]:
        """The points of one method on one schedule, until the target is bracketed closely."""
        assert like.schedule is not None
        while True:
            points = self.trials.points(
                like.method, like.schedule, self.deciding, self.target.metric
            )
            total = next_total(points, self.target, start, tries)
            if total is None:
                break
            try:
                self.trials.try_row(replace(like, total=total), self.deciding)
            except TimeOver:
                if not points:
                    raise
                self.was_cut = True
                self.notes.append(
                    f"The minutes allowed {len(points)} totals of {like.label}, and no more."
                )
                break
        rows = [replace(like, total=total) for total in sorted(points)]
        return [found_of(self.trials, row, self.deciding) for row in rows]

    def _refine(self, chosen: Found) -> Found:
        """The same with another spread of its total, if paired clips say that it is better."""
        metric = "psnr" if self.target.metric == "speedup" else self.target.metric
        refinement = Refinement(self.trials, metric, self.deciding, self.request.probes)
        found = refinement.run(chosen)
        self.notes += refinement.notes
        self.gains = refinement.gains
        if found is chosen:
            return chosen
        more = self._search(found.row, float(found.row.total or START), MORE_TRIES)
        return self._choose([found, *more]) or chosen

    @property
    def _must_be_faster(self) -> bool:
        return self.target.metric != "speedup" and self.request.saves == "time"

    def _choose(self, found: Sequence[Found]) -> Found | None:
        return choose(found, self.target, self.request.saves)

    # The answer

    def _judge(self, chosen: Found, tried: Sequence[Found]) -> Recipe:
        self.trials.reserve = lambda: 0.0
        held = list(self.held_out)
        records = []
        for first in held:
            try:
                records += self.trials.try_row(chosen.row, [first])
            except TimeOver:
                break
        if not records:
            raise JobError(
                "the minutes were over before the held-out prompts; the same command with more of "
                "them goes on"
            )
        if len(records) < len(held):
            self.notes.append(f"The minutes allowed {len(records)} of {len(held)} held-out groups.")
        measured = measured_of(self.trials, records)
        met, said = say_held_out(self.target, measured)
        others = self._others(chosen, tried)
        schedule = chosen.row.schedule
        assert schedule is not None
        curve = schedule.curve(float(chosen.row.total or 0))
        return self._recipe(chosen.row, curve, met, measured, [*said, *others])

    def _others(self, chosen: Found, tried: Sequence[Found]) -> list[str]:
        """The best point of every method that was not taken."""
        said = []
        for spec in self.specs:
            own = [one for one in tried if one.row.method == spec]
            best = self._choose(own)
            if own and spec != chosen.row.method:
                one = best or max(own, key=lambda one: one.margin(self.target))
                said.append(f"{say_point(one, self.target)}.")
        return said

    def _dense_recipe(self) -> Recipe:
        return self._recipe(None, None, True, Measured(0, {}, 1.0), [])

    def _recipe(
        self,
        row: Row | None,
        curve: Curve | None,
        met: bool,
        measured: Measured,
        said: Sequence[str],
    ) -> Recipe:
        from jali.integration.modes import transformers_of

        dense, results = self.request.plan.dense, self.game.results
        _, transformers = transformers_of(self.game.pipe)
        names = ("steps", "height", "width", "num_frames", "guidance")
        device = machine(str(dense.device))
        method = Dense() if row is None else row.method.make()
        size = RunSize(**dense.pick(*names))
        other = {} if row is None else elsewhere(dense.model, size, method, measured.work)
        return Recipe(
            model=dense.model,
            fingerprints={name: Fingerprint.of(module) for name, module in transformers},
            method=method,
            curve=curve,
            run=size,
            target=self.target,
            met=met,
            measured=measured,
            machine=device,
            notes=(*said, *self.notes),
            date=results.date,
            forecast=other,
        )
