"""Who waits for whom among ranks: heads as they are, and dealt by what they cost last.

    python -m benchmarks.head_dealing --output benchmarks/results/head-dealing.json

Everything is by work, so a busy machine changes nothing. `costs` are those of every head in whole
runs of nano, on one process. `ranks` are runs by two and four processes (gloo): nano, with its four
heads, and a made-up model with eight, of different sharpness. `paper` is arithmetic: more heads
than nano has, drawn from nano's with what each costs along its run, dealt among so many GPUs by the
rules of `jali.integration.dealing`. A number is what the slowest rank of every call does, added up,
over an even share. A file that is there already keeps its costs and ranks.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from jali import Site, __version__, load_pipeline, make_method, sparse_processor_mode
from jali.files import read_json, write_json
from jali.integration import forecast
from jali.integration.dealing import deal
from jali.integration.run import Run
from training.scene import prompts

METHODS = ("entropy", "rd", "sol", "sparge", "mass")
TOTAL, STEPS, LAYERS, HEADS = 0.4, 12, 8, 4  # of nano
SIZE = {"height": 128, "width": 128, "num_frames": 33}
SHORT = {**SIZE, "num_frames": 17}  # for several processes
PAPER = ((40, 8), (40, 4), (24, 8), (12, 4))  # heads, GPUs
DRAWS = 200
WAN_720P = {"tokens": 75_600, "heads": 40, "head_dim": 128, "gpus": 8, "bytes": 2}
BANDWIDTH = 3e12  # bytes a second that copies are assumed to reach on an H200, of 4.8e12 on paper


def costs(pipe: Any, method: str, count: int) -> list[str]:
    """Of the sparse calls of some prompts, both branches together: "prompt step layer: costs"."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for i, text in enumerate(prompts(count)):
        with sparse_processor_mode(pipe, method=method, total=TOTAL, finite="off") as run:
            generate(pipe, text, i, SIZE)
        for row in run.stats().rows:
            if row.reason is None:
                place = i, row.step, row.layer
                both = zip(found.get(place, [0.0] * HEADS), row.heads, strict=True)
                found[place] = [a + b for a, b in both]
    return [
        f"{' '.join(map(str, place))}: {' '.join(f'{x:.4f}' for x in heads)}"
        for place, heads in found.items()
    ]


def generate(pipe: Any, text: str, seed: int, size: dict[str, int]) -> Any:
    dice = torch.Generator().manual_seed(seed)
    return pipe(
        text, **size, num_inference_steps=STEPS, guidance_scale=4.0, generator=dice,
        output_type="latent",
    )  # fmt: skip


Trace = dict[int, float]  # what a head costs in every step, both branches together


def traces(rows: list[str]) -> dict[tuple[int, int, int], Trace]:
    """By prompt, layer and head."""
    found: dict[tuple[int, int, int], Trace] = defaultdict(dict)
    for row in rows:
        place, heads = row.split(":")
        prompt, step, layer = map(int, place.split())
        for head, cost in enumerate(heads.split()):
            found[prompt, layer, head][step] = float(cost)
    return found


def waited(
    heads: list[tuple[Trace, Trace]], ranks: int, method: str
) -> dict[str, tuple[float, float]]:
    """(work of the slowest ranks, an even share) of a layer with these heads along a run; of each
    what it cost in the run before, and in this one."""
    period, steps = make_method(method).period, sorted(heads[0][1])
    plain = torch.arange(len(heads))
    earlier = torch.tensor([before[max(before)] for before, _ in heads])
    orders = {
        "as they are": plain, "snake": plain, "dealt": plain,
        "dealt, a later run": deal(earlier, ranks),
    }  # fmt: skip
    sums = {name: [0.0, 0.0] for name in (*orders, "by their own costs")}
    last, since = None, period(Site(steps[0], STEPS))
    for step in steps:
        now = torch.tensor([own[step] for _, own in heads])
        if last is not None and (at := period(Site(step, STEPS))) != since:
            since, made = at, deal(last, ranks)
            orders |= {"snake": snake(last, ranks), "dealt": made, "dealt, a later run": made}
        for name, own in (orders | {"by their own costs": deal(now, ranks)}).items():
            loads = now[own].view(ranks, -1).sum(1)
            sums[name][0] += float(loads.max())
            sums[name][1] += float(loads.mean())
        last = now
    return {name: (slowest, even) for name, (slowest, even) in sums.items()}


def snake(costs: torch.Tensor, ranks: int) -> torch.Tensor:
    """Back and forth, whatever the rounds before have made."""
    rounds = costs.argsort(descending=True).view(-1, ranks).clone()
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.reshape(-1)


