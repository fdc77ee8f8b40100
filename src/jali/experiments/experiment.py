"""One experiment: everything that decides its numbers, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from jali.experiments.results import check_tag
from jali.generation.prompts import check_prompt
from jali.generation.setting import COUNT, SettingDescription, SettingError
from jali.generation.settings import LATER, Settings

DENSE = "dense"  # a variant of every experiment
RECIPE = "recipe"  # the variant of one that `jali tune` made
CACHED = "cached"  # the variant that replays a calibrated book
# The settings of a run that an experiment may choose.
SETTINGS = (
    "model", "path", "height", "width", "num_frames", "steps", "guidance", "seed", "method",
    "preset", "recipe", "budget", "warmup_frac", "dense_first_layer", "backend", "masks",
    "cpu_offload", "compile", "context_parallel", "tensor_parallel", "device", "dtype",
)  # fmt: skip
COUNTS = ("num_prompts", "calibration_prompts", "bench_steps", "bench_repeats", "threads")
A_COUNT = SettingDescription(int, "", None, COUNT, least=1)


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Experiment:
    """Calibrate, benchmark, quality, report: of one model, size, method and budget.

    `settings` say how the sparse clips are made; whatever of them is in `SETTINGS` may be given by
    its own name. `completed` fills in what is None with the model's and the method's defaults; only
    such an experiment is run. Dense is part of every experiment, and `cached` of those that have a
    book: made by the calibrate stage, or given as `masks`. Metrics that are not named are all that
    can run where the job runs.

    >>> Experiment(tag="first", model="nano", budget=0.3).completed().settings.steps
    50
    """

    tag: str
    settings: Settings
    num_prompts: int = 5
    prompts: tuple[str, ...] | None = None
    calibrate: bool = True
    calibration_prompts: int = 2
    bench_steps: int = 5
    bench_repeats: int = 3
    metrics: tuple[str, ...] | None = None
    threads: int | None = None

    def __init__(self, *, tag: str, settings: Settings | None = None, **facts: Any) -> None:
        own = [f for f in fields(Experiment) if f.name not in ("tag", "settings")]
        known = {*SETTINGS, *(f.name for f in own)}
        if unknown := sorted(set(facts) - known):
            raise ValueError(f"an experiment has no {', '.join(unknown)}; known: {sorted(known)}")
        values = {f.name: facts.pop(f.name, f.default) for f in own}
        for name in ("prompts", "metrics"):
            values[name] = None if values[name] is None else tuple(values[name])
        made = Settings(**facts) if settings is None else replace(settings, **facts)
        if made.method in (None, "entropy"):  # as it is written down, where a preset has its own
            named = made.preset is not None or made.recipe is not None
            made = replace(made, method=None if named else "entropy")
        for name, value in {"tag": check_tag(tag), "settings": made, **values}.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name in COUNTS:
            if name != "threads" or self.threads is not None:
                A_COUNT.check(name, getattr(self, name))
        if not isinstance(self.calibrate, bool):
            raise SettingError("calibrate", f"must be true or false, got {self.calibrate!r}")
        if self.prompts is not None and not (self.prompts and all(self.prompts)):
            raise ValueError("prompts must be at least one text, and none of them empty")
        for prompt in self.prompts or ():
            check_prompt(prompt)
        if self.metrics is not None and not self.metrics:
            raise ValueError("name at least one metric, e.g. psnr")
        if self.settings.preset is not None and self.settings.method is not None:
            raise ValueError("give a method or a preset, not both: a preset names its method")
        if self.settings.recipe is not None:
            from jali.generation.check import check_attention

            check_attention(self.settings)

    @property
    def ranks(self) -> int:
        return max(self.settings.context_parallel, self.settings.tensor_parallel)

    @property
    def variant(self) -> str:
        """What the sparse rows are called."""
        if self.settings.recipe is not None:
            return RECIPE
        return str(self.settings.preset or self.settings.method)

    @property
    def wants_book(self) -> bool:
        """Whether there is something to calibrate: entropy's importance is what a book holds."""
        recorded = self.settings.preset is None and self.variant in ("entropy", CACHED)
        return recorded and self.calibrate and self.settings.masks is None

    @property
    def has_book(self) -> bool:
        return self.wants_book or self.settings.masks is not None

    @property
    def variants(self) -> tuple[str, ...]:
        """The sparse runs of this experiment."""
        cached = (CACHED,) if self.has_book and self.variant != CACHED else ()
        return (self.variant, *cached)

    @property
    def dense_settings(self) -> Settings:
        """How the dense clips are made."""
        return replace(
            self.settings, method=DENSE, preset=None, recipe=None, budget=None, warmup_frac=None,
            dense_first_layer=None, masks=None,
        )  # fmt: skip

    def completed(self) -> Experiment:
        """With every default filled in, checked against the registry and the methods."""
        from jali.backends import check_name
        from jali.integration.models.registry import model_card

        asked, card = self.settings, model_card(self.settings.model)
        self._check_names(card.name)
        check_name(asked.backend)
        usual: dict[str, Any] = {
            "height": card.height, "width": card.width, "num_frames": card.frames,
            "steps": card.steps, "guidance": card.guidance.scale,
        }  # fmt: skip
        recipe = asked.find_recipe()
        if recipe is not None:
            usual |= asdict(recipe.run)
        elif asked.preset is None:
            usual |= {"budget": 0.5, "warmup_frac": 0.2, "dense_first_layer": True}
        missing = {name: value for name, value in usual.items() if getattr(asked, name) is None}
        found = replace(asked, model=card.name, **missing)
        check_static_size(found)
        return replace(self, settings=found)

    def _check_names(self, model: str) -> None:
        """Refuse a preset, method or metric that there is not, or not for such an experiment."""
        from jali.methods import METHODS
        from jali.value import suggest

        asked = self.settings
        if self.variant == RECIPE:
            asked.find_recipe()
        elif asked.preset is not None:
            from jali.presets import load_preset

            load_preset(asked.preset, model)
        elif self.variant == DENSE:
            raise ValueError("dense is measured in every experiment; name a sparse method")
        elif self.variant not in METHODS and self.variant != CACHED:
            known = [name for name in (*METHODS, CACHED) if name != DENSE]
            raise ValueError(f"unknown method {self.variant!r}{suggest(self.variant, known)}")
        if self.ranks > 1 and self.wants_book:
            raise ValueError(
                "calibrating needs every head in one process: with context_parallel or "
                "tensor_parallel give masks (a book made on one GPU serves), or skip calibration"
            )
        if self.variant == CACHED and not self.has_book:
            raise ValueError("method cached needs masks, or the calibrate stage")
        if self.metrics is not None:
            from jali.evaluation.quality.evaluation import METRICS

            for name in self.metrics:
                if name not in METRICS:
                    raise ValueError(f"unknown metric {name!r}{suggest(name, METRICS)}")

    def to_dict(self) -> dict[str, Any]:
        """Flat: the settings of the run are beside the experiment's own."""
        found = {name: getattr(self.settings, name) for name in SETTINGS}
        found["method"] = found["method"] or "entropy"
        for name in LATER:  # as it was written before there were any
            if not found[name]:
                del found[name]
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return found | {n: list(v) if isinstance(v, tuple) else v for n, v in own.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Experiment:
        return cls(**data)

    def differences(self, other: Experiment) -> list[str]:
        """What of another experiment is not the same, in words. A tag cannot change a number."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{name} {theirs.get(name)!r}, now {mine.get(name)!r}"
            for name in dict.fromkeys([*mine, *theirs])
            if name != "tag" and mine.get(name) != theirs.get(name)
        ]


def check_static_size(settings: Settings) -> None:
    """Refuse a size that a model cannot make, before any of it is loaded or submitted."""
    from jali.experiments.scale import known_strides
    from jali.integration.models.registry import model_card
    from jali.integration.models.size import check_size

    strides, s = known_strides(settings.model), settings
    if strides is not None:
        check_size(strides, s.height or 0, s.width or 0, s.num_frames or 0, model_card(s.model))
