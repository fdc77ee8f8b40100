"""An attention backend of vLLM-Omni: self-attention over one video is planned, the rest is the
platform's own. Written to 0.32.0rc1, not run in the host."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jali.adapters.run import Run, attention
from jali.adapters.vllm_omni import WRITTEN_TO
from jali.error import InputError
from jali.methods import METHODS, Method
from jali.presets.schema import read_object
from jali.tokens.grid import TokenGrid
from jali.value import check_choice, check_count

try:
    from vllm_omni.diffusion.attention.backends.abstract import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadata,
    )
    from vllm_omni.diffusion.attention.selector import HEAD_SIZE_UNKNOWN, get_attn_backend_for_role
    from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
    from vllm_omni.diffusion.forward_context import (
        get_forward_context,
        is_forward_context_available,
    )
except ImportError as error:
    raise ImportError(
        f"jali.adapters.vllm_omni.backend is loaded by vLLM-Omni and written to {WRITTEN_TO}, of "
        f"which something is missing here: {error}"
    ) from error

log = logging.getLogger("jali")

OPTIONS = "JALI_VLLM_OMNI"  # the host's settings have no room for a method
UNKNOWN_STEPS = 1000  # more than any sampler takes, where the model does not publish how many
SETTINGS = {"sparsity": 0.8, "start_step": 0, "end_step": 0, "precision": "bf16", "skip_layers": ()}


class JaliBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM-Omni asks a backend before any layer is made."""

    supported_platforms = None

    @staticmethod
    def get_name() -> str:
        return "JALI"

    @staticmethod
    def get_impl_cls() -> type[JaliAttention]:
        return JaliAttention

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []  # all: what a kernel of jali's cannot run, another can

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:  # noqa: ARG003
        """Where the platform's own does: it is who computes those calls."""
        dense, _ = get_attn_backend_for_role("self", HEAD_SIZE_UNKNOWN)
        return bool(dense.supports_attention_mask())


class SharedRun:
    """The run of all layers with the same settings in this process: the host makes an object for
    each layer, and tells none of the others."""

    def __init__(self, settings: Mapping[str, Any], options: str) -> None:
        self.settings = settings
        if settings["precision"] != "bf16":
            raise InputError(
                f"block_sparse.precision={settings['precision']!r} is Ascend's; jali computes in "
                f'the precision of its input: leave it at "bf16"'
            )
        method, self.steps = _read_options(options)
        self.run = Run(
            method,
            mean_budget=1 - float(settings["sparsity"]),
            warmup_frac=int(settings["start_step"]),
            dense_first_layer=False,
        )
        self.layers: dict[int, int] = {}  # index: how many transformers have it
        self.told: set[str] = set()

    def join(self, layer: int) -> str:
        """One more layer; the name of its transformer. Experts of one model have equal layers."""
        number = self.layers[layer] = self.layers.get(layer, 0) + 1
        return "transformer" if number == 1 else f"transformer_{number}"

    def steps_of(self, published: int | None) -> int:
        """How many steps there are."""
        steps = published or self.steps
        method = self.run.method
        if steps is None and (self.settings["end_step"] or method.base.keeps_tables):
            raise InputError(
                f"{method.base.name if not self.settings['end_step'] else 'block_sparse.end_step'} "
                f"needs the number of steps, which this model does not publish: "
                f"{OPTIONS}='{{\"steps\": 40}}', as many as are asked for"
            )
        return steps or UNKNOWN_STEPS

    def tell(self, why: str) -> None:
        """Say once why calls stay dense."""
        if why not in self.told:
            self.told.add(why)
            log.info("jali: dense in vLLM-Omni: %s", why)


@functools.cache
def shared_run(settings: str, options: str) -> SharedRun:
    """One for equal settings (JSON, so that they can be compared)."""
    return SharedRun(json.loads(settings), options)


def _read_options(text: str) -> tuple[Method, int | None]:
    """The method with its options, and the number of steps where that is said."""
    try:
        asked = json.loads(text or "{}")
    except ValueError as error:
        raise InputError(f"{OPTIONS} must be a JSON object, got {text!r}: {error}") from None
    if not isinstance(asked, dict):
        raise InputError(f"{OPTIONS} must be a JSON object of options, got {text!r}")
    name, steps = asked.pop("method", "entropy"), asked.pop("steps", None)
    check_choice(f"{OPTIONS}: method", name, tuple(METHODS))
    if steps is not None:
        check_count(f"{OPTIONS}: steps", steps)
    return read_object(METHODS[name], asked, OPTIONS), steps


