"""What decides every pixel of a run, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jali.methods import Method
    from jali.presets import Preset


@dataclass(frozen=True)
class Settings:
    """How clips are made; what is None is the model's or the method's default until `resolved`.

    `method` names a method and `options` are its own; `preset` (of this package, or of the file
    `config`) names a method with everything in it; `masks` is a calibrated MaskBook, read by the
    method "cached". `arguments` go to the pipeline as they are. `attention` is the method written
    out in full, schedule included; `resolved` fills it in.

    The clip with number i has the seed `seed + i`.
    """

    model: str
    path: str | None = None
    method: str | None = None
    preset: str | None = None
    config: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: float | None = None
    masks: str | None = None
    backend: str = "auto"
    warmup_frac: float | int | None = None
    dense_first_layer: bool | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    negative_prompt: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    lora: str | None = None
    device: str | None = None
    dtype: str | None = None
    cpu_offload: bool | str = False
    context_parallel: int = 1
    tensor_parallel: int = 1
    attention: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("path", "config", "masks", "lora"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(getattr(self, name)))
        for name in ("context_parallel", "tensor_parallel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a count of at least 1, got {value!r}")
        if self.context_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError("context_parallel and tensor_parallel do not go together yet: one is")

    @property
    def label(self) -> str:
        """The method's name, which names the run's folder."""
        return str(self.attention["method"] if self.attention else self.method or "entropy")

    def resolved(self, pipe: Any = None) -> Settings:
        """With every default filled in, so that equal runs have equal settings.

        Whatever cannot be is refused here, before any weights are read. Device and precision are
        those of a pipeline that is given.
        """
        from jali.integration.models.checkpoint import choose_device, choose_dtype
        from jali.integration.models.registry import model_card

        card = model_card(self.model)
        device = choose_device(self.device)
        dtype = choose_dtype(self.dtype, device)
        if pipe is not None:
            # Of an offloaded pipeline, where it computes.
            own = getattr(pipe, "_execution_device", pipe.device)
            if self.device is not None and own.type != device.type:
                raise ValueError(f"device is {self.device}, but the pipeline is on {own.type}")
            device, dtype = own, pipe.transformer.dtype

        def default(value: Any, usual: Any) -> Any:
            return usual if value is None else value

        named, method, steps = replace(self, model=card.name), self.chosen(), card.steps
        if self.masks is not None:
            from jali.generation.calibrated import steps_of

            steps = steps_of(method)
        return replace(
            named,
            **_written(named, method),
            steps=default(self.steps, steps),
            guidance=default(self.guidance, card.guidance.scale),
            height=default(self.height, card.height),
            width=default(self.width, card.width),
            num_frames=default(self.num_frames, card.frames),
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
        )

    def chosen(self) -> Method:
        """The method with its schedule, exactly as it will run."""
        from jali.integration.modes import chosen_method
        from jali.presets.method import read_method

        if self.attention is not None and self.masks is None:
            method = read_method(self.attention, "attention")
            said = _written(replace(self, budget=None), method)
            for name in ("method", "budget", "warmup_frac", "dense_first_layer"):
                unknown = name == "budget" and said[name] is None  # only the data can tell
                if getattr(self, name) not in (None, said[name]) and not unknown:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, but the method written out in "
                        f"attention has {said[name]!r}; set attention to None to have it made anew"
                    )
            return method
        if self.masks is not None:
            from jali.generation.calibrated import cached_method

            return cached_method(self)
        if self.method == "cached":
            raise ValueError("the method cached reads a calibrated MaskBook: give masks")
        preset = self.chosen_preset()
        return chosen_method(
            self.method or "entropy" if preset is None else preset.method,
            self.budget,
            self.warmup_frac,
            self.dense_first_layer,
            None,
            self._options(),
        )

    def chosen_preset(self) -> Preset | None:
        if self.preset is None and self.config is None:
            return None
        from jali.presets import load_preset

        if self.options:
            raise ValueError(
                f"a preset is complete: {', '.join(self.options)} cannot be added to it; name a "
                f"method instead, or write a preset file of your own"
            )
        preset = load_preset(self.preset, self._card_name(), self.config)
        found = _inner(preset.method).name
        if self.method is not None and self.method != found:
            raise ValueError(
                f"the preset {preset.name!r} is of the method {found}, but the method asked for "
                f"is {self.method}; leave one of the two out"
            )
        return preset

    def _options(self) -> dict[str, Any]:
        """Plain values, as on a command line or in a manifest, become what the method takes."""
        if not self.options:
            return {}
        from jali.presets.method import read_method

        made = read_method(
            {"method": self.method or "entropy", "options": dict(self.options)}, "the method"
        )
        return {name: getattr(made, name) for name in self.options}

    def _card_name(self) -> str:
        from jali.integration.models.registry import model_card

        return model_card(self.model).name

    # As plain values

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
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Settings) -> dict[str, tuple[Any, Any]]:
        """(here, there) of every setting that is not the same, as both are written down."""
        here, there = (json.loads(json.dumps(s.to_dict())) for s in (self, other))
        return {name: (here[name], there[name]) for name in here if here[name] != there[name]}


def _inner(method: Method) -> Method:
    from jali.methods import Schedule

    return _inner(method.inner) if isinstance(method, Schedule) else method


def _written(settings: Settings, method: Method) -> dict[str, Any]:
    """What the method says of itself, for the settings that name it."""
    from jali.methods import Dense, Schedule
    from jali.presets.method import write_method

    schedule = method if isinstance(method, Schedule) else Schedule(method)
    inner = _inner(method)
    if settings.masks is not None:
        from jali.generation.calibrated import written

        attention = written(method)
    else:
        attention = write_method(method)
    budget = settings.budget if settings.budget is not None else method.asked
    return {
        "method": inner.name,
        "options": dict(settings.options),
        "budget": None if budget is None else round(budget, 9),
        "warmup_frac": None if isinstance(inner, Dense) else schedule.dense_steps,
        "dense_first_layer": None if isinstance(inner, Dense) else 0 in schedule.dense_layers,
        "attention": json.loads(json.dumps(attention)),
    }


def dense_twin(settings: Settings) -> Settings:
    """The same run with dense attention, resolved."""
    bare: dict[str, Any] = {"method": "dense", "options": {}}
    bare |= dict.fromkeys(
        ("preset", "config", "budget", "masks", "warmup_frac", "dense_first_layer", "attention")
    )
    twin = replace(settings, **bare)
    return replace(twin, **_written(twin, twin.chosen()))