def paper(rows: list[str], method: str) -> list[dict[str, Any]]:
    """nano's own layers among two ranks, and wider ones drawn from all of its heads: the second
    prompt's run, after the first one's."""
    by_head = traces(rows)
    every = [
        (by_head[0, layer, head], by_head[1, layer, head])
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    cases = [(HEADS, 2, [every[i : i + HEADS] for i in range(0, len(every), HEADS)])]
    dice = random.Random(0)
    for heads, ranks in PAPER:
        cases.append((heads, ranks, [dice.choices(every, k=heads) for _ in range(DRAWS)]))
    found = []
    for heads, ranks, layers in cases:
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for layer in layers:
            for name, (slowest, even) in waited(layer, ranks, method).items():
                sums[name][0] += slowest
                sums[name][1] += even
        ratios = {name: round(a / b, 4) for name, (a, b) in sums.items()}
        found.append({"method": method, "heads": heads, "ranks": ranks, **ratios})
    return found


def wan_on_paper(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of one layer of Wan 14B at 720p on eight GPUs: an even share of attention, and
    what moving heads takes."""
    S, H, D, gpus, size = WAN_720P.values()
    rate = forecast.constants()["devices"]["NVIDIA H200"]["fa4"]["sparse_tflops"]
    even = TOTAL * 4 * H / gpus * S**2 * D / (rate * 1e9)
    moved = 4 * 2 * (S / gpus) * H * D * size / BANDWIDTH * 1e3  # q, k, v and the result
    found: dict[str, Any] = {"even_ms": round(even, 3), "moving_ms": round(moved, 3)}
    for row in rows:
        if (row["heads"], row["ranks"]) == (H, gpus):
            before, after = row["as they are"] * even, row["dealt, a later run"] * even + moved
            found[row["method"]] = [round(before, 2), round(after, 2)]
    return found


# Several processes


def made_up() -> Any:
    """Eight heads, the sharp ones first."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=8, attention_head_dim=16, in_channels=16,
        out_channels=16, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=3, rope_max_seq_len=64,
    ).eval()  # fmt: skip
    for block in model.blocks:
        block.attn1.norm_q.weight.data *= torch.linspace(2.5, -1, 8).exp().repeat_interleave(16)
    return model


def steps_of(model: Any) -> None:
    """A run of a bare transformer, both branches of every step."""
    g = torch.Generator().manual_seed(2)
    x, text = torch.randn(1, 16, 5, 32, 32, generator=g), torch.randn(1, 16, 32, generator=g)
    for t in torch.linspace(950, 50, STEPS):
        for branch in range(2):
            noisy = x * (t / 1000) + 0.1 * branch
            model(noisy, timestep=t[None], encoder_hidden_states=text, return_dict=False)


def one_rank(rank: int, ranks: int, store: str, which: str, out: str) -> None:
    from diffusers import ContextParallelConfig

    # diffusers asks for an accelerator; on a CPU it gets the CPU.
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    torch.accelerator.device_count = lambda: ranks
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    target: Any = load_pipeline("nano", device="cpu", dtype=torch.float32) if which == "nano" else 0
    target = target or made_up()
    transformer = target.transformer if which == "nano" else target
    transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks))
    found = []
    for method in ("entropy", "rd"):
        row: dict[str, Any] = {"model": which, "ranks": ranks, "method": method}
        for name, deals in (("as they are", False), ("dealt", True)):
            Run.deals_heads = deals  # type: ignore[assignment, misc]
            options: dict[str, Any] = {"total": TOTAL, "finite": "off"}
            if which != "nano":
                options |= {"steps": STEPS, "q_block": 64, "k_block": 64}
            with sparse_processor_mode(target, method=method, **options) as run:
                if which == "nano":
                    target.set_progress_bar_config(disable=True)
                    generate(target, next(iter(prompts(1))), 0, SHORT)
                else:
                    steps_of(target)
            mine = [sum(r.heads) for r in run.stats().rows if r.reason is None]
            work: list[Any] = [None] * ranks
            dist.all_gather_object(work, mine)
            calls = list(zip(*work, strict=True))
            row[name] = round(sum(map(max, calls)) / sum(map(fmean, calls)), 4)
        found.append(row)
    if rank == 0:
        write_json(Path(out), {"rows": found})
    dist.barrier()
    dist.destroy_process_group()


def on_ranks() -> list[dict[str, Any]]:
    found = []
    for which, ranks in (("nano", 2), ("made-up", 2), ("made-up", 4)):
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/found.json"
            mp.spawn(one_rank, (ranks, f"{folder}/store", which, out), nprocs=ranks)
            found += read_json(Path(out))["rows"]
        print(*found[-2:], sep="\n", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=2)
    given = parser.parse_args()
    result: dict[str, Any] = read_json(given.output) if given.output.exists() else {}
    if "costs" not in result:
        torch.set_num_threads(1)
        pipe = load_pipeline("nano", device="cpu", dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        result["costs"] = {method: costs(pipe, method, given.prompts) for method in METHODS}
    if "ranks" not in result:
        result["ranks"] = on_ranks()
    rows = [row for method in METHODS for row in paper(result["costs"][method], method)]
    result |= {
        "paper": rows, "wan": wan_on_paper(rows), "shape": WAN_720P, "bandwidth": BANDWIDTH,
        "total": TOTAL, "steps": STEPS, "size": SIZE, "prompts": given.prompts, "draws": DRAWS,
        "date": datetime.date.today().isoformat(), "jali": __version__,
        "torch": torch.__version__, "machine": platform.machine(),
    }  # fmt: skip
    write_json(given.output, result)
    for row in rows:
        print(row)
    print(result["wan"])


if __name__ == "__main__":
    main()
