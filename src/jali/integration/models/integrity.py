"""Whether the files of a local checkpoint are all there and whole, before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jali.files import UnreadableError, file_digest, read_json, write_json

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
        for shard in sorted(
            {str(name) for name in read_part(index).get("weight_map", {}).values()}
        ):
            if not (index.parent / shard).is_file():
                raise _missing(index.parent / shard, f" ({index.name} lists it)")
    for file in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass  # opening it compares its header with its length
        except SafetensorError as error:
            raise _damaged(file, f"of its {file.stat().st_size:,} bytes, {error}") from error
    _check_sums(folder)


def write_checksums(folder: Path) -> Path:
    """Write `checksums.json`: the SHA-256 of every other file in a checkpoint folder."""
    target = folder / CHECKSUMS
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != CHECKSUMS]
    write_json(target, {file.relative_to(folder).as_posix(): file_digest(file) for file in files})
    return target


def read_part(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    try:
        return read_json(file)
    except UnreadableError as error:
        raise ValueError(f"{error}; get the checkpoint again") from error


def _check_parts(folder: Path) -> None:
    for name, kind in read_part(folder / "model_index.json").items():
        if not (isinstance(kind, list) and len(kind) == 2 and all(kind)):
            continue  # a setting, or a part that this checkpoint does without
        part = folder / name
        if not part.is_dir():
            raise _missing(part, " (model_index.json names it)")
        has_weights = (part / "config.json").is_file() and "Tokenizer" not in str(kind[1])
        if has_weights and not any(file.suffix in _WEIGHTS for file in part.iterdir()):
            usual = "model" if kind[0] == "transformers" else "diffusion_pytorch_model"
            raise _missing(part / f"{usual}.safetensors")


def _check_sums(folder: Path) -> None:
    if not (folder / CHECKSUMS).is_file():
        return
    for name, expected in read_part(folder / CHECKSUMS).items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; install jali again")
        if file_digest(file) != expected:
            raise _damaged(file, f"its bytes are not those that {CHECKSUMS} names")


def _missing(file: Path, why: str = "") -> FileNotFoundError:
    return FileNotFoundError(f"{file} is missing{why}; get the checkpoint again")


def _damaged(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is damaged: {what}; get the checkpoint again")
