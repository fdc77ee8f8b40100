"""The names of vLLM-Omni 0.32.0rc1 that jali meets, each as small as it can be."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

OVERRIDES: dict[Any, str] = {}


class Backends(enum.Enum):
    FLASH_ATTN = "flash"
    RAINFUSION_ATTN = "rainfusion"

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_class(self) -> Any:
        module, _, name = OVERRIDES[self].rpartition(".")
        return getattr(importlib.import_module(module), name)


def register_diffusion_backend(
    backend: Backends, class_path: str | None = None
) -> Callable[[type], type]:
    assert class_path is not None
    OVERRIDES[backend] = class_path
    return lambda kind: kind


@dataclass(frozen=True)
class VideoTokenLayout:
    prefix_len: int | None = None
    latent_grid: tuple[int, int, int] | None = None
    used_len: int | None = None
    video_spans: tuple[Any, ...] = ()


@dataclass
class AttentionMetadata:
    attn_mask: Tensor | None = None
    joint_query: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    full_attn_spans: Any = None
    video_layout: VideoTokenLayout | None = None


class AttentionBackend:
    supported_platforms: tuple[str, ...] | None = ("npu",)


class AttentionImpl:
    """Its `forward` goes to the method of the platform; here that is CUDA's."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Any:
        return self.forward_cuda(query, key, value, attn_metadata)  # type: ignore[attr-defined]


class PlatformImpl(AttentionImpl):
    """The platform's own backend: dense, and it counts its calls."""

    calls = 0

    def __init__(self, *, softmax_scale: float, **given: Any) -> None:
        assert given["backend_explicit"] is False  # nobody has asked for it
        self.scale = softmax_scale

    def forward_cuda(self, query: Tensor, key: Tensor, value: Tensor, _: Any = None) -> Tensor:
        PlatformImpl.calls += 1
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2)


@dataclass
class ForwardContext:
    denoise_step_idx: int | None = None
    total_denoise_steps: int | None = None


class Host:
    """Where the host stands, and what it is set to."""

    def __init__(self) -> None:
        self.now: ForwardContext | None = ForwardContext(0, None)
        self.config: Any = None
        self.npu = False
        self.masks = True  # whether the platform's own backend takes them
        OVERRIDES.clear()
        PlatformImpl.calls = 0

    def get_forward_context(self) -> ForwardContext:
        assert self.now is not None
        return self.now

    def modules(self) -> dict[str, ModuleType]:
        """By the names under which they are imported."""
        dense = SimpleNamespace(
            get_impl_cls=lambda: PlatformImpl, supports_attention_mask=lambda: self.masks
        )
        root = "vllm_omni.diffusion"
        contents: dict[str, dict[str, Any]] = {
            "vllm_omni": {},
            "vllm_omni.platforms": {
                "current_omni_platform": SimpleNamespace(is_npu=lambda: self.npu)
            },
            root: {},
            f"{root}.config": {"get_current_diffusion_config_or_none": lambda: self.config},
            f"{root}.forward_context": {
                "get_forward_context": self.get_forward_context,
                "is_forward_context_available": lambda: self.now is not None,
            },
            f"{root}.attention": {},
            f"{root}.attention.selector": {
                "HEAD_SIZE_UNKNOWN": -1,
                "get_attn_backend_for_role": lambda role, head_size: (dense, None),  # noqa: ARG005
            },
            f"{root}.attention.backends": {},
            f"{root}.attention.backends.abstract": {
                "AttentionBackend": AttentionBackend,
                "AttentionImpl": AttentionImpl,
                "AttentionMetadata": AttentionMetadata,
            },
            f"{root}.attention.backends.registry": {
                "DiffusionAttentionBackendEnum": Backends,
                "register_diffusion_backend": register_diffusion_backend,
            },
        }
        made = {}
        for name, names in contents.items():
            module = made[name] = ModuleType(name)
            module.__dict__.update(names)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(made[parent], last, module)
        return made
