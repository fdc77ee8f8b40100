"""Whole transformers, sparse against dense, on the GPU at hand.

    PYTHONPATH=src OUT=/tmp/out python benchmarks/dev/wan_gpu.py                 # every part
    PYTHONPATH=src OUT=/tmp/out python benchmarks/dev/wan_gpu.py wan-720p host   # some
    PYTHONPATH=src python benchmarks/dev/wan_gpu.py --toy                        # any machine

Stock diffusers classes at their real sizes with random bf16 weights, blocks compiled with
`compile_repeated_blocks(fullgraph=True)`, planning included, layer 0 dense, the check for finite
output on, as users get it. A row's dense time is that of the same compiled blocks in the same
process, whose attention goes through jali and takes the fastest dense kernel (FA4 on Hopper);
`stock_ms` is the model without jali, with diffusers' default attention. Measurements of one shape
take turns. $OUT/wan-h200.json (or --name) is written anew after every row, so a run that is cut
off keeps what it has. Random weights look at everything a little: what the errors say of a
method's quality is nothing; they say that the right thing was computed.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jali import apply_sparse_attention
from jali.evaluation.bench.machine import machine
from jali.evaluation.bench.measure import sampled_error
from jali.files import write_json
from jali.integration.transformer import AttentionCall
from jali.methods import AdaBsa, Entropy, Method, Psa, RfV2, Schedule
from jali.planning.budget import Budget

START = time.perf_counter()
# Never active: all its calls are dense, by the fastest kernel there is.
DENSE = Schedule(Entropy(), min_tokens=2**62)


@dataclass
class Bench:
    """Where we run, until when, and what came of it so far."""

    toy: bool
    seconds: float
    repeats: int
    dynamic: bool
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.toy else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.toy else torch.bfloat16

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - START)

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - START:6.1f} s] {what}", flush=True)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        facts = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
        )
        self.say(facts)
        self.write()

    def write(self) -> None:
        here = machine(self.device)
        import diffusers

        here["versions"]["diffusers"] = diffusers.__version__
        write_json(
            self.path,
            {
                "what": f"benchmarks/dev/{Path(sys.argv[0]).name} " + " ".join(sys.argv[1:]),
                "machine": here,
                "dtype": str(self.dtype).removeprefix("torch."),
                "weights": "random",
                "seconds": round(time.perf_counter() - START, 1),
                "rows": self.rows,
            },
            sort_keys=False,
        )


# Models


@dataclass
class Subject:
    """A transformer and the arguments of one call."""

    name: str
    model: nn.Module
    inputs: Callable[[float], dict[str, Any]]
    tokens: int
    compiled: bool = True

    def forward(self, timestep: float) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.model(**self.inputs(timestep), return_dict=False)[0]
        return out


WANS: dict[str, dict[str, Any]] = {
    "1.3b": {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
    "ti2v-5b": {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336,
                "in_channels": 48, "out_channels": 48},
    "i2v-14b": {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824,
                "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
}  # fmt: skip


def wan_model(bench: Bench, name: str = "1.3b") -> nn.Module:
    from diffusers import WanTransformer3DModel

    size = {"in_channels": 16, "out_channels": 16, "attention_head_dim": 128, "text_dim": 4096,
            "freq_dim": 256, **WANS[name]}  # fmt: skip
    if bench.toy:
        size |= {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 3, "ffn_dim": 64,
                 "text_dim": 32, "freq_dim": 32}  # fmt: skip
        if "image_dim" in size:
            size |= {"image_dim": 24, "added_kv_proj_dim": 64}
    return built(
        bench,
        lambda: WanTransformer3DModel(
            patch_size=(1, 2, 2), cross_attn_norm=True, qk_norm="rms_norm_across_heads", **size
        ),
    )


def wan(bench: Bench, model: nn.Module, label: str, frames: int, high: int, wide: int) -> Subject:
    """Sizes are those of the token grid."""
    if bench.toy:
        frames, high, wide = min(frames, 3), high // 3, wide // 3
    config, tokens = model.config, frames * high * wide
    latents = noise(bench, 1, config.in_channels, frames, 2 * high, 2 * wide)
    text = noise(bench, 1, 16 if bench.toy else 512, config.text_dim)
    more: dict[str, Any] = {}
    if config.image_dim is not None:
        more["encoder_hidden_states_image"] = noise(bench, 1, 257, config.image_dim)

    def inputs(timestep: float) -> dict[str, Any]:
        time = torch.tensor([timestep], device=bench.device)
        if config.in_channels == 48:  # text and image: each token has a time, the image's is 0
            time = time.expand(1, tokens).clone()
            time[:, : high * wide] = 0
        return {
            "hidden_states": latents, "encoder_hidden_states": text, "timestep": time, **more
        }  # fmt: skip

    return Subject(label, model, inputs, tokens)


def hunyuan(bench: Bench, parts: int) -> Subject:
    """544×960×129; `parts` times one double and two single blocks, of 20."""
    from diffusers import HunyuanVideoTransformer3DModel

    size = {"num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 16,
            "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6), "num_refiner_layers": 1,
            } if bench.toy else {}  # fmt: skip
    model = built(
        bench, lambda: HunyuanVideoTransformer3DModel(
            num_layers=parts, num_single_layers=2 * parts, **size
        ),
    )  # fmt: skip
    frames, high, wide = (2, 12, 16) if bench.toy else (33, 34, 60)
    latents = noise(bench, 1, 16, frames, 2 * high, 2 * wide)
    text = noise(bench, 1, 256, model.config.text_embed_dim)
    pooled = noise(bench, 1, model.config.pooled_projection_dim)
    real = torch.zeros(1, 256, device=bench.device, dtype=torch.bool)
    real[:, :100] = True  # a prompt of 100 tokens, padded as the pipeline does

    def inputs(timestep: float) -> dict[str, Any]:
        return {
            "hidden_states": latents, "encoder_hidden_states": text,
            "encoder_attention_mask": real, "pooled_projections": pooled,
            "timestep": torch.tensor([timestep], device=bench.device),
            "guidance": torch.tensor([6000.0], device=bench.device, dtype=bench.dtype),
        }  # fmt: skip

    return Subject("hunyuan-544p", model, inputs, frames * high * wide + 256)


def cogvideox(bench: Bench, newer: bool = False) -> Subject:
    """480×720×49, or 768×1360×81 of version 1.5; both branches of the guidance in one batch."""
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    size = {"num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32,
            "time_embed_dim": 2, "max_text_seq_length": 16, "num_layers": 4} if bench.toy else {
            "num_attention_heads": 48, "attention_head_dim": 64, "time_embed_dim": 512,
            "text_embed_dim": 4096, "max_text_seq_length": 226, "num_layers": 42}  # fmt: skip
    if newer:
        size |= {"patch_size_t": 2, "patch_bias": False}
    model = built(
        bench, lambda: CogVideoXTransformer3DModel(
            sample_width=90, sample_height=60, sample_frames=49,
            use_rotary_positional_embeddings=True, **size,
        ), blocks=True,
    )  # fmt: skip
    frames, high, wide = (11, 48, 85) if newer else (13, 30, 45)
    if bench.toy:
        frames, high, wide = 3, 12, 16
    latents = noise(bench, 2, frames * (2 if newer else 1), 16, 2 * high, 2 * wide)
    text = noise(bench, 2, model.config.max_text_seq_length, model.config.text_embed_dim)
    turns = get_3d_rotary_pos_embed(
        model.config.attention_head_dim, ((0, 0), (high, wide)), (high, wide), frames,
        device=bench.device,
    )  # fmt: skip

    def inputs(timestep: float) -> dict[str, Any]:
        return {
            "hidden_states": latents, "encoder_hidden_states": text, "image_rotary_emb": turns,
            "timestep": torch.full((2,), int(timestep), device=bench.device),
        }  # fmt: skip

    label = "cogvideox1.5-5b" if newer else "cogvideox-5b"
    return Subject(label, model, inputs, frames * high * wide + text.shape[1])


def built(bench: Bench, make: Callable[[], Any], blocks: bool = False) -> Any:
    """A model on the device, its blocks compiled: for every shape by itself, or once for all."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = make()
    model = cast(model, bench.dtype).eval().requires_grad_(False)
    how: dict[str, Any] = {"fullgraph": True, "dynamic": bench.dynamic}
    if bench.toy:
        how["backend"] = "aot_eager"
    if blocks:  # a model without a list of repeated blocks: each is compiled where it stands
        for block in model.transformer_blocks:
            block.compile(**how)
    else:
        model.compile_repeated_blocks(**how)
    return model


