"""A mask generator for LightX2V: methods choose the blocks, its operators compute them. Written to
its state of 2026-08-21 (0.1.0), not run in the host.

    import jali.adapters.lightx2v
    jali.adapters.lightx2v.register()  # before the runner is made

and in its configuration

    "self_attn_1_type": "general_sparse_attn",
    "general_sparse_attn_setting": {
      "sparse_mask_generator": "jali", "sparse_operator": "spas_fa4_operator",
      "sparse_setting": {"method": "entropy", "budget": 0.3, "height": 30, "width": 52}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jali.attend import PreparedCall, prepare
from jali.checks import check_call
from jali.error import InputError
from jali.methods import METHODS, Method
from jali.planning.site import Site
from jali.presets.schema import field_types, read_object
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import BlockLayout
from jali.value import check_choice, check_count, check_share

NAME = "jali"
ONE_CALL = Site(0, 1, 0, 1)  # the host tells a generator neither step nor layer


def register() -> None:
    """Make the generator known to LightX2V as "jali". A second time changes nothing."""
    try:
        from lightx2v.utils import registry_factory
    except ImportError as error:
        raise ImportError(
            f"jali.adapters.lightx2v registers in LightX2V, which cannot be imported: {error}"
        ) from error
    generators = registry_factory.SPARSE_MASK_GENERATOR_REGISTER
    if NAME not in generators:
        generators.register(MaskGenerator, key=NAME)


class MaskGenerator:
    """A method as LightX2V's general sparse attention wants it: a map of blocks for q and k, and
    the order of tokens that the map is of.

    Args:
        q_block_size, k_block_size: of the operator.
        sparse_setting: "height" and "width" of the video in tokens; "method" and "budget"; the
            method's own options.
        attnmap_frame_num: frames of the video in tokens.

    Raises InputError for settings that cannot be run, by name.
    """

    def __init__(
        self,
        q_block_size: int = 128,
        k_block_size: int = 128,
        sparse_setting: Mapping[str, Any] | None = None,
        attnmap_frame_num: int | None = None,
    ) -> None:
        setting = dict(sparse_setting or {})
        frames = {"attnmap_frame_num": attnmap_frame_num}
        sizes = frames | {name: setting.pop(name, None) for name in ("height", "width")}
        for name, size in sizes.items():
            if size is None:
                raise InputError(
                    f"jali's mask generator needs {name} of the video in tokens (21 frames of "
                    f"30 × 52 are 81 of 480×832), and LightX2V gave none: "
                    f"sparse_setting={dict(sparse_setting or {})}"
                )
            check_count(name, size)
        self.grid = TokenGrid.video(*map(int, sizes.values()))
        self.method = _method(setting, q_block_size, k_block_size)
        self.q_block_size, self.k_block_size = q_block_size, k_block_size
        self._layout: BlockLayout | None = None

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Which blocks are read. [L, H, D] twice -> int8 [1, H, query blocks, key blocks]."""
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
        prepared = self._prepare(q, k)
        query, _ = prepared.query(q, k, k, ONE_CALL)
        plan, _ = prepared.plan(query)
        self._layout = prepared.layout
        return plan.levels.expand(1, q.shape[1], -1, -1).to(torch.int8)

    def reorg(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in the order of the map. [L, H, D]."""
        index = self._known().q.index
        if index is None:
            return q, k, v
        return q.index_select(0, index), k.index_select(0, index), v.index_select(0, index)

    def restore(self, out: Tensor) -> Tensor:
        """The operator's result in the model's order. [L, H·D]."""
        index = self._known().q.index
        return out if index is None else out.index_select(0, index.argsort())

    def _prepare(self, q: Tensor, k: Tensor) -> PreparedCall:
        call = check_call(q, k, k, self.method, self.grid)
        # Any blocks run there: the operator's are kept as they are.
        prepared = prepare(call, self.method, "reference")
        blocks = prepared.layout.blocks
        if (blocks.q, blocks.k) != (self.q_block_size, self.k_block_size):
            raise InputError(
                f"{self.method.name} plans in blocks of {blocks.q} × {blocks.k}, and the operator "
                f"computes {self.q_block_size} × {self.k_block_size}: take another of the two"
            )
        return prepared

    def _known(self) -> BlockLayout:
        if self._layout is None:
            raise RuntimeError("reorg and restore follow a call with q and k: none has been")
        return self._layout


def _method(setting: dict[str, Any], q_block: int, k_block: int) -> Method:
    """The method of a setting, on the operator's blocks."""
    where = "sparse_setting"
    name = setting.pop("method", "entropy")
    check_choice(f"{where}: method", name, tuple(METHODS))
    budget = setting.pop("budget", None)
    blocks = {"q_block": q_block, "k_block": k_block, "block_size": k_block}
    known = field_types(METHODS[name])
    own = {block: size for block, size in blocks.items() if block in known}
    method: Method = read_object(METHODS[name], own | setting, where)
    if budget is not None:
        check_share(f"{where}: budget", budget)
        method = method.with_budget(budget)
    why = _why_not(method)
    if why is not None:
        raise InputError(f"{name} cannot be a mask generator of LightX2V: {why}")
    return method


def _why_not(method: Method) -> str | None:
    """Why a method cannot be told by a map of blocks made from q and k; None where it can."""
    if method.needs_values:
        return "it reads v, and a generator is shown q and k only"
    if method.orders_heads:
        return "it orders every head for itself"
    if method.tail or method.ratios != (1,):
        return "it reads means of keys, and a map says read or skip"
    if method.probes:
        return "it corrects what comes of a map"
    return None
