"""ESA's mask files turned into books: the averaged importance in a `.pt` file, and nothing else.

Such a file is a pickle. It is read by torch's own reader of tensors, which runs no code of the
file (`weights_only`), and only the importance is taken out of it: the masks beside it follow from
that, and are made anew.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jali.integration.attachment import self_attentions
from jali.integration.families import family_of
from jali.integration.fingerprint import Fingerprint
from jali.integration.models.registry import model_card
from jali.integration.models.size import video_scale_of
from jali.integration.modes import transformers_of
from jali.maskbook.book import MaskBook
from jali.maskbook.container import BookError
from jali.maskbook.header import MEAN, Header
from jali.maskbook.noise import noise_levels
from jali.maskbook.write import write_book
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Raster
from jali.version import __version__

NAME = "importance"
AXES = "[layers, steps, heads, query blocks, key blocks]"
BLOCKS = Blocks(256, 128)  # ESA's Q_BLOCK and K_BLOCK


def read_importance(path: str | os.PathLike[str]) -> Tensor:
    """The averaged importance of ESA's file, mapped where that is possible: a tensor of floats
    [layers, steps, heads, query blocks, key blocks], named `importance` or the only such one.

    Raises:
        FileNotFoundError: there is no file.
        BookError: it is no file of tensors, or holds no such tensor; the sentence says which.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        mapped = zipfile.is_zipfile(path)  # older files cannot be
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever a damaged or hostile stream of pickles leads to
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BookError(
            f"{path} is no file of tensors, or holds other things, which are never opened: "
            f"{why:.200}"
        ) from None
    named = found if isinstance(found, Mapping) else {NAME: found}
    fitting = {str(name): x for name, x in named.items() if _is_importance(x)}
    if NAME in fitting or len(fitting) == 1:
        return fitting.get(NAME, next(iter(fitting.values())))
    held = ", ".join(f"{name} {_describe(x)}" for name, x in list(named.items())[:8]) or "nothing"
    raise BookError(
        f"{path} holds no tensor of averaged importance, {AXES}, under the name {NAME!r}, but "
        f"{held}; without it there is nothing to make a book of: jali calibrate records it anew"
    )


def import_masks(
    pipe: Any,
    importance: Tensor,
    output: str | os.PathLike[str],
    *,
    model: str,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    budgets: Sequence[float] = (0.7, 0.5, 0.3),
    blocks: Blocks = BLOCKS,
    source: str = "ESA",
) -> MaskBook:
    """A book of ESA's importance, for the pipeline it was recorded on.

    The file says neither model nor size: both are asked for and compared with the tensor. Nor does
    it say the noise levels: they are those of the pipeline's scheduler for so many steps, and a run
    with others is warned of.

    Args:
        pipe: the pipeline of `model`.
        importance: of `read_importance`.
        output: the book, a .safetensors file.
        model: a name of the registry.
        height, width, num_frames: what was generated; the model's own where they are not given.
        budgets: shares in 0..1 whose plans are made ready.
        blocks: queries and keys in a block, ESA's 256 and 128.
        source: where it comes from, for the book's history.

    Raises ValueError for a tensor that is not of this model and size, naming both.
    """
    card, (_, transformers) = model_card(model), transformers_of(pipe)
    if len(transformers) > 1:
        raise ValueError(f"{card.name} has two transformers, and ESA's files are of one")
    module = transformers[0][1]
    size = (num_frames or card.frames, height or card.height, width or card.width)
    grid = _grid(pipe, module, size, card.text_tokens)
    layers, steps, heads, M, N = importance.shape
    attentions = self_attentions(module)
    kind, noise = _noise(pipe, steps)
    header = Header(
        fingerprints={"transformer": Fingerprint.of(module)},
        grid=grid, order=Raster(), blocks=blocks, layers=layers, heads=heads,
        noise=noise, noise_kind=kind, noise_assumed=True, transformers=("transformer",) * steps,
        branches=(MEAN,), budgets=tuple(sorted({float(share) for share in budgets})), prompts=(),
        model=card.name, settings=dict(zip(("num_frames", "height", "width"), size, strict=True)),
        history=(f"imported from {source}",), jali=__version__,
    )  # fmt: skip
    own = (len(attentions), heads if not attentions else attentions[0].heads, header.M, header.N)
    if own != (layers, heads, M, N):
        pixels = "{}×{}×{}".format(*size)
        raise ValueError(
            f"the importance is of {layers} layers × {heads} heads × {M} × {N} blocks, and "
            f"{card.name} at {pixels} (frames, height, width: {grid}) has {own[0]} × {own[1]} × "
            f"{own[2]} × {own[3]} in blocks of {blocks}: give the model and size it was made with"
        )
    return write_book(output, header, lambda step, layer: importance[layer, step].float()[None])


def _is_importance(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 5 and x.is_floating_point() and x.numel() > 0


def _describe(x: Any) -> str:
    return f"{list(x.shape)}" if isinstance(x, Tensor) else f"({type(x).__name__})"


def _grid(pipe: Any, module: Any, size: tuple[int, int, int], text: int) -> TokenGrid:
    scale = video_scale_of(pipe, module)
    if scale is None:
        raise ValueError(f"{type(pipe).__name__} does not say how many pixels a token has")
    side = family_of(module).text
    box = scale.box(*size)
    if side == "none":
        return TokenGrid((box,))
    return TokenGrid.video(*box.shape, text=text, text_side=side)


def _noise(pipe: Any, steps: int) -> tuple[str, tuple[float, ...]]:
    """What the pipeline's scheduler has for so many steps, as the pipeline asks for them."""
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    if type(pipe).__name__ == "HunyuanVideoPipeline":
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
    else:
        scheduler.set_timesteps(steps)
    found = noise_levels(scheduler, steps)
    if found is None:
        raise ValueError(f"{type(scheduler).__name__} has no noise levels for {steps} steps")
    return found


__all__ = ["import_masks", "read_importance"]
