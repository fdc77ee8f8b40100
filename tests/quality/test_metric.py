"""Metrics against torchmetrics, against arithmetic, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from made_clips import disc, noisy
from torch import Tensor
from torchmetrics.functional.image import (
    multiscale_structural_similarity_index_measure,
    peak_signal_noise_ratio,
    structural_similarity_index_measure,
)

from jali.error import InputError
from jali.evaluation.quality import metric

SHAPES = [(2, 48, 64), (3, 31, 53), (1, 6, 6)]


def pair(shape: tuple[int, int, int], strength: int = 40) -> tuple[Tensor, Tensor]:
    clean = disc(*shape)
    return clean, noisy(clean, strength)


def planes(frames: Tensor) -> Tensor:
    """For torchmetrics, in float64: in float32 it is the less exact of the two."""
    return frames.movedim(3, 1).double() / 255


@pytest.mark.parametrize("shape", SHAPES)
def test_psnr_is_torchmetrics(shape: tuple[int, int, int]) -> None:
    a, b = pair(shape)
    theirs = torch.stack(
        [peak_signal_noise_ratio(planes(b[i : i + 1]), planes(a[i : i + 1]), data_range=1.0)
         for i in range(len(a))]
    )  # fmt: skip
    torch.testing.assert_close(metric.psnr(a, b).double(), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strength", [1, 40, 255])
def test_ssim_is_torchmetrics(shape: tuple[int, int, int], strength: int) -> None:
    a, b = pair(shape, strength)
    theirs = structural_similarity_index_measure(
        planes(b), planes(a), data_range=1.0, reduction="none"
    )
    torch.testing.assert_close(metric.ssim(a, b).double(), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(1, 176, 176), (1, 177, 190)])
@pytest.mark.parametrize("strength", [60])
def test_ms_ssim_is_torchmetrics(shape: tuple[int, int, int], strength: int) -> None:
    a, b = pair(shape, strength)
    theirs = multiscale_structural_similarity_index_measure(
        planes(b), planes(a), data_range=1.0, reduction="none"
    )
    ours = metric.ms_ssim(a, b)
    assert ours is not None
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=0)


def test_ms_ssim_is_not_there_below_its_least_side() -> None:
    side = metric.MS_SSIM_SIDE
    small = torch.zeros(1, side - 1, side, 3, dtype=torch.uint8)
    assert metric.ms_ssim(small, small) is None
    with pytest.raises(ValueError, match="height must be larger"):  # theirs draws the same line
        multiscale_structural_similarity_index_measure(planes(small), planes(small), data_range=1.0)


def test_equal_frames(frames: Tensor) -> None:
    assert metric.psnr(frames, frames).isinf().all()
    torch.testing.assert_close(metric.ssim(frames, frames), torch.ones(len(frames)))


def test_psnr_by_hand() -> None:
    a = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    b = torch.full_like(a, 51)  # a fifth of full light
    assert metric.psnr(a, b).item() == pytest.approx(20 * math.log10(5), abs=1e-4)


@pytest.mark.parametrize("name", ["psnr", "ssim"])
def test_floats_and_bytes_agree(name: str, frames: Tensor) -> None:
    other = noisy(frames, 30)
    whole = getattr(metric, name)(frames, other)
    torch.testing.assert_close(getattr(metric, name)(frames / 255, other / 255), whole)


def test_how_many_frames_go_at_once_changes_nothing(
    frames: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = noisy(frames, 30)
    found = []
    for pixels in (1, 2 * 48 * 64, 1 << 30):
        monkeypatch.setitem(metric._PIXELS, "cpu", pixels)
        found.append((metric.psnr(frames, other), metric.ssim(frames, other)))
        found[-1] += (metric.flicker(frames).nan_to_num(7.0),)
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


def test_flicker_of_even_change_is_zero_and_of_jumps_their_distance() -> None:
    ramp = torch.arange(6).view(6, 1, 1, 1).expand(6, 4, 4, 3) / 10
    jumps = (torch.arange(6) % 2 * 0.25).view(6, 1, 1, 1).expand(6, 4, 4, 3)
    assert metric.flicker(ramp)[1:-1].abs().max() < 1e-6
    torch.testing.assert_close(metric.flicker(jumps)[1:-1], torch.full((4,), 0.25))
    assert metric.flicker(jumps)[[0, -1]].isnan().all()
    assert metric.flicker(jumps[:2]).isnan().all()


def test_noise_of_every_frame_is_flicker(frames: Tensor) -> None:
    still = frames[:1].repeat(6, 1, 1, 1)
    assert metric.flicker(still).nanmean() == 0
    assert metric.flicker(noisy(still, 20)).nanmean() > 0.02


def test_what_cannot_be_compared_is_named(frames: Tensor) -> None:
    with pytest.raises(InputError, match=r"differ in shape: \[6, 48, 64, 3\] and \[5, 48"):
        metric.psnr(frames, frames[:5])
    with pytest.raises(InputError, match=r"\[F, H, W, 3\], got \[6, 3, 48, 64\]"):
        metric.ssim(frames.movedim(3, 1), frames.movedim(3, 1))
    with pytest.raises(InputError, match=r"got torch\.int32"):
        metric.psnr(frames.int(), frames.int())
    with pytest.raises(InputError, match="at least 6 pixels, got 8×5"):
        metric.ssim(frames[:, :5, :8], frames[:, :5, :8])
    with pytest.raises(InputError, match="one of alex, vgg, got 'squeeze'"):
        metric.lpips(frames, frames, net="squeeze")


@pytest.mark.gpu
@pytest.mark.usefixtures("fetched")
def test_a_gpu_says_the_same() -> None:
    a, b = disc(3, 192, 192), noisy(disc(3, 192, 192), 30)
    for of in (metric.psnr, metric.ssim, metric.ms_ssim, metric.lpips):
        torch.testing.assert_close(of(a.cuda(), b.cuda()).cpu(), of(a, b), atol=1e-4, rtol=1e-4)
