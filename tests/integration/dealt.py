"""What one rank does in the tests of runs of several steps, and who waits for whom in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import tiny
import torch
import torch.distributed as dist

import jali
from jali import Budget, Curve, Entropy, Mass, RateDistortion, Schedule
from jali.integration.run import Run
from jali.maskbook import Fingerprint, Header, write_book
from jali.maskbook.cached import Cached
from jali.maskbook.header import Errors
from jali.methods import Method
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Raster

HEADS, LAYERS, STEPS = 8, 2, 4
TIMES = torch.linspace(950, 150, STEPS).tolist()
BLOCKS: dict[str, Any] = {"q_block": 16, "k_block": 16}


class Film(NamedTuple):
    """What came of the steps of a run, both branches of each; and what every rank's heads did."""

    out: torch.Tensor
    work: dict[tuple[int, int, str], list[float]]
    dealt: bool

    @property
    def waited(self) -> float:
        """What the ranks took that were waited for, over an even share."""
        return sum(map(max, self.work.values())) / sum(
            sum(each) / len(each) for each in self.work.values()
        )


def model() -> Any:
    """Heads of very different sharpness, the sharp ones first: one rank has all of them."""
    made = tiny.wan_transformer(LAYERS, heads=HEADS, dim=16)
    for block in made.blocks:
        sharpness = torch.linspace(2.5, -1, HEADS).exp()
        block.attn1.norm_q.weight.data *= sharpness.repeat_interleave(16)
    return made


def wan_inputs(t: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(1, 16, 5, 16, 16, generator=g),
        "encoder_hidden_states": torch.randn(1, 16, 32, generator=g),
        "timestep": torch.tensor([t]), "return_dict": False,
    }  # fmt: skip


def flux_inputs(t: float) -> dict[str, Any]:
    from test_compile import flux_inputs

    given = flux_inputs(t)
    given["hidden_states"], given["img_ids"] = given["hidden_states"][:, :256], grid_ids(16)
    return given


def grid_ids(size: int) -> torch.Tensor:
    ids = torch.zeros(size, size, 3)
    ids[..., 1], ids[..., 2] = torch.arange(size)[:, None], torch.arange(size)
    return ids.view(-1, 3)


def book(of_rd: bool) -> Method:
    """Some heads with far larger errors, or far more even importance, than others."""
    header = Header(
        fingerprints={"transformer": Fingerprint("WanTransformer3DModel", "0" * 64)},
        grid=TokenGrid.video(5, 8, 8), order=Raster(), blocks=Blocks(16, 16), layers=LAYERS,
        heads=HEADS, noise=tuple(1 - step / STEPS for step in range(STEPS)), noise_kind="sigma",
        transformers=("transformer",) * STEPS, branches=("mean",), prompts=(),
        budgets=() if of_rd else (0.3,), importance=not of_rd,
        errors=Errors((2, 4, 8, 0), 0.4) if of_rd else None,
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    size = torch.linspace(4, 0, HEADS)[:, None, None]
    if of_rd:
        x = torch.randn(*header.outer, *header.slab, generator=g).exp().sort(-1).values
        x *= size[..., None].exp()
    else:
        x = (torch.randn(*header.outer, *header.slab[:4], generator=g) * size).softmax(-1)
    return Cached(write_book(None, header, lambda step, layer: x[step, layer]), Budget(0.3))


METHODS: dict[str, Method] = {
    "entropy, falling": Schedule(Entropy(**BLOCKS), curve=Curve(0.5)),
    "rd, kept": RateDistortion(0.3, samples=4, keep=2, **BLOCKS),
    "mass, kept": Mass(budget=0.3, keep=2, **BLOCKS),
}


def film(
    build: Any, inputs: Any, method: Method, config: Any = None, deal: bool = True,
    compiled: bool = False,
) -> Film:  # fmt: skip
    """All steps, on this rank alone, or with a config on all of them."""
    made = build()
    if config is not None:
        made.enable_parallelism(config=config)
    outs = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if not deal:
            patch.setattr(Run, "deals_heads", False)
        with jali.sparse_processor_mode(made, method=method, steps=STEPS) as run:
            if compiled:
                torch.compiler.reset()
                made.compile_repeated_blocks(backend="aot_eager")
            for t in TIMES:
                for branch in range(2):
                    given = inputs(t)
                    given["hidden_states"] = given["hidden_states"] * (t / 1000) + 0.1 * branch
                    outs.append(made(**given)[0])
    mine = {(r.layer, r.step, r.branch): sum(r.heads) for r in run.stats().rows}
    work: list[Any] = [mine]
    if config is not None:
        work = [None] * dist.get_world_size()
        dist.all_gather_object(work, mine)
    orders = run.run._dealing._next.values()
    dealt = any(not torch.equal(order, torch.arange(HEADS)) for order in orders)
    return Film(torch.stack(outs), {p: [rank[p] for rank in work] for p in mine}, dealt)


def apart(one: Film, several: Film) -> float:
    """The largest distance of any call."""
    off = (one.out - several.out).flatten(1).norm(dim=1) / one.out.flatten(1).norm(dim=1)
    return float(off.max())


def ulysses() -> Any:
    from diffusers import ContextParallelConfig

    return ContextParallelConfig(ulysses_degree=dist.get_world_size())


def tensors() -> Any:
    from diffusers import TensorParallelConfig
    from diffusers.hooks import tensor_parallel

    tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)
    return TensorParallelConfig(tp_degree=dist.get_world_size())


def flux() -> Any:
    from ranks import flux

    return flux()


def main(rank: int, ranks: int, store: str) -> None:
    # diffusers asks for an accelerator; on a CPU it gets the CPU.
    torch._C._get_accelerator = lambda *_: torch.device("cpu")  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: ranks  # type: ignore[assignment]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    methods = METHODS | {"a book": book(of_rd=False), "a book of rd": book(of_rd=True)}
    for name, method in methods.items():
        one = film(model, wan_inputs, method)
        dealt = film(model, wan_inputs, method, ulysses())
        assert apart(one, dealt) < 1e-5, f"{name}: {apart(one, dealt)}"
        assert dealt.dealt, name
        plain = film(model, wan_inputs, method, ulysses(), deal=False)
        assert not plain.dealt
        assert apart(one, plain) < 1e-5, f"{name}, not dealt: {apart(one, plain)}"
        assert dealt.waited < plain.waited, f"{name}: {dealt.waited}, not dealt {plain.waited}"
    if ranks == 2:
        one = film(model, wan_inputs, METHODS["entropy, falling"])
        several = film(model, wan_inputs, METHODS["entropy, falling"], ulysses(), compiled=True)
        assert several.dealt
        assert apart(one, several) < 1e-5, f"compiled: {apart(one, several)}"
    if not tiny.OLD:
        one = film(flux, flux_inputs, METHODS["rd, kept"])
        several = film(flux, flux_inputs, METHODS["rd, kept"], tensors())
        assert apart(one, several) < 1e-5, f"tensor parallel: {apart(one, several)}"
        assert not several.dealt  # the weights have been
    dist.barrier()
    dist.destroy_process_group()
