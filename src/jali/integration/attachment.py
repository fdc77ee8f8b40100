"""Putting a run into a transformer, and taking it out again."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jali.integration import operator, parallel
from jali.integration.clock import ContextHook, listen, stop_listening
from jali.integration.families import family_of
from jali.integration.geometry import patch_of
from jali.integration.processor import SparseProcessor, carry_over, make_sparse, refuse_copy
from jali.integration.run import Run
from jali.integration.transformer import RunTransformer, count_weights


@dataclass(eq=False)
class Attachment:
    """Everything that was changed in one transformer."""

    module: nn.Module
    processors: list[tuple[Any, SparseProcessor]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    listening: bool = False
    new_registry: bool = False

    def detach(self) -> None:
        """Bring back what was there. Safe to call twice, and half way through attaching."""
        for attn, ours in self.processors:
            if attn.processor is ours:  # someone may have put in another one since
                _put(attn, carry_over(ours))
        for handle in self.handles:
            handle.remove()
        vars(self.module).pop("__reduce_ex__", None)
        if self.listening:
            stop_listening(self.module, self.new_registry)
        self.processors, self.handles, self.listening = [], [], False


def unwrapped(module: Any) -> Any:
    """The module inside a compiled one."""
    return getattr(module, "_orig_mod", module)


def self_attentions(module: nn.Module) -> list[Any]:
    """The self-attentions, in order of execution. Refuses what cannot be made sparse."""
    family = family_of(module)
    found = [(n, m) for n, m in module.named_modules() if re.search(family.layers, n)]
    if not found:
        raise ValueError(
            f"no module of this {type(module).__name__} matches {family.layers!r}: "
            f"there is no self-attention to make sparse"
        )
    for name, attn in found:
        if isinstance(attn.processor, SparseProcessor):
            raise ValueError(
                f"this {type(module).__name__} is sparse already; leave that mode, or call "
                f".remove() on its handle, first"
            )
        ranks = getattr(attn.processor, "_parallel_config", None)
        if ranks is not None and ranks.context_parallel_config is not None:
            parallel.check(ranks)
        reached = family.attention_call != "dispatcher" or hasattr(
            attn.processor, "_attention_backend"
        )
        if not reached and not isinstance(attn.processor, nn.Module):
            raise ValueError(
                f"{name} has a {type(attn.processor).__name__}, which does not go through "
                f"diffusers' attention dispatcher, so jali cannot reach its attention; restore "
                f"the stock processor first"
            )
    return [attn for _, attn in found]


def user_backend(layers: Sequence[Any]) -> Any:
    """The attention backend of diffusers that the user has set on a model, if any."""
    for attn in layers:
        backend = getattr(attn.processor, "_attention_backend", None)
        if backend is not None and getattr(backend, "value", backend) != "jali":
            return backend
    return None


def attach(module: nn.Module, name: str, layers: Sequence[Any], run: Run) -> Attachment:
    """Make a transformer part of a run: `layers` are its self-attentions, in order."""
    family = family_of(module)
    here = RunTransformer(
        name=name,
        index=len(run.transformers),
        family=family,
        patch=patch_of(module.config),
        parameters=tuple(inspect.signature(type(module).forward).parameters)[1:],
        layers=len(layers),
        weights=count_weights(module),
        hook=ContextHook(run.finish),
        module=weakref.ref(module),
    )
    made = Attachment(module)
    try:
        vars(module)["__reduce_ex__"] = refuse_copy  # which copies and pickles ask first
        run.transformers.append(here)
        for layer, attn in enumerate(layers):
            run.layers.append((here.index, layer))
            # A processor with weights of its own (an IP-Adapter) stays as it is, dense.
            if isinstance(attn.processor, nn.Module):
                kind = type(attn.processor).__name__
                run.left_out.append(f"{name} layer {layer}: {kind} has weights and stays dense")
                continue
            index = len(run.layers) - 1
            ours = make_sparse(attn.processor, run, run.number, index, family.attention_call)
            made.processors.append((attn, ours))
            _put(attn, ours)
            here.reached += 1
        made.new_registry = listen(module, here.hook)
        made.listening = True
        made.handles.append(
            module.register_forward_pre_hook(_before(run, here), with_kwargs=True, prepend=True)
        )
        made.handles.append(module.register_forward_hook(_after(run, here)))
    except BaseException:
        made.detach()
        raise
    return made


def _put(attn: Any, processor: Any) -> None:
    """Set a processor, and nothing else: `set_processor` of old classes may move modules."""
    attn.processor = processor


def _before(run: Run, here: RunTransformer) -> Any:
    index, number = here.index, run.number

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
        given = here.arguments(args, kwargs)
        numbers, tensors = here.family.geometry.pick(given, here.patch)
        timestep = given.get("timestep")
        if not torch.compiler.is_compiling():
            run.begin(index, timestep, numbers, tensors)
            return None
        # Inside a graph the run is told by an operator, whose result the model must need.
        if not isinstance(timestep, Tensor):
            raise TypeError("a compiled transformer needs its timestep as a tensor")
        given["timestep"] = operator.observe(timestep, number, index, numbers, tensors)
        return (), given

    return before


def _after(run: Run, here: RunTransformer) -> Any:
    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        if not torch.compiler.is_compiling():
            run.end(here.index, output)

    return after
