"""The parts of nano's training that must be exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from training import config, flow, latents, reader, train
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
    for column, count in enumerate(reader.WORDS.values()):
        assert int(said[:, column].min()) >= 0
        assert int(said[:, column].max()) <= count
    colours = said[:, list(reader.WORDS).index("colour")]
    assert (colours > 0).all()  # the colour is always said


def test_the_curriculum_covers_the_whole_time_and_starts_with_pictures() -> None:
    ends = [phase.until for phase in flow.CURRICULUM]
    assert ends == sorted(ends)
    assert ends[-1] == 1.0
    assert flow.due(0, 0.0).set.frames == 1
    assert {flow.due(i, 0.99).set for i in range(4)} == {latents.CLIPS, latents.WIDE_CLIPS}
    assert flow.due(0, 1.5) in flow.CURRICULUM[-1].batches


@pytest.mark.usefixtures("small")
def test_every_stage_runs_is_found_again_and_becomes_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import WanPipeline

    sets = [latents.Set(f, 16, w, 2) for f in (1, 5) for w in (16, 32)]
    monkeypatch.setattr(train, "CROP", 16)
    monkeypatch.setattr(latents, "SETS", tuple(sets))
    monkeypatch.setattr(train, "CLIPS", sets[2])
    monkeypatch.setattr(train, "WIDE_CLIPS", sets[3])
    phase = flow.Phase(1.0, (flow.Batch(sets[0], 1, 2), flow.Batch(sets[3], 2, 1)))
    monkeypatch.setattr(flow, "CURRICULUM", (phase,))
    monkeypatch.setattr(train, "SECONDS", dict.fromkeys(train.SECONDS, 0.2))
    whole = train.train_autoencoder
    monkeypatch.setattr(
        train, "train_autoencoder", lambda vae, _f, _b, *rest: whole(vae, 5, 1, *rest)
    )
    monkeypatch.setattr(train, "lesson", lambda _n, *rest: reader.lesson(16, *rest))
    cpu = torch.device("cpu")
    train.train(tmp_path, 1.0, cpu, False, 0, "text")
    assert not (tmp_path / "flow.pt").exists()
    made = (tmp_path / "autoencoder.pt").stat().st_mtime_ns
    train.train(tmp_path, 1.0, cpu, False, 0, "flow")
    assert (tmp_path / "autoencoder.pt").stat().st_mtime_ns == made
    train.export(tmp_path, tmp_path / "pipe")
    # the exported autoencoder can be taken instead of training one
    train.train(tmp_path / "again", 1.0, cpu, False, 0, "autoencoder", tmp_path / "pipe" / "vae")
    adopted = torch.load(tmp_path / "again" / "statistics.pt", weights_only=True)
    own = torch.load(tmp_path / "statistics.pt", weights_only=True)
    torch.testing.assert_close(adopted["mean"], own["mean"], atol=1e-4, rtol=0)
    pipe = WanPipeline.from_pretrained(str(tmp_path / "pipe"), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    clip = pipe(
        "a red ball", height=16, width=16, num_frames=5, num_inference_steps=1, output_type="pt"
    ).frames
    assert clip.shape == (1, 5, 3, 16, 16)
    assert torch.isfinite(clip).all()
