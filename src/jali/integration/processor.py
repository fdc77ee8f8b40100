"""A stock attention processor that hands its q, k and v to a run."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from jali.integration import operator, parallel
from jali.integration.backend_name import add_backend_name

RUN_BACKEND = "_jali_run"  # the underscore marks it private, as in diffusers


class Caller(threading.local):
    """The processor that is calling. Only ever overwritten before it is read, so that a compiled
    graph has no old value to guard."""

    run: Tensor
    index: Tensor
    deals: bool


CALLER = Caller()


def attend_for_caller(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """What the dispatcher calls for our processors. [B, S, H, D] -> like query."""
    if dropout_p or is_causal or enable_gqa or return_lse:
        raise ValueError("jali's processors take no dropout, causality, grouped heads or lse")
    if _parallel_config is not None and _parallel_config.context_parallel_config is not None:
        return parallel.ulysses(
            query, key, value, attn_mask, scale, CALLER.run, CALLER.index, _parallel_config,
            CALLER.deals,
        )  # fmt: skip
    return operator.attend(query, key, value, attn_mask, scale, CALLER.run, CALLER.index, 1, 0)


class SparseProcessor:
    """Marks our processors. `jali_stock` is the one it stands in for."""

    jali_stock: Any
    jali_owner: Any
    jali_run: Tensor
    jali_index: Tensor
    jali_deals: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_copy(protocol)


def refuse_copy(protocol: Any) -> Any:  # noqa: ARG001
    """What copies and pickles of anything sparse end in: a run belongs to one pipeline."""
    raise TypeError(
        "a pipeline cannot be copied or pickled while it is sparse: leave that mode, or call "
        ".remove() on its handle, first"
    )


def make_sparse(
    stock: Any, owner: Any, run: Tensor, index: int, attention_call: str
) -> SparseProcessor:
    """A processor like `stock`, whose attention belongs to a run."""
    kind: Any = type(stock)
    made = _class(kind, attention_call)()
    made.__dict__.update({n: x for n, x in vars(stock).items() if n != "_attention_backend"})
    made.jali_stock, made.jali_owner = stock, owner
    made.jali_run, made.jali_index = run, torch.tensor(index)
    made.jali_deals = owner.deals_heads
    return made


def carry_over(ours: Any) -> Any:
    """The stock processor, with what the user set through ours in the meantime."""
    stock = ours.jali_stock
    for name, value in vars(ours).items():
        if not name.startswith("jali_") and vars(stock).get(name, None) is not value:
            setattr(stock, name, value)
    if ours.jali_owner.dense_backend_chosen and hasattr(stock, "_attention_backend"):
        stock._attention_backend = ours.jali_owner.dense_backend
    return stock


@functools.cache
def _class(base: type, attention_call: str) -> type:
    """A subclass of the stock processor, so that everything else stays diffusers' code."""
    body: dict[str, Any] = {"__init__": _made_elsewhere, "__module__": __name__}
    if attention_call == "dispatcher":
        call = _through_dispatcher(base)
    else:
        call = {"cogvideox": _cogvideox, "hunyuan15": _hunyuan15}[attention_call]
    # The signature must stay: models drop arguments that it does not name.
    body["__call__"] = functools.wraps(base.__call__)(call)
    if hasattr(base, "_attention_backend"):
        member = add_run_backend()
        body["_attention_backend"] = property(lambda self: member, _set_dense)  # noqa: ARG005
    return type(f"Sparse{base.__name__}", (SparseProcessor, base), body)


def add_run_backend() -> Any:
    """The name by which the dispatcher finds our processors' calls, made the first time."""
    return add_backend_name(RUN_BACKEND, attend_for_caller, context_parallel=True)


def _made_elsewhere(self: Any) -> None:
    """Its attributes are those of the stock processor."""


def _set_dense(self: Any, backend: Any) -> None:
    """`set_attention_backend` under a run chooses who does its dense calls."""
    self.jali_owner.choose_dense_backend(backend)


def _through_dispatcher(base: Any) -> Any:
    stock_call = base.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLER.run, CALLER.index = self.jali_run, self.jali_index
        # Asked where it counts only: a graph would be compiled for either answer.
        if getattr(self, "_parallel_config", None) is not None:
            CALLER.deals = self.jali_deals
        return stock_call(self, *args, **kwargs)

    return call


def _cogvideox(
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    """CogVideoX calls PyTorch's attention itself, so the processor is written out, for separate
    and fused projections."""
    if attention_mask is not None:
        raise ValueError("CogVideoX under jali takes no attention mask")
    text = encoder_hidden_states.shape[1]
    hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    if getattr(attn, "fused_projections", False):
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        query, key, value = (p(hidden_states) for p in (attn.to_q, attn.to_k, attn.to_v))
    head_dim = attn.inner_dim // attn.heads  # not from the tensor: a rank may have fewer heads
    query, key, value = (
        x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (query, key, value)
    )
    query, key = _through(attn.norm_q, query), _through(attn.norm_k, key)
    if image_rotary_emb is not None:
        query[:, :, text:] = apply_rotary_emb(query[:, :, text:], image_rotary_emb)
        key[:, :, text:] = apply_rotary_emb(key[:, :, text:], image_rotary_emb)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = operator.attend(query, key, value, None, None, self.jali_run, self.jali_index, 1, 0)
    out = attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))
    return out[:, text:], out[:, :text]


def _hunyuan15(
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """HunyuanVideo 1.5 builds a tokens × tokens mask (13 GB at 720p) for what are key lengths, so
    the processor is written out without it."""
    query, key, value = (
        p(hidden_states).unflatten(2, (attn.heads, -1)) for p in (attn.to_q, attn.to_k, attn.to_v)
    )
    query, key = attn.norm_q(query), attn.norm_k(key)
    if image_rotary_emb is not None:
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
    text = 0
    if encoder_hidden_states is not None:
        text = encoder_hidden_states.shape[1]
        more_q, more_k, more_v = (
            p(encoder_hidden_states).unflatten(2, (attn.heads, -1))
            for p in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        query = torch.cat([query, _through(attn.norm_added_q, more_q)], dim=1)
        key = torch.cat([key, _through(attn.norm_added_k, more_k)], dim=1)
        value = torch.cat([value, more_v], dim=1)
    if attention_mask is not None:
        front = query.shape[1] - attention_mask.shape[1]
        attention_mask = F.pad(attention_mask, (front, 0), value=True).bool()
    out = operator.attend(
        query, key, value, attention_mask, None, self.jali_run, self.jali_index, 1, 0
    )
    out = out.flatten(2, 3).to(query.dtype)
    if encoder_hidden_states is None:
        return out, None
    out, encoder_hidden_states = out[:, :-text], out[:, -text:]
    if getattr(attn, "to_out", None) is not None:
        out = attn.to_out[1](attn.to_out[0](out))
    return out, _through(getattr(attn, "to_add_out", None), encoder_hidden_states)


def _through(module: Any, x: Tensor) -> Any:
    """What a module makes of x; some checkpoints do without it."""
    return x if module is None else module(x)
