"""Clips on disk: exact where that is promised, and every kind of damage named."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import av
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_clips import disc, noisy
from safetensors.torch import save_file
from torch import Tensor

from jali.clips.clip import Clip, read_clip, to_uint8, write_lossless, write_mp4
from jali.clips.source import open_source
from jali.error import InputError
from jali.evaluation.quality import metric
from jali.files import WriteError


def write_png(path: Path, image: Tensor) -> None:
    with av.open(str(path), "w", format="image2", options={"update": "1"}) as out:
        stream = out.add_stream("png", 1)
        stream.height, stream.width, stream.pix_fmt = *image.shape[:2], "rgb24"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(image.numpy(), format="rgb24")))
        out.mux(stream.encode(None))


@given(
    count=st.integers(1, 5),
    height=st.integers(2, 40),
    width=st.integers(2, 40),
    fps=st.sampled_from([1, 12, 24000 / 1001, 60]),
)
def test_lossless_is_exact(
    tmp_path_factory: pytest.TempPathFactory, count: int, height: int, width: int, fps: float
) -> None:
    path = tmp_path_factory.mktemp("clip") / "clip.mkv"
    frames = torch.randint(0, 256, (count, height, width, 3)).to(torch.uint8)
    write_lossless(path, frames, fps)
    found = read_clip(path)
    assert torch.equal(found.frames, frames)
    assert found.fps == pytest.approx(fps, rel=1e-3)
    assert not open_source(path).lossy


def test_batches_and_a_whole_tensor_write_the_same(tmp_path: Path, frames: Tensor) -> None:
    write_lossless(tmp_path / "whole.mkv", frames, 12)
    write_lossless(tmp_path / "parts.mkv", iter(frames.split(4)), 12)
    assert torch.equal(read_clip(tmp_path / "parts.mkv").frames, frames)
    for size in (1, 4, 100):
        parts = [batch.frames for batch in open_source(tmp_path / "whole.mkv").batches(size)]
        assert all(len(part) == size for part in parts[:-1])
        assert torch.equal(torch.cat(parts), frames)


def test_mp4_looks_the_same_and_says_that_it_is_lossy(tmp_path: Path) -> None:
    frames = disc(6, 96, 128)
    path = tmp_path / "clip.mp4"
    write_mp4(path, frames, 12)
    found = read_clip(path)
    assert found.frames.shape == frames.shape
    assert found.fps == 12
    assert metric.ssim(found.frames, frames).mean() > 0.95
    assert open_source(path).lossy
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt, context.colorspace) == ("h264", "yuv420p", 1)


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (40, 90, 200)])
def test_colours_survive_mp4(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    frames = torch.tensor(colour, dtype=torch.uint8).expand(3, 32, 32, 3).contiguous()
    write_mp4(tmp_path / "clip.mp4", frames, 12)
    found = read_clip(tmp_path / "clip.mp4").frames
    assert (found.int() - frames.int()).abs().max() <= 4


def test_odd_sides_get_a_last_line_twice_in_mp4(tmp_path: Path) -> None:
    write_mp4(tmp_path / "clip.mp4", disc(2, 33, 47), 12)
    assert read_clip(tmp_path / "clip.mp4").frames.shape == (2, 34, 48, 3)


def layouts(frames: Tensor) -> dict[str, Tensor]:
    floats = frames.float() / 255
    return {
        "frames last": frames,
        "one batch": frames[None],
        "channels second": floats.movedim(3, 1),
        "channels first": floats.movedim(3, 0),
        "batch, channels first": floats.movedim(3, 0)[None],
        "half": floats.half(),
        "double": floats.double(),
    }


@pytest.mark.parametrize("name", layouts(torch.zeros(1, 1, 1, 3)))
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npy"])
def test_tensors_of_every_layout(tmp_path: Path, frames: Tensor, name: str, suffix: str) -> None:
    tensor = layouts(frames)[name].contiguous()
    path = tmp_path / f"clip{suffix}"
    if suffix == ".safetensors":
        save_file({"video": tensor, "latents": torch.zeros(3)}, path, metadata={"fps": "16"})
    elif suffix == ".pt":
        torch.save({"frames": tensor, "fps": 16, "prompt": "a disc"}, path)
    else:
        numpy.save(path, tensor.numpy())
    found = read_clip(path, fps=8)
    assert torch.equal(found.frames, frames)
    assert found.fps == (8 if suffix == ".npy" else 16)
    assert [len(batch.frames) for batch in open_source(path).batches(4)] == [4, 2]


def test_frames_with_nan_are_named_and_black(tmp_path: Path, frames: Tensor) -> None:
    values = frames.float() / 255
    values[1, 5, 5, 0] = torch.nan
    values[4, 0, 0] = torch.inf
    torch.save(values, tmp_path / "clip.pt")
    found = read_clip(tmp_path / "clip.pt")
    assert found.nonfinite == (1, 4)
    assert found.frames[1, 5, 5, 0] == 0
    assert torch.equal(found.frames[2], frames[2])


def test_a_folder_of_images_is_read_by_number(tmp_path: Path, frames: Tensor) -> None:
    folder = tmp_path / "100% of a:clip"
    folder.mkdir()
    for number in (0, 1, 2, 9, 10, 100):
        index = (0, 1, 2, 9, 10, 100).index(number)
        write_png(folder / f"frame{number}.png", frames[index])
    (folder / "notes.txt").write_text("not a frame")
    assert torch.equal(read_clip(folder).frames, frames)
    assert torch.equal(read_clip(folder / "frame9.png").frames, frames[3:4])


def test_names_that_ffmpeg_would_misread(tmp_path: Path, frames: Tensor) -> None:
    for name in ("a:b.mkv", "%03d.mkv", "concat:x|y.mkv", "ünïcode 'n' spaces.mkv"):
        write_lossless(tmp_path / name, frames, 12)
        assert torch.equal(read_clip(tmp_path / name).frames, frames)


def test_gif(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "clip.gif"), "w") as out:
        stream = out.add_stream("gif", 10)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "rgb8"
        for level in (0, 255, 0):
            image = numpy.full((32, 32, 3), level, dtype=numpy.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        out.mux(stream.encode(None))
    found = read_clip(tmp_path / "clip.gif").frames
    # 256 colours, dithered: near, and no more
    assert found.float().mean((1, 2, 3)).tolist() == pytest.approx([0, 255, 0], abs=3)


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: int(len(data) * 0.6)]
    elif how == "text":
        data = bytearray(b"this is not a video\n" * 50)
    else:
        data = bytearray()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "text", "empty"])
@pytest.mark.parametrize("suffix", [".mkv", ".mp4", ".safetensors", ".pt", ".npy", ".png"])
def test_every_damage_is_an_error_that_names_the_file(
    tmp_path: Path, suffix: str, how: str
) -> None:
    frames = noisy(disc(24, 64, 96), 40)
    path = tmp_path / f"clip{suffix}"
    if suffix == ".mkv":
        write_lossless(path, frames, 12)
    elif suffix == ".mp4":
        write_mp4(path, frames, 12)
    elif suffix == ".safetensors":
        save_file({"frames": frames}, path)
    elif suffix == ".pt":
        torch.save(frames, path)
    elif suffix == ".npy":
        numpy.save(path, frames.numpy())
    else:
        write_png(path, frames[0])
    spoil(path, how)
    with pytest.raises(InputError, match="clip") as caught:
        read_clip(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_one_wrong_byte_in_a_lossless_clip_is_found(tmp_path: Path, share: float) -> None:
    """By the checksums that FFV1 carries; mp4 has none, and a decoder may accept anything."""
    path = tmp_path / "clip.mkv"
    write_lossless(path, noisy(disc(24, 64, 96), 40), 12)
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"clip\.mkv is damaged: a checksum in it is wrong"):
        read_clip(path)


def test_unusable_tensors_are_named(tmp_path: Path) -> None:
    def refused(value: object, match: str) -> None:
        torch.save(value, tmp_path / "clip.pt")
        with pytest.raises(InputError, match=match):
            read_clip(tmp_path / "clip.pt")

    refused(torch.rand(2, 8, 8, 3) * 2 - 1, r"values from -.* must lie in 0\.\.1")
    refused(torch.rand(2, 8, 8, 3) * 255, r"must lie in 0\.\.1")
    refused(torch.zeros(2, 8, 8, 3, dtype=torch.int64), "holds int64; frames are uint8")
    refused(torch.zeros(2, 8, 8, 4), "without an axis of three channels")
    refused(torch.zeros(3, 3, 8, 8), "could be either of two axes")
    refused(torch.zeros(8, 8, 3), r"shape \[8, 8, 3\]; a clip has shape")
    refused(torch.zeros(2, 4, 8, 8, 3), "a clip has shape")
    refused(torch.zeros(0, 8, 8, 3), "holds no frames")
    refused({"a": torch.zeros(1), "b": torch.zeros(1)}, "must hold one tensor.* it holds a, b")
    refused([1, 2], "holds a list instead of a tensor")
    refused(Path("x"), "cannot be read as a tensor")  # a pickle that is no plain data


def test_unusable_paths_are_named(tmp_path: Path, frames: Tensor) -> None:
    with pytest.raises(InputError, match=r"there is no clip at .*gone"):
        read_clip(tmp_path / "gone.mp4")
    with pytest.raises(InputError, match="holds no images"):
        read_clip(tmp_path)
    (tmp_path / "clip.doc").write_text("x")
    with pytest.raises(InputError, match="no clip that can be read"):
        read_clip(tmp_path / "clip.doc")
    write_png(tmp_path / "1.png", frames[0])
    write_png(tmp_path / "2.png", frames[1, :32])
    with pytest.raises(InputError, match=r"2\.png is 64×32, but the images before it are 64×48"):
        read_clip(tmp_path)


def test_bad_frames_are_not_written(tmp_path: Path, frames: Tensor) -> None:
    path = tmp_path / "clip.mkv"
    for bad, match in (
        (frames.float(), "got float32"),
        (frames[..., :2], r"got uint8 \[6, 48, 64, 2\]"),
        (frames[:0], "at least one frame"),
        (iter(()), "no frames to write"),
        (iter([frames, frames[:, :40]]), "differ in size"),
    ):
        with pytest.raises(InputError, match=match):
            write_lossless(path, bad, 12)
    with pytest.raises(InputError, match="fps must be above 0"):
        write_mp4(path, frames, 0)
    with pytest.raises(InputError, match="fps must be"):
        Clip(frames, float("nan"))
    assert not list(tmp_path.iterdir())


def test_a_stopped_writer_leaves_what_was_there(tmp_path: Path, frames: Tensor) -> None:
    path = tmp_path / "clip.mkv"
    write_lossless(path, frames, 12)

    def interrupted() -> object:
        yield frames
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_lossless(path, interrupted(), 12)
    assert torch.equal(read_clip(path).frames, frames)
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mkv"]


def test_a_place_that_cannot_be_written_is_a_failed_job(tmp_path: Path, frames: Tensor) -> None:
    with pytest.raises(WriteError, match="No such file or directory"):
        write_mp4(tmp_path / "gone" / "clip.mp4", frames, 12)


@pytest.mark.parametrize("write", [write_lossless, write_mp4])
def test_no_room_left_is_a_failed_job_and_leaves_nothing(
    tmp_path: Path, write: Callable[[Path, Tensor, float], None]
) -> None:
    frames = noisy(disc(20, 64, 64), 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(WriteError, match="cannot be written: File too large"):
            write(tmp_path / "clip.mkv", frames, 12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_to_uint8_rounds_and_clamps() -> None:
    found = to_uint8(torch.tensor([-0.1, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 1.2]))
    assert found.tolist() == [0, 0, 0, 1, 255, 255]
    assert json.dumps(to_uint8(torch.linspace(0, 1, 256)).tolist()) == json.dumps([*range(256)])
    with pytest.raises(TypeError, match="takes floats"):
        to_uint8(torch.zeros(2, dtype=torch.uint8))
