"""ComfyUI's calling rules, small: what wraps what, who is asked first, what is handed over.

Written from what its nodes rely on. Models have ComfyUI's names and the same order of tokens; their
weights are random.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OVERRIDE = "optimized_attention_override"
HEADS, WIDTH = 2, 32


class Container:
    """A tensor with one owner, as newer versions hand them over."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "taken twice"
        return tensor


def dense(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None,
    attn_precision: Any = None, skip_reshape: bool = False, skip_output_reshape: bool = False,
    **_: Any,
) -> Tensor:  # fmt: skip
    """What the user chose, without a wrapper around it."""
    assert attn_precision is None
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def attention(*args: Any, containers: bool = False, **kwargs: Any) -> Tensor:
    """Every attention of every model: the override is asked first, where there is one."""
    override = kwargs["transformer_options"].get(OVERRIDE)
    if containers:
        args = (*map(Container, args[:3]), *args[3:])
        if override is not None and hasattr(override, "container_function"):
            return override.container_function(*args, **kwargs)
        args = (*(each.take() for each in args[:3]), *args[3:])
    kwargs = {**kwargs, "_inside_attn_wrapper": True, "low_precision_attention": False}
    return dense(*args, **kwargs) if override is None else override(dense, *args, **kwargs)


class Executor:
    """A call with wrappers around it, the first one outermost."""

    def __init__(self, original: Callable[..., Any], owner: Any, wrappers: list[Any]) -> None:
        self.original, self.class_obj, self.wrappers = original, owner, wrappers

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **kwargs)
        return self.wrappers[0](self, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Executor(self.original, self.class_obj, self.wrappers[1:]).execute(*args, **kwargs)


class Patcher:
    """A MODEL: options and wrappers beside a model that all clones share."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[tuple[str, str], list[Any]] = {}

    def clone(self) -> Patcher:
        other = Patcher(self.transformer)
        own = self.model_options["transformer_options"]
        other.model_options = {"transformer_options": dict(own)}
        other.wrappers = {key: list(found) for key, found in self.wrappers.items()}
        return other

    def get_model_object(self, name: str) -> nn.Module:
        assert name == "diffusion_model"
        return self.transformer

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault((kind, key), []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.pop((kind, key), None)

    def get_wrappers(self, kind: str, key: str) -> list[Any]:
        return self.wrappers.get((kind, key), [])

    def all_wrappers(self, kind: str) -> list[Any]:
        return [each for (known, _), found in self.wrappers.items() if known == kind
                for each in found]  # fmt: skip


def sample(
    model: Patcher, x: Tensor, texts: list[Tensor], steps: int = 4, between: bool = False,
    together: bool = True, stop_after: int | None = None, sigmas: list[float] | None = None,
    more: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """Two guidance branches (uncond first, one batch) or one, by the explicit method of Euler.
    `between` also asks for a sigma between two steps, as samplers of second order do."""
    planned = torch.tensor(sigmas or [1 - i / steps for i in range(steps)] + [0.0])
    kinds = [1, 0] if len(texts) == 2 else [0]
    calls = 0

    def ask(x: Tensor, sigma: Tensor, rows: list[int]) -> Tensor:
        nonlocal calls
        calls += 1
        if stop_after is not None and calls > stop_after:
            raise InterruptedError
        own = model.model_options["transformer_options"]
        options = {
            **own, "sigmas": sigma.expand(1), "sample_sigmas": planned,
            "cond_or_uncond": [kinds[i] for i in rows], "uuids": [f"prompt {i}" for i in rows],
        }  # fmt: skip
        text = torch.cat([texts[i].expand(x.shape[0], -1, -1) for i in rows])
        batch = torch.cat([x] * len(rows))
        wrappers = model.all_wrappers("diffusion_model")
        before = dict(options)
        out = model.transformer(batch, sigma, text, options, wrappers, **(more or {}))
        left = {key for key in options if options[key] is not before.get(key)}
        assert left <= {"block_index", "total_blocks"}, left
        return out

    def guided(x: Tensor, sigma: Tensor) -> Tensor:
        rows = list(range(len(texts)))
        if together:
            parts = ask(x, sigma, rows).chunk(len(rows))
        else:
            parts = tuple(ask(x, sigma, [row]) for row in rows)
        return parts[0] if len(parts) == 1 else parts[0] + 3 * (parts[1] - parts[0])

    def outer(x: Tensor) -> Tensor:
        for now, then in itertools.pairwise(planned):
            if between:
                guided(x, (now + then) / 2)
            x = x + guided(x, now) * (then - now)
        return x

    with torch.inference_mode():
        return Executor(outer, None, model.all_wrappers("outer_sample")).execute(x)


class Attention(nn.Module):
    """q, k, v, and a call of `attention` in one of the layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self, x: Tensor, context: Tensor, options: dict[str, Any], heads_first: bool = False,
        containers: bool = False, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        q, k, v = self.q(x), self.k(context), self.v(context)
        if heads_first:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        return attention(
            q, k, v, HEADS, mask=mask, skip_reshape=heads_first, transformer_options=options,
            containers=containers,
        )  # fmt: skip


class Transformer(nn.Module):
    """What the models below have in common."""

    patch_size: Any = (1, 2, 2)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into = nn.LazyLinear(WIDTH)
        self.text = nn.Linear(8, WIDTH)

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, options: dict[str, Any],
        wrappers: list[Any], **more: Any,
    ) -> Tensor:  # fmt: skip
        return Executor(self._forward, self, wrappers).execute(
            x, timestep, context, transformer_options=options, **more
        )

    def tokens(self, x: Tensor) -> Tensor:
        """Patches of the padded latents, [B, t·h·w, WIDTH]."""
        deep, high, wide = self._patch()
        x = x[:, :, None] if x.dim() == 4 else x
        pad = [(-side) % step for side, step in zip(x.shape[-1:-4:-1], (wide, high, deep),
                                                    strict=True)]  # fmt: skip
        x = F.pad(x, (0, pad[0], 0, pad[1], 0, pad[2]), mode="constant")
        x = x.unfold(2, deep, deep).unfold(3, high, high).unfold(4, wide, wide)
        return self.into(x.movedim(1, 4).flatten(4).flatten(1, 3))

    def _patch(self) -> tuple[int, int, int]:
        size = self.patch_size
        return (1, size, size) if isinstance(size, int) else tuple(size)  # type: ignore[return-value]

    @staticmethod
    def back(y: Tensor, like: Tensor) -> Tensor:
        """Something of the latents' shape that depends on all tokens."""
        return like * 0.1 + y.flatten(1).mean(1).view(-1, *[1] * (like.dim() - 1))


