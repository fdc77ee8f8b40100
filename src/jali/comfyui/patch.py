"""A sparse model of ComfyUI: what is called around its sampling, its model and its attention.

    OUTER_SAMPLE     a generation begins and ends
    DIFFUSION_MODEL  one call of the model: which step it is, which branches its batch holds
    the override     one attention: sparse, or whoever was asked before

All that is set in the model is there during its call only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from jali.adapters import Run, attention
from jali.comfyui.family import Family
from jali.integration.stats import CallRecord
from jali.tokens.grid import TokenGrid

log = logging.getLogger("jali")

KEY = "jali"
OVERRIDE = "optimized_attention_override"
NAMES = {0: "cond", 1: "uncond"}  # as ComfyUI numbers them


@dataclass(eq=False)
class Patch:
    """What a patched model carries: its run, and what to do where it cannot be sparse."""

    run: Run
    family: Family
    on_error: str = "error"
    verbose: bool = False

    def __post_init__(self) -> None:
        self._said: set[Any] = set()
        self._branches: dict[Any, str] = {}
        self._sigmas: tuple[Tensor, list[float]] | None = None
        if self.verbose:
            self.run.watch = self._show

    def around_sampling(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """A generation, whether it comes to its end or not."""
        self.run.begin()
        self._branches.clear()
        try:
            return executor(*args, **kwargs)
        finally:
            self._sigmas = None
            self.run.finish()

    def around_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the model."""
        given = arguments(executor.original, args, kwargs)
        options = given.get("transformer_options")
        moment = self._moment(options)
        if isinstance(moment, str):
            self.decline(moment)
            return executor(*args, **kwargs)
        assert isinstance(options, dict)
        call = ModelCall(self, executor.class_obj, given, *moment, options.get(OVERRIDE))
        with call.heard(), _set(options, OVERRIDE, call.attend):
            return executor(*args, **kwargs)

    def _moment(self, options: Any) -> tuple[int, int, tuple[str, ...]] | str:
        """Step, steps and the branches in the batch, from what the sampler says."""
        if not isinstance(options, dict):
            return "this model hands no transformer_options on: the step is not known"
        now, planned = options.get("sigmas"), options.get("sample_sigmas")
        if not isinstance(now, Tensor) or not isinstance(planned, Tensor) or len(planned) < 2:
            return "this sampler does not say its sigmas: the step is not known"
        if self._sigmas is None or self._sigmas[0] is not planned:
            self._sigmas = planned, planned.tolist()
        step, steps = step_of(float(now[0]), self._sigmas[1])
        return step, steps, self._names(options)

    def _names(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The branch of every share of the batch. Several prompts of one kind (areas, schedules),
        and windows of a long video, are branches of their own: none may find another's tables."""
        kinds = options.get("cond_or_uncond") or [0]
        prompts = options.get("uuids") or [None] * len(kinds)
        window = getattr(options.get("context_window"), "index_list", None)
        names = []
        for kind, prompt in zip(kinds, prompts, strict=True):
            key = kind, prompt, None if window is None else tuple(window)
            if key not in self._branches:
                like = sum(known[0] == kind for known in self._branches)
                name = NAMES.get(kind, f"cond {kind}")
                self._branches[key] = f"{name} {like + 1}" if like else name
            names.append(self._branches[key])
        return tuple(names)

    def decline(self, why: str) -> None:
        """Something cannot be sparse that was asked for."""
        if self.on_error != "dense":
            raise ValueError(
                f"jali Sparse Attention: {why}. Choose on_error: dense to go on without it"
            )
        if why not in self._said:
            self._said.add(why)
            log.warning("jali: %s; it stays dense", why)

    def show(self, what: str, *shape: Any) -> None:
        """Say something once per shape, where that is wanted."""
        if self.verbose and (what, *shape) not in self._said:
            self._said.add((what, *shape))
            log.info("jali: %s tokens: %s", "×".join(map(str, shape)), what)

    def _show(self, record: CallRecord) -> None:
        self.show(f"dense, {record.reason}" if record.reason else "sparse", record.tokens)


@dataclass(eq=False)
class ModelCall:
    """One call of a model, and the self-attention it is in."""

    patch: Patch
    model: nn.Module
    given: Mapping[str, Any]
    step: int
    steps: int
    branches: tuple[str, ...]
    previous: Callable[..., Tensor] | None
    layer: int | None = None
    layers: int = 0
    grids: dict[int, TokenGrid | str] = field(default_factory=dict)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, `layer` is the self-attention that runs, and None outside of all: neither has to
        be guessed from shapes or counted."""
        found = self.patch.family.attentions(self.model)
        self.layers = len(found)
        handles: list[Any] = []
        try:
            for index, module in enumerate(found):
                handles.append(module.register_forward_pre_hook(self._enter(index)))
                handles.append(module.register_forward_hook(self._leave))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, index: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:  # noqa: ARG001
            self.layer = index

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        self.layer = None

    def attend(
        self, func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int,
        mask: Tensor | None = None, attn_precision: Any = None, skip_reshape: bool = False,
        skip_output_reshape: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """What ComfyUI calls instead of `func`."""

        def host() -> Tensor:
            ask = func if self.previous is None else functools.partial(self.previous, func)
            return ask(
                q, k, v, heads, mask=mask, attn_precision=attn_precision,
                skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **kwargs,
            )  # fmt: skip

        tokens = -2 if skip_reshape else 1
        if self.layer is None:
            what = "dense, not one of the model's self-attentions"
            self.patch.show(what, q.shape[tokens], k.shape[tokens])
            return host()
        grid = _why_not(q, k, v, mask, attn_precision, kwargs) or self._grid(q.shape[tokens])
        layout, own = "bhsd", [q, k, v]
        if not skip_reshape:
            layout, own = "bshd", [x.unflatten(-1, (heads, -1)) for x in own]
        try:
            out = attention(
                *own, layout=layout, grid=grid, step=self.step, steps=self.steps,
                layer=self.layer, layers=self.layers, branch=self.branches, run=self.patch.run,
                scale=kwargs.get("scale"), dense=lambda: own[0],
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            self.patch.decline(str(error))
            return host()
        if out is own[0]:  # it stays dense: the host is asked here, where its errors are its own
            return host()
        if skip_reshape:
            return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _grid(self, tokens: int) -> TokenGrid | str:
        if tokens not in self.grids:
            grid = self.grids[tokens] = self.patch.family.grid(self.model, self.given, tokens)
            if isinstance(grid, str):
                self.patch.decline(grid)
        return self.grids[tokens]


def _why_not(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, precision: Any, more: Mapping[str, Any]
) -> str | None:
    """What no plan can keep."""
    if mask is not None:
        return f"a mask {list(mask.shape)}"
    if precision is not None:
        return f"a precision of its own ({precision})"
    if q.shape != k.shape or q.shape != v.shape or more.get("enable_gqa"):
        return "keys of another shape than the queries"
    return None


def step_of(sigma: float, planned: Sequence[float]) -> tuple[int, int]:
    """The step in which a sigma lies, and how many there are: the last whose own is not below it.
    Samplers of higher order also call the model between two."""
    steps = len(planned) - 1
    reached = [i for i in range(steps) if planned[i] >= sigma * (1 - 1e-4)]
    return (reached[-1] if reached else 0), steps


def arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = _names_of(getattr(function, "__func__", function))
    bound = inspect.ismethod(function)
    return {**dict(zip(names[1:] if bound else names, args, strict=False)), **kwargs}


@functools.lru_cache(maxsize=32)
def _names_of(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@contextlib.contextmanager
def _set(options: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """An entry of a dict that others read too, until the end."""
    missing = object()
    before = options.get(name, missing)
    options[name] = value
    try:
        yield
    finally:
        if before is missing:
            options.pop(name, None)
        else:
            options[name] = before
