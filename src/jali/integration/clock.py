"""Which step and branch a transformer call is, from what the pipeline itself announces."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers.hooks.hooks import (
    BaseState,
    HookFunctionReference,
    HookRegistry,
    ModelHook,
    StateManager,
)
from torch import Tensor, nn

log = logging.getLogger("jali")
PASSES = ("cond", "uncond")
HOOK = "jali_context"


@dataclass(frozen=True, slots=True)
class Moment:
    """One call of a transformer."""

    step: int
    steps: int
    branch: str


class Context(StateManager):
    """Hears `cache_context(...)`. Up to diffusers 0.40 that is a name, since 0.41 an object."""

    def __init__(self) -> None:
        super().__init__(BaseState)  # type: ignore[arg-type]
        self.name: str | None = None
        self.step: int | None = None
        self.steps: int | None = None

    def set_context(self, context: Any) -> None:
        self.name = getattr(context, "name", context)
        self.step = getattr(context, "step_index", None)
        self.steps = getattr(context, "num_inference_steps", None)


class ContextHook(ModelHook):
    """Owns a `Context`, so that diffusers finds it, and hears the end of a pipeline call."""

    _is_stateful = True

    def __init__(self, on_end: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.context = Context()
        self._on_end = on_end

    def reset_state(self, module: nn.Module) -> nn.Module:
        self._on_end()
        return module


def listen(module: nn.Module, hook: ContextHook) -> bool:
    """Add the hook to the module's registry. Says whether the registry is new.

    It goes first in the list and leaves `module.forward` alone. `register_hook` would wrap
    `forward`, and taking that wrapper out again after accelerate has put in its own (model
    offload does, after every generation) would bring a dead forward back.
    """
    new = not hasattr(module, "_diffusers_hook")
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.hooks[HOOK] = hook
    registry._hook_order.insert(0, HOOK)
    registry._fn_refs.insert(0, HookFunctionReference())
    return new


def stop_listening(module: nn.Module, new: bool) -> None:
    registry: Any = module._diffusers_hook
    index = registry._hook_order.index(HOOK)
    del registry.hooks[HOOK], registry._hook_order[index], registry._fn_refs[index]
    if new and not registry.hooks:
        del module._diffusers_hook


@dataclass(eq=False)
class Clock:
    """Turns a timestep and a context into a `Moment`.

    In order: the step the pipeline announces; the timestep's place in `pipe.scheduler.timesteps`;
    where there is no pipeline, the number of times the timestep has fallen.
    """

    pipe: weakref.ReferenceType[Any] | None = None
    steps: int | None = None
    said: set[str] = field(default_factory=set)
    knows_steps: bool = True  # False where they are counted as they come
    _timestep: float | None = None
    _step: int = 0
    _passes: int = 0
    _asked: tuple[Any, list[float]] | None = None

    def tick(
        self, timestep: Tensor | float | None, context: Context, branches: Mapping[str, str]
    ) -> Moment:
        pipe = None if self.pipe is None else self.pipe()
        if context.step is not None and (steps := context.steps or self._count(pipe)):
            self._step = context.step
            return Moment(context.step, steps, self._branch(context, branches))
        # Tokens of given frames are at timestep 0 (Wan 2.2 TI2V), so the largest one counts.
        # The one wait for the device in a transformer call.
        t = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep or 0)
        self._passes = self._passes + 1 if t == self._timestep else 0
        before, self._timestep = self._timestep, t
        found = None if pipe is None else self._place(pipe, t)
        if found is not None:
            self._step, steps = found
            return Moment(self._step, steps, self._branch(context, branches))
        if before is None or t > before:
            self._step = 0
        elif t < before:
            self._step += 1
        if pipe is not None:
            self.say("steps are counted: this timestep is not one of the scheduler's")
        self.knows_steps = self.steps is not None
        steps = max(self.steps or 0, self._step + 1)
        if self.steps is not None and steps > self.steps:
            self.say(f"more steps than the {self.steps} given as steps=")
        return Moment(self._step, steps, self._branch(context, branches))

    def restart(self) -> None:
        """The next call begins a generation."""
        self._timestep, self._step, self._passes = None, 0, 0

    def say(self, what: str) -> None:
        if what not in self.said:
            self.said.add(what)
            log.warning("jali: %s", what)

    def _branch(self, context: Context, branches: Mapping[str, str]) -> str:
        if context.name is not None:
            return branches.get(context.name, context.name)
        # Nothing is announced: the n-th call at one timestep is the n-th pass.
        return PASSES[self._passes] if self._passes < 2 else f"pass {self._passes}"

    def _count(self, pipe: Any) -> int | None:
        return self.steps or getattr(pipe, "_num_timesteps", None)

    def _place(self, pipe: Any, t: float) -> tuple[int, int] | None:
        """(step, steps) of a timestep among the scheduler's."""
        asked = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
        if not isinstance(asked, Tensor) or asked.numel() == 0:
            return None
        if self._asked is None or self._asked[0] is not asked:
            self._asked = asked, [float(x) for x in asked.tolist()]
        known = self._asked[1]
        # The model may get the timestep in its own dtype; neighbours can look equal there. The
        # pipeline's own value is exact, and the model's must be a rounding of it.
        exact = getattr(pipe, "_current_timestep", None)
        exact = None if exact is None else float(exact)
        if exact is None or not any(abs(t * unit - exact) <= 0.01 * abs(exact) + 1e-3
                                    for unit in (1, 1000)):  # fmt: skip
            exact = t
        for unit in (1, 1000):  # Flux and Qwen-Image pass t / 1000
            near = min(range(len(known)), key=lambda i: (abs(known[i] - exact * unit), i))
            if abs(known[near] - exact * unit) <= 1e-3 * abs(known[near]) + 1e-6:
                # Image to image starts later in the same list.
                steps = getattr(pipe, "_num_timesteps", None) or len(known)
                skipped = len(known) - steps if 0 < steps < len(known) else 0
                if near >= skipped:
                    return near - skipped, len(known) - skipped
        return None
