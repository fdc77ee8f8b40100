"""What decides every pixel of a run, and nothing else."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali import files
from jali.error import show
from jali.generation.setting import MOST, SettingDescription, SettingError, count, setting
from jali.name import NO_RECIPE, USUAL, is_recipe_file, shipped_recipe
from jali.planning.curve import SHAPES

if TYPE_CHECKING:
    from jali.integration.recipe import Recipe
    from jali.methods import Method
    from jali.presets import Preset

log = logging.getLogger("jali")

ATTENTION, SIZE, PLACE = "Attention", "What is made", "Where and how it runs"
LARGEST_SEED = 2**63 - 1  # torch takes 64 bits, and clip i has seed + i
LATER = ("recipe", "compile")  # settings that manifests of the same version may lack


@dataclass(frozen=True)
class Settings:
    """How clips are made; what is None is the model's or the method's default until `resolve`.

    `method` names a method and `options` are its own; `preset` (of this package, or of the file
    `config`) names a method with everything in it, and so does a `recipe`, which also has the usual
    size and steps; `masks` is a calibrated MaskBook, read by the method "cached". `arguments` go to
    the pipeline as they are. `attention` is the method written out in full, schedule included;
    `resolve` fills it in.

    The clip with number i has the seed `seed + i`. A value that cannot be raises `SettingError`,
    a ValueError that names it.

    >>> Settings("nano", budget=0.3, steps=8).resolve().method
    'rd'
    """

    # fmt: off
    model: str = setting(
        str, MISSING, None, "A name of the registry; see `jali doctor`.", usual="nano")
    path: str | None = setting(str, None, PLACE, "Local folder or hub id, not the usual one.")
    method: str | None = setting(str, None, ATTENTION, "One of {methods}.", shown=USUAL)
    preset: str | None = setting(
        str, None, ATTENTION, "A method by preset; see `jali presets`. Or a recipe's file.")
    config: str | None = setting(Path, None, ATTENTION, "A preset file, jali's or PSA's.")
    options: Mapping[str, Any] = setting(
        Mapping, Mapping, ATTENTION, "NAME=VALUE of the method's own, again for more.",
        flag="--option")
    budget: float | None = setting(
        float, None, ATTENTION, "Asked share of dense attention's work.",
        shown="the preset's or method's own, or a total",
        rule="a number above 0 and at most 1", least=math.ulp(0.0), most=1)
    total: float | None = setting(
        float, None, ATTENTION, "Asked share of all attention work of the run; or a budget.",
        shown="0.5, or the preset's or method's own",
        rule="a number above 0 and at most 1", least=math.ulp(0.0), most=1)
    curve: str | None = setting(
        str, None, ATTENTION, "How a total is spread: exponential, linear, flat, or numbers with "
        "commas.", shown="exponential; linear from a total of 0.55 on, but not for rd")
    masks: str | None = setting(Path, None, ATTENTION, "A calibrated MaskBook: the method cached.")
    recipe: str | None = setting(
        Path, None, ATTENTION, "What `jali tune` found: method, total and curve; none: not the "
        "model's own.")
    backend: str = setting(str, "auto", ATTENTION, "auto, or one of `jali doctor`.")
    warmup_frac: float | int | None = setting(
        float, None, ATTENTION, "Share of dense first steps.", shown="0.2, or the preset's",
        rule="a share in [0, 1]", least=0, most=1)
    dense_first_layer: bool | None = setting(
        bool, None, ATTENTION, "Whether layer 0 stays dense.",
        flag="--dense-first-layer/--sparse-first-layer")
    steps: int | None = count(None, SIZE, "Of denoising.")
    guidance: float | None = setting(
        float, None, SIZE, "How strongly the prompt counts.", shown="the model's",
        rule="a number of at least 0", least=0)
    seed: int = setting(
        int, 0, SIZE, "Of the noise; clip i has seed + i.",
        rule="a whole number of at least 0", least=0, most=LARGEST_SEED)
    height: int | None = count(None, SIZE, "In pixels.")
    width: int | None = count(None, SIZE, "In pixels.")
    num_frames: int | None = count(None, SIZE, "Images have one.")
    negative_prompt: str | None = setting(str, None, SIZE, "What to keep away from.", others=("",))
    arguments: Mapping[str, Any] = setting(
        Mapping, Mapping, SIZE, "NAME=VALUE for the pipeline's own call, again for more.",
        flag="--argument")
    lora: str | None = setting(str, None, SIZE, "A file, a folder, or REPO:FOLDER/FILE.")
    device: str | None = setting(str, None, PLACE, "cuda or cpu; cuda where there is one.")
    dtype: str | None = setting(str, None, PLACE, "bf16, fp16 or fp32.")
    cpu_offload: bool | str = setting(
        bool, False, PLACE, "Parts wait in host memory.",
        others=("model", "sequential"), flag="--cpu-offload")
    compile: bool | None = setting(
        bool, None, PLACE, "Compile the transformer's blocks; the first clip takes longer.",
        flag="--compile")
    context_parallel: int = count(1, PLACE, "Ranks that share a sequence (torchrun).")
    tensor_parallel: int = count(1, PLACE, "Ranks that share the weights (torchrun).")
    attention: Mapping[str, Any] | None = setting(Mapping, None, None, "")
    # fmt: on

    def __post_init__(self) -> None:
        if is_recipe_file(self.preset) and self.recipe is None:
            object.__setattr__(self, "recipe", self.preset)
            object.__setattr__(self, "preset", None)
        for own in fields(self):
            value, about = getattr(self, own.name), own.metadata["description"]
            if about.kind in (str, Path) and isinstance(value, Path):
                object.__setattr__(self, own.name, str(value))
            elif type(value).__module__ == "torch":  # a torch.device or torch.dtype
                object.__setattr__(self, own.name, str(value).removeprefix("torch."))
            elif not (value is None and own.default is None):
                self._check(own.name, value, about)
        if self.context_parallel > 1 and self.tensor_parallel > 1:
            raise SettingError(
                "context_parallel", "and `tensor_parallel` do not go together; leave one at 1"
            )

    def _check(self, name: str, value: Any, about: SettingDescription) -> None:
        if name == "budget" and value == 0 and self.attention is not None:
            return  # of a method written out, which may ask for nothing beyond forced blocks
        if name == "warmup_frac" and isinstance(value, int):  # a count of steps
            about = replace(about, most=MOST, rule="a share in [0, 1], or a count of steps")
        about.check(name, value)

    @property
    def label(self) -> str:
        """The method's name, which names the run's folder."""
        return str(self.attention["method"] if self.attention else self.method or USUAL)

    def resolve(self, pipe: Any = None) -> Settings:
        """With every default filled in, so that equal runs have equal settings.

        Whatever cannot be is refused here, before any weights are read, and a run in which nothing
        will be sparse is warned of. Device and precision are those of a pipeline that is given.
        """
        from jali.backends import Task, choose
        from jali.generation.check import check_arguments
        from jali.integration.models.checkpoint import choose_device, choose_dtype
        from jali.integration.models.registry import model_card
        from jali.methods import Dense

        card = model_card(self.model)
        if pipe is None:
            self.check()
        if pipe is None and self.arguments:
            check_arguments(self)
        device = choose_device(self.device)
        dtype = choose_dtype(self.dtype, device)
        if pipe is not None:
            # Of an offloaded pipeline, where it computes.
            where = getattr(pipe, "_execution_device", pipe.device)
            if self.device is not None and where.type != device.type:
                raise ValueError(f"device is {self.device}, but the pipeline is on {where.type}")
            device, dtype = where, pipe.transformer.dtype

        method, steps = self.make_method(), card.steps
        if pipe is None and self.path is None and not isinstance(_inner(method), Dense):
            task = Task(
                device, dtype, card.head_dim, card.heads, card.heads, card.tokens, card.tokens,
                method.ratios,
            )  # fmt: skip
            try:
                choose(self.backend, task)
            except ValueError as error:
                raise SettingError("backend", f": {error}") from None
        if self.masks is not None:
            from jali.generation.calibrated import steps_of

            steps = steps_of(method) or card.steps
        usual = {
            "steps": steps,
            "guidance": card.guidance.scale,
            "height": card.height,
            "width": card.width,
            "num_frames": card.frames,
        }
        recipe = self.find_recipe()
        if recipe is not None:
            usual |= asdict(recipe.run)
        own: dict[str, Any] = {n: v for n, v in usual.items() if getattr(self, n) is None}
        own |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
        own |= {"recipe": None} if recipe is None else {}
        own |= {"compile": self.compile or None}
        found = replace(self, model=card.name, **_describe(self, method), **own)
        if self.attention is None:  # what was resolved before was told before
            self._tell_before(method, int(found.steps or 0))
            other = None if recipe is None else recipe.warning(found.pick(*usual))
            # What comes with a model is said with its own size; nobody asked for another.
            if other is not None and self.recipe != shipped_recipe(card.name):
                log.warning("jali: %s", other)
        return found

    def _tell_before(self, method: Method, steps: int) -> None:
        """What to know before a run, as warnings; a total that cannot be had is refused."""
        from jali.methods.schedule import Schedule, why_never_sparse

        if isinstance(method, Schedule):
            method.check_total(steps)

        preset = self.find_preset()
        notes = [] if preset is None else [f"preset {preset.name}: {n}" for n in preset.notes]
        for sentence in (*notes, why_never_sparse(method, steps)):
            if sentence is not None:
                log.warning("jali: %s", sentence)

    def check(self) -> None:
        """Refuse what can be told without torch, which takes seconds to load."""
        from jali.generation.check import check_settings

        check_settings(self)

    def make_method(self) -> Method:
        """The method with its schedule, exactly as it will run."""
        from jali.generation.check import check_attention
        from jali.integration.choice import chosen_method
        from jali.presets.method import read_method

        check_attention(self)
        if self.attention is not None and self.masks is None:
            method = read_method(self.attention, "attention")
            said = _describe(replace(self, budget=None, total=None, curve=None), method)
            for name in ("method", "budget", "total", "curve", "warmup_frac", "dense_first_layer"):
                # Where nothing else is asked, only the data can tell what it costs.
                unknown = name == "budget" and said["budget"] is said["total"] is None
                if getattr(self, name) not in (None, said[name]) and not unknown:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, but the method written out in "
                        f"attention has {said[name]!r}; set attention to None to have it made anew"
                    )
            return method
        if self.masks is not None:
            from jali.generation.calibrated import cached_method

            return cached_method(self)
        recipe = self.find_recipe()
        if recipe is not None:
            return recipe.scheduled
        preset = self.find_preset()
        return chosen_method(
            self.method or USUAL if preset is None else preset.method,
            self.budget,
            self.warmup_frac,
            self.dense_first_layer,
            None,
            self._options(),
            self.total,
            self.curve_shape,
        )

    @property
    def curve_shape(self) -> str | tuple[float, ...] | None:
        """The shape of the curve: a name, or relative budgets along the run."""
        if self.curve is None or self.curve in SHAPES:
            return self.curve
        try:
            numbers = tuple(float(number) for number in self.curve.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number < math.inf for number in numbers):
            must = f"must be {', '.join(SHAPES)}, or numbers above 0 with commas"
            raise SettingError("curve", f"{must}, got {show(self.curve)}")
        return numbers

    def find_recipe(self) -> Recipe | None:
        """What its file holds; refused where it is of another model."""
        if self.recipe in (None, NO_RECIPE):
            return None
        from jali.integration.models.registry import model_card
        from jali.integration.recipe import Recipe

        found, card = Recipe.read(str(self.recipe)), model_card(self.model)
        if found.model != card.name:
            raise SettingError(
                "recipe",
                f": {self.recipe} is of the model {found.model}, and this is {card.name}; "
                f"jali tune makes one",
            )
        return found

    def find_preset(self) -> Preset | None:
        if self.preset is None and self.config is None:
            return None
        from jali.integration.models.registry import model_card
        from jali.presets import load_preset

        preset = load_preset(self.preset, model_card(self.model).name, self.config)
        found = _inner(preset.method).name
        if self.method is not None and self.method != found:
            raise SettingError(
                "preset",
                f": the preset {preset.name!r} is of the method {found}, but the method asked for "
                f"is {self.method}; leave one of the two out",
            )
        return preset

    def _options(self) -> dict[str, Any]:
        """Plain values, as on a command line or in a manifest, become what the method takes."""
        if not self.options:
            return {}
        from jali.presets.method import read_method

        name = self.method or USUAL
        try:
            made = read_method({"method": name, "options": dict(self.options)}, f"method {name}")
        except ValueError as error:
            raise SettingError("options", f": {error}") from None
        return {name: getattr(made, name) for name in self.options}

    # As plain values

    def pick(self, *names: str) -> dict[str, Any]:
        """These settings by name, as arguments for a call."""
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "settings") -> Settings:
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise ValueError(f"{source} has the setting {name!r}, which this jali has not")
        if "model" not in data:
            raise ValueError(f"{source} names no model")
        return cls(**data)

    @property
    def digest(self) -> str:
        """SHA-256 of the settings as canonical JSON."""
        # What came later counts where it is set: folders that were written before keep theirs.
        told = {name: v for name, v in self.to_dict().items() if v is not None or name not in LATER}
        text = json.dumps(told, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return files.digest(text)

    def differences(self, other: Settings) -> dict[str, tuple[Any, Any]]:
        """(here, there) of every setting that is not the same, as both are written down."""
        here, there = (json.loads(json.dumps(s.to_dict())) for s in (self, other))
        for plain in (here, there):
            plain["attention"] = _written_anew(plain["attention"])
        return {name: (here[name], there[name]) for name in here if here[name] != there[name]}


def _inner(method: Method) -> Method:
    from jali.methods import Schedule

    return _inner(method.inner) if isinstance(method, Schedule) else method


def _written_anew(attention: Any) -> Any:
    """A written method as this version writes it: options that an older one did not know have
    their defaults. What it cannot read (a replayed book) stays as it is."""
    from jali.presets.method import read_method, write_method

    if attention is None or "book" in attention.get("options", {}):
        return attention
    try:
        return json.loads(json.dumps(write_method(read_method(attention, "attention"))))
    except (ValueError, TypeError):
        return attention


def _describe(settings: Settings, method: Method) -> dict[str, Any]:
    """What the method says of itself, for the settings that name it."""
    from jali.methods import Dense, Schedule
    from jali.presets.method import write_method

    schedule = method if isinstance(method, Schedule) else Schedule(method)
    inner = _inner(method)
    if settings.masks is not None:
        from jali.generation.calibrated import describe_method

        attention = describe_method(method)
    else:
        attention = write_method(method)
    budget = settings.budget if settings.budget is not None else method.mean_budget
    curve = schedule.curve
    if curve is not None:  # what was asked for is the total
        budget = None
    return {
        "method": inner.name,
        "options": dict(settings.options),
        "budget": None if budget is None else round(budget, 9),
        "total": None if curve is None else curve.total,
        "curve": None if curve is None else curve.words,
        "warmup_frac": None if isinstance(inner, Dense) else schedule.dense_steps,
        "dense_first_layer": None if isinstance(inner, Dense) else 0 in schedule.dense_layers,
        "attention": json.loads(json.dumps(attention)),
    }


ASKED = ("method", "preset", "config", "budget", "total", "curve", "masks", "recipe",
         "warmup_frac", "dense_first_layer", "attention")  # fmt: skip


def with_shipped_recipe(settings: Settings) -> Settings:
    """With the recipe that comes with the model, where nothing at all is asked of attention. Its
    size is not taken: what a model makes by itself stays as it is."""
    from jali.integration.models.registry import model_card

    name = shipped_recipe(settings.model)
    asked = settings.options or any(getattr(settings, one) is not None for one in ASKED)
    if name is None or asked or settings.path is not None:
        return settings
    card = model_card(settings.model)
    size = {"steps": card.steps, "guidance": card.guidance.scale, "height": card.height,
            "width": card.width, "num_frames": card.frames}  # fmt: skip
    own: dict[str, Any] = {n: v for n, v in size.items() if getattr(settings, n) is None}
    return replace(settings, recipe=name, **own)


def dense_twin(settings: Settings) -> Settings:
    """The same run with dense attention, resolved."""
    bare: dict[str, Any] = {"method": "dense", "options": {}}
    bare |= dict.fromkeys(name for name in ASKED if name != "method")
    twin = replace(settings, **bare)
    return replace(twin, **_describe(twin, twin.make_method()))
