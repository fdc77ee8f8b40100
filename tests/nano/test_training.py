"""The parts of nano's training that must be exact."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from jali.nano import folder
from training import config, flow, latents, reader, state, train, trainer
from training.autoencoder import decode_whole, encode_whole
from training.cross_attention import attend_without_padding
from training.muon import Muon, orthogonal


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(config.AUTOENCODER, "base_dim", 8)
    monkeypatch.setitem(config.AUTOENCODER, "decoder_base_dim", 8)
    monkeypatch.setitem(config.TRANSFORMER, "num_layers", 1)
    monkeypatch.setitem(config.TRANSFORMER, "ffn_dim", 64)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("frames", [1, 5, 13])
def test_a_whole_clip_gives_what_the_stock_chunks_give(frames: int) -> None:
    torch.manual_seed(0)
    vae = config.autoencoder().eval()
    clip = torch.randn(2, 3, frames, 16, 24)
    with torch.no_grad():
        stock = vae._encode(clip)
        torch.testing.assert_close(encode_whole(vae, clip), stock, atol=1e-5, rtol=1e-4)
        latents = stock[:, :16]
        whole = decode_whole(vae, latents).clamp(-1, 1)
        torch.testing.assert_close(whole, vae._decode(latents).sample, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("small")
def test_latents_of_a_clip_begin_with_those_of_its_beginning() -> None:
    """What lets training cut latents in time."""
    vae = config.autoencoder().eval()
    clip = torch.randn(1, 3, 13, 16, 16)
    with torch.no_grad():
        long, short = encode_whole(vae, clip), encode_whole(vae, clip[:, :, :5])
    torch.testing.assert_close(long[:, :, :2], short, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("small")
def test_attention_without_padding_is_exact() -> None:
    torch.manual_seed(1)
    model = config.transformer().eval()
    text = torch.randn(2, 40, 128)
    text[0, 17:] = 0
    text[1, 39:] = 0
    padded = nn.functional.pad(text, (0, 0, 0, config.TEXT_LENGTH - 40))
    noisy, time = torch.randn(2, 16, 2, 4, 4), torch.tensor([500.0, 20.0])
    with torch.no_grad():
        stock = model(noisy, time, padded, return_dict=False)[0]
        attend_without_padding(model, 40, config.TEXT_LENGTH)
        torch.testing.assert_close(model(noisy, time, text, return_dict=False)[0], stock)
        attend_without_padding(model, 40, 40)
        unlike = model(noisy, time, text, return_dict=False)[0]
    assert (unlike - stock).abs().max() > 1e-3  # the padding matters


def test_muon_steps_are_orthogonal_and_as_large_as_adams() -> None:
    torch.manual_seed(0)
    for shape in ((3, 40, 24), (2, 24, 40)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.3
    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.randn(64, 64)
    Muon([weight], lr=0.01).step()
    assert 0.5 * 0.2 * 0.01 < float(weight.detach().square().mean().sqrt()) < 2 * 0.2 * 0.01


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match="matrices only"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_muon_learns() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    target, x = torch.randn(16, 16), torch.randn(64, 16)
    optimiser = Muon(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(200):  # a step moves an entry by about 0.01, and they are 1 away
        loss = (layer(x) - x @ target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


def test_a_lesson_asks_only_for_what_is_said() -> None:
    tokens, said = reader.lesson(50, 3, config.tokenizer())
    assert tokens.shape[0] == said.shape[0] == 50
    for column, table in enumerate(reader.KINDS.values()):
        assert int(said[:, column].min()) >= 0
        assert int(said[:, column].max()) <= len(table)
    colours = said[:, list(reader.KINDS).index("colour")]
    assert (colours > 0).all()  # the colour is always said


def test_the_curriculum_covers_the_whole_time_and_starts_with_pictures() -> None:
    ends = [phase.until for phase in flow.CURRICULUM]
    assert ends == sorted(ends)
    assert ends[-1] == 1.0
    assert flow.due(0, 0.0).set.frames == 1
    whole = {latents.CLIPS, latents.WIDE_CLIPS, latents.LONG_CLIPS}
    assert {flow.due(i, 0.3).set for i in range(5)} == whole
    assert {flow.due(i, 0.99).set for i in range(7)} == set(latents.SETS)
    assert flow.due(0, 1.5) in flow.CURRICULUM[-1].batches


def test_only_what_a_span_needs_is_encoded() -> None:
    whole = {latents.CLIPS, latents.WIDE_CLIPS, latents.LONG_CLIPS}
    assert flow.sets_of((0.15, 0.35)) == whole
    assert flow.sets_of((0.0, 0.01)) == {latents.PICTURES, latents.WIDE_PICTURES}
    assert flow.sets_of((0.0, 1.0)) == set(latents.SETS)


def test_larger_grids_are_trained_at_higher_noise() -> None:
    small, wide = flow.WHOLE
    assert small.shift == config.SHIFT
    assert 2 * small.shift < wide.shift < 2.1 * small.shift  # 9,600 tokens for 2,304


@pytest.mark.usefixtures("small")
def test_a_state_comes_back_in_half_precision(tmp_path: Path) -> None:
    torch.manual_seed(2)
    made = state.new_state()
    made.mean, made.log = [0.25] * 16, [{"part": "flow", "steps": 3}]
    state.save_state(made, tmp_path)
    back = state.load_state(tmp_path)
    assert (back.mean, back.std, back.log) == (made.mean, made.std, made.log)
    for name in state.PARTS:
        for key, weight in getattr(made, name).state_dict().items():
            assert torch.equal(getattr(back, name).state_dict()[key], weight.half().float()), key
    with torch.no_grad():
        made.text_encoder.shared.weight[0, 0] = 1e9
    with pytest.raises(ValueError, match="half precision"):
        state.save_state(made, tmp_path / "broken")


def test_the_shipped_weights_make_a_state_within_its_limits(tmp_path: Path) -> None:
    shipped = state.load_state(folder())
    assert len(shipped.mean) == 16
    state.save_state(shipped, tmp_path)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) <= 8
    assert max(sizes) <= 16 * 2**20
    assert sum(sizes) <= 36e6


def test_too_large_a_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "TOTAL_LIMIT", 10**6)
    with pytest.raises(ValueError, match="more than they may"):
        state.save_state(state.new_state(), tmp_path)


def test_rates_rise_stay_and_settle() -> None:
    layer = nn.Linear(2, 2)
    clock = trainer.Clock(1000.0)
    run = trainer.Trainer(layer, [torch.optim.SGD(layer.parameters(), 1.0)], clock, settle=0.5)
    rates = []
    for progress in (0.0, 0.3, 0.75, 0.9999):
        clock.start = time.monotonic() - 1000 * progress
        run.steps = 0 if progress == 0 else 500
        run.step(layer(torch.ones(1, 2)).sum())
        rates.append(run.optimisers[0].param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 1.0, 0.525, 0.05], abs=0.001)


def test_an_average_is_lent_and_given_back() -> None:
    layer = nn.Linear(2, 2)
    mean = trainer.Average(layer, 0.5)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight += 1
    with mean.applied():
        assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, before + 1)


@pytest.mark.usefixtures("small")
def test_a_stage_goes_on_from_the_last_and_becomes_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import WanPipeline

    sets = [latents.Set(f, 16, w, 2) for f in (1, 5) for w in (16, 32)]
    for name, value in (("CROP", 16), ("FRAMES", 5), ("BATCH", 1), ("AT_ONCE", 2),
                        ("SENTENCES", 4), ("CLIPS", sets[2]),
                        ("WIDE_CLIPS", sets[3])):  # fmt: skip
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(latents, "SETS", tuple(sets))
    monkeypatch.setattr(latents, "FEWEST", 2)
    phase = flow.Phase(1.0, (flow.Batch(sets[0], 1, 2), flow.Batch(sets[3], 2, 1)))
    monkeypatch.setattr(flow, "CURRICULUM", (phase,))
    monkeypatch.setattr(train, "lesson", lambda _n, *rest: reader.lesson(16, *rest))
    one, cpu = tmp_path / "one", torch.device("cpu")
    train.train(state.new_state(), (0.1, 0.1, 0.1), one, tmp_path / "latents", cpu)
    first = state.load_state(one)
    assert [part["part"] for part in first.log] == ["autoencoder", "text", "flow"]
    assert first.mean != [0.0] * 16
    made = sorted((tmp_path / "latents").iterdir())
    two = tmp_path / "two"
    train.train(state.load_state(one), (0, 0, 5.0), two, tmp_path / "latents", cpu, limit=0.0)
    second = state.load_state(two)
    assert [part["part"] for part in second.log][3:] == ["flow"]
    assert second.log[-1]["seconds"] == 1.0  # the limit left no more
    assert sorted((tmp_path / "latents").iterdir()) == made  # the autoencoder is the same
    kept, moved = first.autoencoder.state_dict(), first.transformer.state_dict()
    assert all(torch.equal(w, kept[k]) for k, w in second.autoencoder.state_dict().items())
    assert not all(torch.equal(w, moved[k]) for k, w in second.transformer.state_dict().items())
    three = tmp_path / "three"
    train.train(state.load_state(two), (0, 0, 0), three, tmp_path / "latents", cpu)
    assert state.load_state(three).log == second.log  # no time leaves everything as it is
    train.export(second, tmp_path / "pipe")
    again = state.load_state(tmp_path / "pipe")  # a pipeline is a start, too
    assert again.mean == second.mean
    pipe = WanPipeline.from_pretrained(str(tmp_path / "pipe"), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    clip = pipe(
        "a red ball", height=16, width=16, num_frames=5, num_inference_steps=1, output_type="pt"
    ).frames
    assert clip.shape == (1, 5, 3, 16, 16)
    assert torch.isfinite(clip).all()
