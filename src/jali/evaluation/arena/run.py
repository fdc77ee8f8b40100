"""The arena itself: groups of prompts outermost, in each the dense run and then every row."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from jali.error import ArgumentError, InputError, shorten
from jali.evaluation.arena.leaderboard import Leaderboard
from jali.evaluation.arena.match import matched
from jali.evaluation.arena.record import DENSE, DenseTimes, Record, Results, find_results
from jali.evaluation.arena.row import (
    ALL,
    GRADED,
    Row,
    ScheduleSpec,
    make_rows,
    read_method_spec,
    read_schedules,
    row_of,
    split_methods,
)
from jali.evaluation.arena.score import Scorer
from jali.evaluation.arena.size import usual_size
from jali.evaluation.arena.studio import Made, Studio
from jali.evaluation.arena.write import check_pages, write_pages
from jali.generation.folder import hold_folder
from jali.generation.machine import machine, versions
from jali.generation.produce import check_sizes, load, warm_up
from jali.generation.prompts import check_prompt, default_prompts
from jali.generation.settings import Settings, dense_twin
from jali.integration.recipe import Recipe
from jali.presets.method import write_method
from jali.value import check_count
from jali.version import __version__

log = logging.getLogger("jali")

Tell = Callable[[str, int, int], None]


def arena(
    pipe_or_model: Any,
    *,
    output: str | Path,
    methods: str | Iterable[str] = ALL,
    totals: Sequence[float] | None = None,
    schedule: str | Iterable[str] = GRADED,
    prompts: Sequence[str] | None = None,
    batch: int = 1,
    minutes: float | None = None,
    quick: bool = False,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    progress: Tell | None = None,
) -> Leaderboard:
    """Every method and both controls on the same prompts, each at the same *achieved* total.

    A total is the share of all self-attention work of a run. What a row is asked for is corrected
    on the first prompts until it costs its total. Methods that have no budget but a threshold get
    one more row, as published. Everything is kept in `output` as it is made; the same call goes on
    where one was cut, and more methods or totals join what is there.

    Args:
        pipe_or_model: a model's name, or a pipeline of `settings.model`.
        output: the arena's folder: `arena.json`, a page, a plot, and a run folder for every row.
        methods: names, which may have options (`"rd:samples=8"`); "all" is every one registered.
        totals: asked shares, above 0 and at most 1.
        schedule: "graded" (falling exponentially), "linear", "flat", "esa", or several of them.
        prompts: texts; those that ship with the model where none are given.
        batch: prompts in one call of the pipeline.
        minutes: begin nothing that would end later.
        quick: fewer prompts, steps and totals where nobody says how many.
        recipe: one more row, what `tune` found, and all others at its total where no totals are
            given.
        settings: steps, size, seed, device and the like; its method does not count.
        progress: hears what is made, how much is done, and of how much.

    Raises:
        ValueError, TypeError: whatever cannot be, before anything slow.

    Example:
        >>> board = arena("nano", totals=[0.4], output="runs/arena")  # doctest: +SKIP
        >>> print(board)  # doctest: +SKIP
    """
    begun = time.monotonic()
    model = pipe_or_model if isinstance(pipe_or_model, str) else None
    if settings is None:
        if model is None:
            raise TypeError("a pipeline needs settings=Settings(model): they say which model it is")
        settings = Settings(model)
    settings, usual, few = usual_size(settings, quick)
    own = () if recipe is None else (recipe_row(settings, recipe),)
    usual = tuple(float(row.total or 1) for row in own) or usual
    plan = prepare(
        settings,
        Path(output),
        split_methods(methods),
        usual if totals is None else totals,
        read_schedules(schedule),
        default_prompts(settings.model)[:few] if prompts is None else prompts,
        batch,
        None if model else pipe_or_model,
        own,
    )
    pipe = load(plan.dense) if model else pipe_or_model
    stop = None if minutes is None else begun + 60 * minutes
    return play(plan, pipe, stop, progress or (lambda *_: None))


@dataclass(frozen=True)
class Plan:
    """Everything that is known before weights are read: rows, prompts, settings, the folder."""

    base: Settings
    dense: Settings  # resolved
    rows: tuple[Row, ...]
    results: Results
    folder: Path

    def settings(self, row: Row, asked: float | None, pipe: Any) -> Settings:
        """Those of a row that is asked for a total, resolved."""
        attention = write_method(row.scheduled(asked))
        return replace(self.base, attention=attention).resolve(pipe)


def prepare(
    settings: Settings,
    folder: Path,
    methods: Sequence[str],
    totals: Sequence[float],
    schedules: Sequence[ScheduleSpec],
    prompts: Sequence[str],
    batch: int = 1,
    pipe: Any = None,
    more: Sequence[Row] = (),
) -> Plan:
    """Check all that was asked for; nothing is loaded or written. `more` are further rows."""
    check_count("batch", batch)
    if not totals or not schedules:
        raise InputError("an arena needs at least one total and one schedule")
    check_prompts(prompts)
    specs = [read_method_spec(word) for word in methods]
    bare = ("method", "preset", "config", "budget", "total", "curve", "masks", "recipe",
            "warmup_frac", "dense_first_layer", "attention")  # fmt: skip
    nothing: dict[str, Any] = dict.fromkeys(bare)
    base = replace(settings, options={}, **nothing)
    dense = dense_twin(base).resolve(pipe)
    for schedule, total in itertools.product(schedules, totals):
        schedule.check(total, int(dense.steps or 1))
    check_pages()
    wanted = Results(
        settings=json.loads(json.dumps(dense.to_dict())),
        prompts=tuple(prompts),
        batch=batch,
        machine=machine(str(dense.device)),
        versions=versions(),
        jali=__version__,
        date=time.strftime("%Y-%m-%d"),
    )
    rows = make_rows(specs, schedules, list(dict.fromkeys(map(float, totals))))
    rows = list(dict.fromkeys([*rows, *more]))
    return Plan(base, dense, tuple(rows), find_results(folder, wanted), folder)


def recipe_row(settings: Settings, recipe: Recipe | str | os.PathLike[str]) -> Row:
    """The row of a recipe; refused where it is of another model, or dense."""
    from jali.integration.models.registry import model_card

    found = recipe if isinstance(recipe, Recipe) else Recipe.read(recipe)
    name = model_card(settings.model).name
    if found.model != name:
        raise ArgumentError("recipe", f": it is of the model {found.model}, and this is {name}")
    if found.curve is None:
        raise ArgumentError("recipe", "is dense, which every row is compared with anyway")
    return row_of(found.method, found.curve)


def check_prompts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise TypeError("prompts is a list of texts; put one text in a list")
    if not texts:
        raise InputError("an arena needs at least one prompt")
    for text in texts:
        check_prompt(text)


def play(plan: Plan, pipe: Any, stop: float | None, tell: Tell) -> Leaderboard:
    """Make whatever rows are missing, until `stop`, and write what came of all of them."""
    from jali.integration.attachment import self_attentions
    from jali.integration.modes import transformers_of

    layers = min(len(self_attentions(module)) for _, module in transformers_of(pipe)[1])
    for row in plan.rows:
        if row.schedule is not None and row.total is not None:
            row.schedule.check(row.total, int(plan.dense.steps or 1), layers)
    check_sizes(pipe, plan.dense)
    with hold_folder(plan.folder), measured_speed():
        game = Game(plan, pipe, stop, tell)
        game.play()
        board = Leaderboard.of(game.results, plan.rows)
        write_pages(plan.folder, board)
    return board


@contextlib.contextmanager
def measured_speed() -> Iterator[None]:
    """No forecasts from every single row: here all of them are timed."""
    from jali.integration.forecast import SLOWER

    def is_other(said: logging.LogRecord) -> bool:
        return SLOWER not in said.getMessage()

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


@dataclass
class Game:
    """A session: what was measured so far, and how long things take."""

    plan: Plan
    pipe: Any
    stop: float | None
    tell: Tell
    pace: dict[str, float] = field(default_factory=dict)  # seconds of a method's row

    def __post_init__(self) -> None:
        self.results = self.plan.results
        self.session = self.results.session
        self.studio = Studio(self.pipe, self.results.prompts, self.plan.folder)
        self.broken: set[Row] = set()
        self.done, self.all = 0, 0

    def play(self) -> None:
        todo = {first: self._missing(first) for first in self.results.firsts}
        self.all = sum(map(len, todo.values()))
        if not self.all or self._is_late(None):
            return
        scorer = self.get_ready([row for rows in todo.values() for row in rows])
        for first, rows in todo.items():
            if rows and not self._group(first, rows, scorer):
                return

    def get_ready(self, rows: Sequence[Row]) -> Scorer:
        """Warm up for these rows, and load what judges them."""
        self._warm_up(rows)
        dense = self.plan.dense
        scorer = Scorer.load(self.studio.device, int(dense.height or 1), int(dense.width or 1))
        self.results = replace(self.results, unavailable=scorer.unavailable)
        return scorer

    def _missing(self, first: int) -> list[Row]:
        return [row for row in self.plan.rows if first not in self.results.of(row)]

    def _warm_up(self, rows: Sequence[Row]) -> None:
        """What is loaded and compiled once is in no row's seconds; on a CPU that is compiled blocks
        at most, which dense and sparse runs share."""
        self.tell("warming up", 0, self.all)
        begun = time.monotonic()
        prompts = self.studio.some(self.results.group(0))
        warm_up(self.pipe, [self.plan.dense], *prompts)
        on_gpu = self.studio.device.type != "cpu"
        for row in {row.label: row for row in rows if on_gpu}.values():
            # One that fails here will do so again, where it is told.
            with contextlib.suppress(Exception):
                own = self.plan.settings(row, row.total, self.pipe)
                warm_up(self.pipe, [own], *prompts, decode=False)
        took = time.monotonic() - begun
        self.tell(f"warmed up in {took:.0f} s, which are in no row", 0, self.all)

    def _group(self, first: int, rows: Sequence[Row], scorer: Scorer) -> bool:
        """All rows of a group, between two dense runs; False where the time is over."""
        group = self.results.group(first)
        if self._is_late(None):
            return False
        dense = self.dense(group)
        for row in rows:
            if self._is_late(row):
                return False
            if row in self.broken:
                continue
            self.tell(f"{row}, {_words(group)}", self.done, self.all)
            begun = time.monotonic()
            try:
                self._row(row, group, dense, scorer)
            except OSError:  # no disk, no row
                raise
            except Exception as error:  # the other rows do not depend on this one
                self._note_failure(row, error)
            self.pace[row.label] = time.monotonic() - begun
            self.done += 1
        if not self._is_late(None):
            self._time_dense(group)  # a machine that got slower meanwhile shows in both
        return True

    def _note_failure(self, row: Row, error: Exception) -> None:
        why = f"{type(error).__name__}: {shorten(error)}"
        log.warning("jali: %s failed and is left out: %s", row, why)
        self.broken.add(row)
        self.results = replace(self.results, failed={**self.results.failed, str(row): why})
        self.results.write(self.plan.folder)

    def dense(self, group: range) -> Tensor:
        """The dense clips of a group. Those that were kept count, whoever made them."""
        made = self._time_dense(group)
        kept = self.studio.read_dense(group)
        if kept is None:
            self.studio.keep(DENSE, made, group, not self.studio.has_run(DENSE))
        return made.clips if kept is None else kept

    def _time_dense(self, group: range) -> Made:
        self.tell(f"dense, {_words(group)}", self.done, self.all)
        begun = time.monotonic()
        made = self.studio.make(self.plan.dense, group)
        inside = () if made.stats.seconds is None else (made.stats.seconds,)
        self.results = self.results.with_dense(
            DenseTimes(group.start, self.session, (made.seconds,), inside)
        )
        self.results.write(self.plan.folder)
        self.pace[DENSE] = time.monotonic() - begun
        return made

    def _row(self, row: Row, group: range, dense: Tensor, scorer: Scorer) -> None:
        made, tries = self._matched(row, group)
        self.note(row, group, made, tries, dense, scorer)

    def note(
        self,
        row: Row,
        group: range,
        made: Made,
        tries: Sequence[tuple[float, float]],
        dense: Tensor,
        scorer: Scorer,
        keep: bool = True,
    ) -> None:
        """Judge the clips of a row, and keep what was measured, and the clips where it is said."""
        metrics = scorer.compare(made.clips, dense)
        if keep:
            fresh = not self.results.of(row) or not self.studio.has_run(row.folder)
            self.studio.keep(row.folder, made, group, fresh)
        self.results = self.results.with_record(
            Record(
                method=row.label,
                schedule=row.spread,
                total=row.total,
                first=group.start,
                session=self.session,
                achieved=made.cost,
                planning=made.stats.planning,
                seconds=made.seconds,
                metrics={name: tuple(values) for name, values in metrics.items()},
                asked=tries[0][0] if tries else None,
                tries=tuple(tries),
                seconds_transformer=made.stats.seconds,
                backends=made.backends,
            )
        )
        self.results.write(self.plan.folder)

    def _matched(self, row: Row, group: range) -> tuple[Made, list[tuple[float, float]]]:
        """The clips of a row; what it is asked for is found once, on its first group."""

        def make(asked: float | None) -> Made:
            if row.schedule is not None and asked is not None:
                row.schedule.check(asked, int(self.plan.dense.steps or 1))
            return self.studio.make(self.plan.settings(row, asked, self.pipe), group)

        known = self.results.of(row)
        if row.total is None:
            return make(None), []
        if known:
            asked = next(iter(known.values())).asked
            made = make(asked)
            return made, [(float(asked or 0), made.cost)]
        return matched(row.total, make, self._first_guess(row))

    def _first_guess(self, row: Row) -> float | None:
        """What a method did too much or too little at another total, it does here about so."""
        near = [
            record
            for record in self.results.records
            if (record.method, record.schedule) == (row.label, row.spread) and record.asked
        ]
        if not near or row.total is None:
            return None
        last = min(near, key=lambda record: abs((record.total or 0) - float(row.total or 0)))
        guess = row.total + float(last.asked or 0) - last.achieved
        try:
            assert row.schedule is not None
            row.schedule.check(guess, int(self.plan.dense.steps or 1))
        except ValueError:
            return None
        return guess

    def _is_late(self, row: Row | None) -> bool:
        """Whether the time is over, or would be with this row (or a dense run)."""
        if self.stop is None:
            return False
        longest = max(self.pace.values(), default=0.0)
        needs = self.pace.get(DENSE if row is None else row.label, longest)
        return time.monotonic() + needs > self.stop


def _words(group: range) -> str:
    first, last = group.start + 1, group.stop
    return f"prompt {first}" if first == last else f"prompts {first} to {last}"
