"""Steps and branches, from everything a pipeline may or may not announce."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

import jali
from jali.integration.clock import Clock, Context, Moment
from jali.integration.families import BRANCHES

BLOCKS: dict[str, Any] = {"q_block": 64, "k_block": 64}
SPARSE: dict[str, Any] = {"warmup_frac": 0, "dense_first_layer": False, **BLOCKS}


def named(name: str | None, step: int | None = None, steps: int | None = None) -> Context:
    context = Context()
    context.set_context(SimpleNamespace(name=name, step_index=step, num_inference_steps=steps))
    return context


def pipeline(timesteps: list[float], current: float | None = None, count: int | None = None) -> Any:
    class Pipe:
        scheduler = SimpleNamespace(timesteps=torch.tensor(timesteps))
        _current_timestep = None if current is None else torch.tensor(current)
        _num_timesteps = count or len(timesteps)

    return Pipe()


def tick(clock: Clock, t: Any, context: Context | None = None) -> tuple[int, int, str]:
    moment: Moment = clock.tick(t, context or named(None), BRANCHES)
    return moment.step, moment.steps, moment.branch


class TestClock:
    def test_an_announced_step_wins(self) -> None:
        clock = Clock()
        assert tick(clock, torch.tensor([1.0]), named("cond", 7, 30)) == (7, 30, "cond")

    def test_the_old_api_gives_a_name_only(self) -> None:
        context = Context()
        context.set_context("uncond")
        assert tick(Clock(steps=4), torch.tensor([900.0]), context) == (0, 4, "uncond")
        context.set_context(None)
        assert context.name is None

    @pytest.mark.parametrize("unit", [1.0, 0.001])
    def test_looked_up_in_either_unit(self, unit: float) -> None:
        pipe = pipeline([1000.0, 750.0, 400.0])
        clock = Clock(weakref.ref(pipe))
        for step, t in enumerate((1000.0, 750.0, 400.0)):
            assert tick(clock, torch.tensor([t * unit]), named("cond")) == (step, 3, "cond")

    def test_neighbours_that_look_equal_in_bf16(self) -> None:
        pipe = pipeline([1000.0, 998.5, 997.0], current=998.5)
        rounded = torch.tensor([998.5]).bfloat16()
        clock = Clock(weakref.ref(pipe))
        assert tick(clock, rounded, named("cond")) == (1, 3, "cond")
        assert tick(clock, (torch.tensor([998.5]) / 1000).bfloat16(), named("cond"))[0] == 1

    def test_given_frames_are_at_zero(self) -> None:
        pipe = pipeline([1000.0, 500.0])
        t = torch.tensor([[0.0, 0.0, 500.0, 500.0]])
        assert tick(Clock(weakref.ref(pipe)), t, named("cond"))[0] == 1

    def test_image_to_image_starts_later(self) -> None:
        pipe = pipeline([1000.0, 750.0, 500.0, 250.0], count=2)
        clock = Clock(weakref.ref(pipe))
        assert tick(clock, torch.tensor([500.0]), named("cond")) == (0, 2, "cond")
        assert tick(clock, torch.tensor([250.0]), named("cond")) == (1, 2, "cond")

    def test_counted_without_a_pipeline(self) -> None:
        clock = Clock(steps=3)
        seen = [tick(clock, torch.tensor([t])) for t in (9.0, 9.0, 5.0, 5.0, 1.0, 1.0)]
        assert seen == [(s, 3, b) for s in range(3) for b in ("cond", "uncond")]
        # The timestep rises: another generation.
        assert tick(clock, torch.tensor([9.0])) == (0, 3, "cond")

    def test_counting_says_when_steps_were_too_few(self, caplog: Any) -> None:
        clock = Clock(steps=1)
        tick(clock, torch.tensor([9.0]))
        assert tick(clock, torch.tensor([5.0])) == (1, 2, "cond")
        assert "more steps than the 1" in caplog.text

    def test_a_foreign_timestep_is_counted_and_said(self, caplog: Any) -> None:
        pipe = pipeline([1000.0, 500.0])
        clock = Clock(weakref.ref(pipe))
        assert tick(clock, torch.tensor([333.0]), named("cond"))[0] == 0
        assert "not one of the scheduler's" in caplog.text

    def test_unknown_names_stay(self) -> None:
        assert tick(Clock(steps=1), torch.tensor([1.0]), named("uncond_stg"))[2] == "uncond_stg"


def places(run: Any) -> set[tuple[int, int, str]]:
    return {(r.layer, r.step, r.branch) for r in run.stats().rows}


def test_two_experts_share_one_count_of_steps() -> None:
    pipe = tiny.wan(layers=2, experts=2)
    with jali.sparse_processor_mode(pipe, 0.3, **SPARSE) as run:
        tiny.generate(pipe, tiny.WAN_CALL, steps=6)
    by = {name: set() for name in ("transformer", "transformer_2")}
    for row in run.stats().rows:
        by[row.transformer].add(row.step)
    assert by["transformer"] | by["transformer_2"] == set(range(6))
    assert not by["transformer"] & by["transformer_2"]
    assert min(by["transformer_2"]) == max(by["transformer"]) + 1


def test_warmup_is_a_share_of_all_steps() -> None:
    pipe = tiny.wan(layers=2, experts=2)
    with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=0.5, dense_first_layer=False) as run:
        tiny.generate(pipe, tiny.WAN_CALL, steps=6)
    assert {r.step for r in run.stats().rows if r.reason is None} == {3, 4, 5}


def test_a_batch_of_prompts_under_guidance() -> None:
    pipe = tiny.cogvideox()
    call = {**tiny.COG_CALL, "prompt": ["a", "b"], "negative_prompt": ["", ""]}
    with jali.sparse_processor_mode(pipe, 0.3, **SPARSE) as run:
        tiny.generate(pipe, call, steps=2)
    assert places(run) == {(i, s, "batched") for i in range(3) for s in range(2)}


def test_unguided_cogvideox_is_one_branch() -> None:
    pipe = tiny.cogvideox()
    with jali.sparse_processor_mode(pipe, 0.3, **SPARSE) as run:
        tiny.generate(pipe, {**tiny.COG_CALL, "guidance_scale": 1.0}, steps=2)
    assert len(places(run)) == 6