class JaliAttention(AttentionImpl):  # type: ignore[misc]
    """One attention layer of a model."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        role: str = "self",
        **others: Any,
    ) -> None:
        dense, _ = get_attn_backend_for_role(role, head_size)
        self.dense = dense.get_impl_cls()(
            num_heads=num_heads, head_size=head_size, softmax_scale=softmax_scale, causal=causal,
            num_kv_heads=num_kv_heads, prefix=prefix, qkv_layout=qkv_layout, role=role,
            **others | {"backend_explicit": False},
        )  # fmt: skip
        self.scale = softmax_scale
        self.why_never = _why_never(causal, role, qkv_layout, prefix)
        if self.why_never is not None:
            log.info("jali: %s stays dense in vLLM-Omni: %s", prefix or role, self.why_never)
            return
        _check_parallel()
        settings = json.dumps(SETTINGS | (backend_kwargs or {}), sort_keys=True)
        self.shared = shared_run(settings, os.environ.get(OPTIONS, ""))
        self.layer = _layer_index(prefix)
        self.transformer = self.shared.join(self.layer)
        self.skipped = self.layer in self.shared.settings["skip_layers"]
        self.latest = (-1, 0)  # step, and how many calls it has had

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads where the sampler is
    def forward_cuda(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> Tensor:
        """[B, S, H, D] -> like query."""

        def densely() -> Tensor:
            return self.dense.forward(query, key, value, attn_metadata)

        if self.why_never is not None:
            return densely()
        now = get_forward_context() if is_forward_context_available() else None
        if now is None or now.denoise_step_idx is None:
            self.shared.tell("the model does not publish its step")
            return densely()
        step, shared = int(now.denoise_step_idx), self.shared
        steps = max(shared.steps_of(now.total_denoise_steps), step + 1)
        grid = self._grid(step, steps, attn_metadata, query.shape[1])
        if isinstance(grid, str):
            shared.tell(grid)
        return attention(
            query, key, value, layout="bshd", grid=grid, step=step, steps=steps, layer=self.layer,
            layers=max(shared.layers) + 1, branch=self._branch(step), run=shared.run,
            transformer=self.transformer, scale=self.scale, dense=densely,
        )  # fmt: skip

    def _grid(
        self, step: int, steps: int, metadata: AttentionMetadata | None, tokens: int
    ) -> TokenGrid | str:
        if self.skipped:
            return "skip_layers"
        if step >= steps - int(self.shared.settings["end_step"]):
            return "end_step"
        return grid_of(metadata, tokens)

    def _branch(self, step: int) -> str:
        """The host announces no guidance branch: the n-th call of a step is the n-th branch."""
        before, calls = self.latest
        self.latest = step, calls + 1 if step == before else 1
        return f"branch {self.latest[1]}"


def grid_of(metadata: AttentionMetadata | None, tokens: int) -> TokenGrid | str:
    """What the tokens are, as the model publishes it, or why they are no single video."""
    layout = None if metadata is None else metadata.video_layout
    if metadata is None or layout is None or not (layout.latent_grid or layout.video_spans):
        return "the model does not publish where its video lies"
    if metadata.attn_mask is not None or metadata.full_attn_spans is not None:
        return "a mask of the model's own"
    if layout.video_spans or metadata.joint_query is not None or "cu_seqlens_q" in metadata.extra:
        return "several sequences in one"
    grid = TokenGrid.video(*map(int, layout.latent_grid), text=int(layout.prefix_len or 0))
    if grid.tokens != tokens:
        return f"{tokens} tokens, of which only {grid.tokens} are text and video"
    return grid


def _why_never(causal: bool, role: str, qkv_layout: str | None, prefix: str) -> str | None:
    """Why a layer is left to the platform's own backend altogether; None where it is not."""
    if role == "cross":
        return "cross-attention"
    if causal:
        return "causal attention"
    if (qkv_layout or "").upper() != "BSND":
        return f"tensors are {qkv_layout or 'of an unsaid layout'}, not BSND"
    if _layer_index(prefix) < 0:
        return f"no layer number in {prefix!r}"
    return None


def _layer_index(prefix: str) -> int:
    """The only number in a module's name; -1 where there is none, or several."""
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", prefix)
    return int(numbers[0]) if len(numbers) == 1 else -1


def _check_parallel() -> None:
    config = get_current_diffusion_config_or_none()
    parallel = getattr(config, "parallel_config", None)
    for name in ("ring_degree", "allgather_degree"):
        degree = getattr(parallel, name, 1)
        if degree and degree > 1:
            raise InputError(
                f"{name}={degree} leaves a rank some of the keys, and a plan needs all: use "
                f"ulysses_degree instead"
            )
