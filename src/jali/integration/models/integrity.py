"""Whether the files of a local checkpoint are all there and whole, before any weight is read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5")


def check_integrity(folder: Path) -> None:
    """Refuse a folder with a missing, cut off or damaged file, naming it.

    Every part that `model_index.json` names must be there, a model with weights, and all shards
    that an index lists; a safetensors file must be as long as its header
    says; and where the folder has a `checksums.json`, the bytes must be those it was made with.
    """
    _check_parts(folder)
    for index in sorted(folder.rglob("*.safetensors.index.json")):
        for shard in sorted({str(name) for name in _json(index).get("weight_map", {}).values()}):
            if not (index.parent / shard).is_file():
                raise FileNotFoundError(
                    f"{index.parent / shard} is missing ({index.name} lists it); "
                    f"get the checkpoint again"
                )
    for file in sorted(folder.rglob("*.safetensors")):
        _check_length(file)
    _check_sums(folder)


def write_checksums(folder: Path) -> Path:
    """Write `checksums.json`: the SHA-256 of every other file in a checkpoint folder."""
    sums = {str(file.relative_to(folder).as_posix()): _sha256(file) for file in _files(folder)}
    target = folder / CHECKSUMS
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as draft:
        json.dump(sums, draft, indent=1, sort_keys=True)
        draft.write("\n")
        draft.flush()
        os.fsync(draft.fileno())
    Path(draft.name).chmod(0o644)
    Path(draft.name).replace(target)
    return target


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != CHECKSUMS:
            yield file


def _check_parts(folder: Path) -> None:
    for name, kind in _json(folder / "model_index.json").items():
        if not (isinstance(kind, list) and len(kind) == 2 and all(kind)):
            continue  # a setting, or a part that this checkpoint does without
        part = folder / name
        if not part.is_dir():
            raise FileNotFoundError(
                f"{part} is missing (model_index.json names it); get the checkpoint again"
            )
        weighs = (part / "config.json").is_file() and "Tokenizer" not in str(kind[1])
        if weighs and not any(file.suffix in _WEIGHTS for file in part.iterdir()):
            usual = "model" if kind[0] == "transformers" else "diffusion_pytorch_model"
            raise FileNotFoundError(
                f"{part / usual}.safetensors is missing; get the checkpoint again"
            )


def _check_length(file: Path) -> None:
    """A safetensors file is 8 bytes of header length, the header in JSON, and the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise _damaged(file, "its header is cut off")
        try:
            header = json.loads(stream.read(length))
            ends = [row["data_offsets"][1] for name, row in header.items() if name[:2] != "__"]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise _damaged(file, "its header cannot be read") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise _damaged(file, f"it has {size:,} bytes instead of {expected:,}")


def _check_sums(folder: Path) -> None:
    if not (folder / CHECKSUMS).is_file():
        return
    for name, expected in _json(folder / CHECKSUMS).items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; install jali again")
        if _sha256(file) != expected:
            raise _damaged(file, f"its bytes are not those that {CHECKSUMS} names")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(file, f"it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _damaged(file, "it holds no object")
    return found


def _damaged(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is damaged: {what}; get the checkpoint again")