def cast(model: Any, dtype: torch.dtype) -> Any:
    """As `from_pretrained` would: some parts of a model ask to stay in fp32."""
    wide = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and not any(part in name.split(".") for part in wide):
            value.data = value.data.to(dtype)
    return model


def noise(bench: Bench, *size: int) -> Tensor:
    generator = torch.Generator(bench.device).manual_seed(1)
    return torch.randn(size, generator=generator, device=bench.device, dtype=bench.dtype)


# Measuring


@contextmanager
def applied(subject: Subject, method: Method | None, **how: Any) -> Iterator[Any]:
    """The subject with a method; None is the model as it is."""
    if method is None:
        yield None
        return
    handle = apply_sparse_attention(subject.model, method, **how)
    try:
        yield handle
    finally:
        handle.remove()


def timed(bench: Bench, call: Callable[[], object]) -> float:
    """Milliseconds of one call, the device's own where it has a clock."""
    if bench.toy:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def sparse(method: Method) -> Schedule:
    return Schedule(method, dense_layers=(0,))


def compare(
    bench: Bench, subject: Subject, methods: dict[str, Method], stock: bool = True, **more: Any
) -> None:
    """Time a dense forward and one with every method, taking turns; a row each."""
    calls: dict[str, Method | None] = {"dense": DENSE, **({"stock": None} if stock else {})}
    calls |= {name: sparse(method) for name, method in methods.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    found: dict[str, dict[str, Any]] = {}
    for name, method in list(calls.items()):  # the first call compiles and warms up
        try:
            with applied(subject, method) as handle:
                caught: list[AttentionCall] = []
                if handle is not None:
                    handle.run.watch = lambda seen, caught=caught: keep_second(seen, caught)
                ms = timed(bench, lambda: subject.forward(900.0))
                if handle is not None:
                    handle.run.check()  # not finite raises
                    found[name] = facts(handle) | errors_of(caught[0])
            bench.say(f"{subject.name}: {name} ready ({ms / 1e3:.1f} s)")
        except Exception as error:
            failed(bench, subject, name, error)
            del calls[name]
    for turn in range(bench.repeats):
        if turn and bench.left < 30:
            bench.say(f"{subject.name}: {turn} repeats, the time is up")
            break
        for name, method in calls.items():
            with applied(subject, method):
                times[name].append(timed(bench, lambda: subject.forward(900.0)))
    median = {name: statistics.median(ms) for name, ms in times.items() if ms}
    if "dense" not in median:
        return
    for name in methods:
        if name in median:
            bench.add(
                part="forward", model=subject.name, tokens=subject.tokens, method=name,
                dense_ms=median["dense"], ms=median[name],
                speedup=median["dense"] / median[name], stock_ms=median.get("stock"),
                times=[round(t, 3) for t in times[name]],
                dense_times=[round(t, 3) for t in times["dense"]],
                dense_error=found["dense"]["error"], **found[name], **more,
            )  # fmt: skip


def facts(handle: Any) -> dict[str, Any]:
    """What a run did: its achieved cost and who did the work."""
    stats = handle.stats()
    return {
        "cost": stats.sparse_cost,
        "backend": next((row.backend for row in stats.rows if row.reason is None), None),
        "dense_backend": next((row.backend for row in stats.rows if row.reason is not None), None),
        "sparse_calls": sum(row.reason is None for row in stats.rows),
        "calls": len(stats.rows),
    }


def keep_second(seen: AttentionCall, caught: list[AttentionCall]) -> None:
    """Of layer 1, the first that is sparse."""
    if seen.site.layer == 1 and not caught:
        caught.append(seen.copied())


def lengths_of(seen: AttentionCall) -> tuple[int, ...]:
    assert seen.padding is not None
    assert seen.padding.host is not None
    return seen.padding.host


def error_of(seen: AttentionCall, rows: int = 256) -> float:
    """Relative error of an attention output against dense attention in fp32 on the same tensors,
    over rows spread along the video."""
    keys = seen.k.shape[2] if seen.padding is None else lengths_of(seen)[0]
    at = torch.linspace(0, min(keys, seen.q.shape[2]) - 1, rows, device=seen.q.device).long()
    scale = seen.scale or seen.q.shape[3] ** -0.5
    wrong = total = 0.0
    for head in range(seen.q.shape[1]):
        q, out = (x[:, head, at].float() for x in (seen.q, seen.result.out))
        k, v = (x[:, head, :keys].float() for x in (seen.k, seen.v))
        exact = (q @ k.transpose(1, 2) * scale).softmax(-1) @ v
        wrong += float((out - exact).double().square().sum())
        total += float(exact.double().square().sum())
    return float((wrong / total) ** 0.5)


def errors_of(seen: AttentionCall) -> dict[str, float]:
    """`kernel_error` is against fp32 over the same plan: what the kernel does. `error` is against
    dense attention: what the method leaves out, too."""
    error = error_of(seen)
    plan = seen.result.executed
    if plan is None:
        return {"error": error, "kernel_error": error}
    q, k, v, out = seen.q, seen.k, seen.v, seen.result.out
    if seen.padding is not None:
        k, v = (x[:, :, : lengths_of(seen)[0]] for x in (k, v))
    if plan.layout.q.index is not None:
        q, k, v, out = (plan.layout.q.arrange(x) for x in (q, k, v, out))
    scale = seen.scale or q.shape[3] ** -0.5
    return {"error": error, "kernel_error": sampled_error(q, k, v, out, plan, scale)}


def failed(bench: Bench, subject: Subject, name: str, error: Exception) -> None:
    traceback.print_exc(limit=6)
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    bench.add(part="failed", model=subject.name, method=name, error=text[:300])


# Parts

P480 = ("wan-480p", 21, 30, 52)
P720 = ("wan-720p", 21, 45, 80)
# 81 frames each; height × width in pixels is 16 times the grid's.
SWEEP = (("wan-320p", 21, 20, 36), ("wan-400p", 21, 25, 44), P480, ("wan-600p", 21, 37, 66), P720)


def entropy(mean: float) -> Method:
    return Entropy(Budget(mean))


HALF: dict[str, Method] = {"entropy 0.5": entropy(0.5)}


def part_480p(bench: Bench) -> None:
    subject = wan(bench, _wan(bench), *P480)
    compare(bench, subject, {"entropy 0.5": entropy(0.5), "entropy 0.3": entropy(0.3)})


def part_720p(bench: Bench) -> None:
    subject = wan(bench, _wan(bench), *P720)
    methods = {
        "entropy 0.5": entropy(0.5),
        "entropy 0.3": entropy(0.3),
        "rf_v2 sparsity 0.8": RfV2(sparsity=0.8),
        "psa cost 0.15": Psa(),  # its default shares: 0.1 + 0.05 / 2 + 0.2 / 8
    }
    compare(bench, subject, methods)


def part_schedule(bench: Bench) -> None:
    """A loop of ten steps, the first two dense, against ten dense ones; and fifty by addition."""
    subject = wan(bench, _wan(bench), *P720)
    steps, dense_steps = 10, 2
    method = Schedule(entropy(0.5), dense_steps=0.2, dense_layers=(0,))
    for warm in (DENSE, sparse(entropy(0.5))):
        with applied(subject, warm):
            subject.forward(900.0)
    times: dict[str, float] = {}
    each: dict[str, list[float]] = {}
    for name, of in (("dense", DENSE), ("sparse", method)):
        with applied(subject, of, steps=steps) as handle:
            clock = Ticks(bench)
            times[name] = timed(bench, lambda clock=clock: loop(subject, steps, clock))
            each[name] = clock.ms()
            if name == "sparse":
                found = facts(handle)
    dense = statistics.median(each["dense"])
    sparse_ms = statistics.median(each["sparse"][dense_steps:])
    fifty = 50 * dense / (10 * dense + 40 * sparse_ms)
    bench.add(
        part="schedule", model=subject.name, tokens=subject.tokens, method="entropy 0.5",
        steps=steps, dense_steps=dense_steps, dense_ms=times["dense"], ms=times["sparse"],
        speedup=times["dense"] / times["sparse"], dense_step_ms=dense, sparse_step_ms=sparse_ms,
        speedup_50_steps=fifty,
        speedup_50_steps_is="50 dense steps over 10 dense and 40 sparse ones, medians of this loop",
        step_ms=[round(t, 2) for t in each["sparse"]], **found,
    )  # fmt: skip


class Ticks:
    """Moments between steps, taken without waiting for the device."""

    def __init__(self, bench: Bench) -> None:
        self.toy, self.moments = bench.toy, []  # type: ignore[var-annotated]

    def __call__(self) -> None:
        if self.toy:
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def ms(self) -> list[float]:
        pairs = zip(self.moments, self.moments[1:], strict=False)
        if self.toy:
            return [1e3 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairs]


def loop(subject: Subject, steps: int, tick: Callable[[], None]) -> None:
    tick()
    for step in range(steps):
        subject.forward(1000.0 - 100.0 * step)
        tick()


def part_sweep(bench: Bench) -> None:
    measured = {row["model"] for row in bench.rows if row.get("method") == "entropy 0.5"}
    for size in SWEEP:
        if size[0] not in measured and bench.left > 20:
            subject = wan(bench, _wan(bench), *size)
            compare(bench, subject, {"entropy 0.5": entropy(0.5)}, stock=False)


def part_ti2v(bench: Bench) -> None:
    """Wan 2.2 TI2V 5B at 704×1280×121, a picture given."""
    subject = wan(bench, wan_model(bench, "ti2v-5b"), "wan2.2-ti2v-5b", 31, 22, 40)
    compare(bench, subject, HALF)


def part_i2v(bench: Bench) -> None:
    """Wan 2.1 I2V 14B at 480×832×81."""
    subject = wan(bench, wan_model(bench, "i2v-14b"), "wan-i2v-14b", 21, 30, 52)
    compare(bench, subject, HALF, stock=False)


def part_hunyuan(bench: Bench) -> None:
    """All 60 blocks."""
    compare(bench, hunyuan(bench, 2 if bench.toy else 20), HALF, stock=False)


def part_cogvideox(bench: Bench) -> None:
    compare(bench, cogvideox(bench), HALF)


def part_newer_cogvideox(bench: Bench) -> None:
    compare(bench, cogvideox(bench, newer=True), HALF, stock=False)


def part_host(bench: Bench) -> None:
    """jali's own Python per attention call.

    `Run.attend` is called on a short sequence, where the device is never the one that is waited
    for: `total_us`. Then it is called with launches that return at once (Triton's kernels, FA4,
    PyTorch's sum): `host_us`, all Python on the way to the launchers and PyTorch's allocations and
    views. `own_us` is that without the two; `launching_us` is what the launches added. Times are
    the host's fastest of some seconds; beside them stand medians, since it has slower phases.
    """
    subject = wan(bench, _wan(bench), "host", 5, 16, 16)
    methods: dict[str, Method] = {
        "entropy": entropy(0.5),
        "rf_v2": RfV2(sparsity=0.8),
        "ada_bsa": AdaBsa(sparsity=0.8),
        "psa": Psa(),
        "dense": DENSE,
    }
    for method in methods.values():  # what is to be compiled is, before any is measured
        with applied(subject, sparse(method)), torch.compiler.set_stance("force_eager"):
            subject.forward(900.0)
    for name, method in methods.items():
        with applied(subject, sparse(method)) as handle:
            run = handle.run
            with torch.compiler.set_stance("force_eager"):
                subject.forward(900.0)
            heads, dim = (
                subject.model.config.num_attention_heads,
                (subject.model.config.attention_head_dim),
            )
            q, k, v = (noise(bench, 1, subject.tokens, heads, dim) for _ in range(3))

            def call(q: Tensor = q, k: Tensor = k, v: Tensor = v, run: Any = run) -> None:
                run.attend(1, q, k, v, None, None, 1, 0)

            bench.add(part="host", model="wan", tokens=subject.tokens, method=name,
                      **host_times(bench, call))  # fmt: skip


def host_times(bench: Bench, call: Callable[[], None], calls: int = 400) -> dict[str, Any]:
    from host_cpu import asked_of_torch, shares, unlaunched

    x = torch.empty(2, 3, 4, device=bench.device)
    with torch.no_grad():
        for _ in range(20):
            call()
        total = min(median_us(bench, call, calls // 10) for _ in range(10))
        with nullcontext() if bench.toy else unlaunched():
            for _ in range(20):
                call()
            asked = asked_of_torch(call)
            # Hosts have slower and faster times of seconds; all three are taken at their fastest.
            works: tuple[Callable[[], object], ...] = (
                call,
                lambda: torch.empty(2, 3, 4, dtype=x.dtype, device=x.device),
                lambda: x.transpose(1, 2),
            )
            rounds = []
            for _ in range(5 if bench.toy else 60):
                rounds.append([median_us(bench, work, calls // 10) for work in works])
                time.sleep(0.05)
    alone, allocation, view = (min(times) for times in zip(*rounds, strict=True))
    usual = [shares(host, asked, *times) for host, *times in rounds]
    return {
        "total_us": total,
        "launching_us": total - alone,
        **shares(alone, asked, allocation, view),
        "rounds": len(rounds),
        "host_us_median": statistics.median(row["host_us"] for row in usual),
        "own_us_median": statistics.median(row["own_us"] for row in usual),
        "allocation_us_median": statistics.median(row["allocation_us"] for row in usual),
    }


def median_us(bench: Bench, call: Callable[[], object], calls: int) -> float:
    times = []
    for i in range(calls):
        if not bench.toy and i % 10 == 0:
            torch.cuda.synchronize()  # the queue never fills
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


_models: dict[str, Any] = {}


def _wan(bench: Bench) -> Any:
    """Built once: several parts use it."""
    if "wan" not in _models:
        bench.say("building WanTransformer3DModel at the size of Wan 2.1 1.3B")
        _models["wan"] = wan_model(bench)
    return _models["wan"]


PARTS: dict[str, Callable[[Bench], None]] = {
    "wan-480p": part_480p,
    "wan-720p": part_720p,
    "schedule": part_schedule,
    "host": part_host,
    "sweep": part_sweep,
    "ti2v": part_ti2v,
    "cogvideox": part_cogvideox,
    "hunyuan": part_hunyuan,
    "i2v": part_i2v,
    "cogvideox1.5": part_newer_cogvideox,
}
ALONE = ("ti2v", "cogvideox", "hunyuan", "i2v", "cogvideox1.5")  # they need the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--toy", action="store_true", help="tiny models in fp32 on the CPU")
    parser.add_argument("--seconds", type=float, default=400.0, help="start nothing after this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dynamic", action="store_true", help="compile once for all sizes")
    parser.add_argument("--name", default="wan-h200")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if not given.toy and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --toy runs on the CPU")
    path = Path(os.environ.get("OUT", ".")) / f"{given.name}.json"
    bench = Bench(given.toy, given.seconds, given.repeats, given.dynamic, path)
    torch._dynamo.config.recompile_limit = 64  # every shape is compiled for itself
    for name in given.parts or PARTS:
        if bench.left < 15:
            bench.say(f"{name}: skipped, the time is up")
            bench.add(part="skipped", model=name)
            continue
        bench.say(f"--- {name}")
        if name in ALONE:
            _models.clear()
            torch._dynamo.reset()
            gc.collect()
            if not bench.toy:
                torch.cuda.empty_cache()
        try:
            PARTS[name](bench)
        except Exception as error:
            failed(bench, Subject(name, nn.Identity(), lambda _t: {}, 0), "part", error)
    bench.write()
    bench.say(f"done: {path}")


if __name__ == "__main__":
    main()