class Block(nn.Module):
    """Self-attention, then cross-attention, under the names of Wan or LTX."""

    def __init__(self, self_name: str, cross_name: str) -> None:
        super().__init__()
        self.names = self_name, cross_name
        setattr(self, self_name, Attention())
        setattr(self, cross_name, Attention())

    def forward(self, x: Tensor, text: Tensor, options: dict[str, Any], containers: bool) -> Tensor:
        own, cross = (getattr(self, name) for name in self.names)
        x = x + own(x, x, options, containers=containers)
        return x + cross(x, text, options)


class WanModel(Transformer):
    """Video and text apart; newest versions hand tensors over in containers."""

    containers = True

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block("self_attn", "cross_attn") for _ in range(blocks))

    def _forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, clip_fea: Any = None,
        time_dim_concat: Tensor | None = None, transformer_options: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        latents = x if time_dim_concat is None else torch.cat([x, time_dim_concat], dim=2)
        y, text = self.tokens(latents) * timestep, self.text(context)
        transformer_options["total_blocks"] = len(self.blocks)
        for index, block in enumerate(self.blocks):
            transformer_options["block_index"] = index
            y = block(y, text, transformer_options, self.containers)
        return self.back(y, x)


class LTXVModel(Transformer):
    """The same under other names, and no number of a block is told."""

    class Patchifier:
        patch_size = (1, 1, 1)

    patch_size = None

    def __init__(self) -> None:
        super().__init__()
        self.patchifier = self.Patchifier()
        self.transformer_blocks = nn.ModuleList(Block("attn1", "attn2") for _ in range(3))

    def _patch(self) -> tuple[int, int, int]:
        return self.patchifier.patch_size

    def _forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, attention_mask: Any = None,
        frame_rate: int = 25, transformer_options: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        y, text = self.tokens(x) * timestep, self.text(context)
        for block in self.transformer_blocks:
            y = block(y, text, transformer_options, False)
        return self.back(y, x)


class Joint(nn.Module):
    """One attention over text and image together."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, options: dict[str, Any], mask: Tensor | None = None) -> Tensor:
        return x + self.attention(x, x, options, heads_first=True, mask=mask)


class Flux(Transformer):
    """Text first; images to refer to follow; double blocks, then single ones."""

    patch_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.double_blocks = nn.ModuleList(Joint() for _ in range(2))
        self.single_blocks = nn.ModuleList(Joint() for _ in range(2))

    def _forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, y: Any = None, guidance: Any = None,
        ref_latents: Any = None, control: Any = None, transformer_options: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        images = [self.tokens(image) for image in (x, *(ref_latents or ()))]
        images = [image.expand(x.shape[0], -1, -1) for image in images]
        z = torch.cat([self.text(context), *images], dim=1) * timestep
        for block in (*self.double_blocks, *self.single_blocks):
            z = block(z, transformer_options)
        return self.back(z, x)


class HunyuanVideo(Transformer):
    """Video first; its text is refined by attention of its own, and may come with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.refiner = Attention()
        self.double_blocks = nn.ModuleList(Joint() for _ in range(2))
        self.single_blocks = nn.ModuleList(Joint() for _ in range(2))

    def _forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, y: Any = None,
        txt_byt5: Tensor | None = None, clip_fea: Any = None, guidance: Any = None,
        attention_mask: Any = None, transformer_options: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        text = self.text(context)
        text = self.refiner(text, text, transformer_options)
        if txt_byt5 is not None:
            text = torch.cat([text, self.text(txt_byt5).expand(x.shape[0], -1, -1)], dim=1)
        z = torch.cat([self.tokens(x), text], dim=1) * timestep
        mask = None if attention_mask is None else torch.zeros(1, 1, z.shape[1])
        for block in (*self.double_blocks, *self.single_blocks):
            z = block(z, transformer_options, mask)
        return self.back(z, x)


class QwenImageTransformer2DModel(Transformer):
    """Text first; latents have a frame."""

    patch_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Joint() for _ in range(3))

    def _forward(
        self, x: Tensor, timesteps: Tensor, context: Tensor, attention_mask: Any = None,
        ref_latents: Any = None, additional_t_cond: Any = None, transformer_options: Any = None,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        images = [self.tokens(image) for image in (x, *(ref_latents or ()))]
        z = torch.cat([self.text(context), *images], dim=1) * timesteps
        for block in self.transformer_blocks:
            z = block(z, transformer_options)
        return self.back(z, x)


class MochiModel(Transformer):
    """One that jali does not know."""


MODELS = (WanModel, LTXVModel, HunyuanVideo, Flux, QwenImageTransformer2DModel)
