"""A configuration beside a model: one JSON file, saved, loaded and shared as diffusers' own are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jali import files
from jali.backends import check_name
from jali.methods import Method
from jali.planning.budget import Budget
from jali.presets import Preset
from jali.presets.method import PlainMethod, read_method, write_method
from jali.presets.schema import errors_at, read_object
from jali.version import __version__

CONFIG_NAME = "sparse_attention_config.json"
FORMAT = 1
# Of a method asked for by name and nothing else: its share of all work of a run, which falls along
# it. Where its dense steps or layers are named, or it is better so: its share of the sparse calls.
TOTAL, BUDGET, WARMUP = 0.5, Budget().mean, 0.2


@dataclass(frozen=True, kw_only=True)
class PlainConfig(PlainMethod):
    """The keys of the file."""

    _class_name: str
    format: int
    _jali_version: str = "unknown"
    model: str | None = None
    preset: str | None = None
    backend: str = "auto"


@dataclass(frozen=True)
class SparseAttentionConfig:
    """What makes a model sparse: the method, and where it comes from.

    One JSON file of plain values, one for every option, beside a model or anywhere else; nothing
    else is accepted in it.

        config = SparseAttentionConfig.from_preset(load_preset("entropy_balanced", "wan-t2v-14b"))
        config.save_pretrained("my-model")
        config = SparseAttentionConfig.from_pretrained("my-model")
        apply_sparse_attention(pipe, config.method, backend=config.backend)

    Args:
        method: the method with its schedule; a `TypeError` where it is none.
        backend: who executes plans; a `ValueError` names the known ones.
        model: the registry's name of the model it was made for.
        preset: the preset it was made from.
    """

    method: Method
    backend: str = "auto"
    model: str | None = None
    preset: str | None = None

    CLASS: ClassVar[str] = "SparseAttentionConfig"

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise TypeError(f"method must be a Method, got {self.method!r}")
        check_name(self.backend)

    @classmethod
    def from_preset(cls, preset: Preset, backend: str = "auto") -> SparseAttentionConfig:
        return cls(preset.method, backend, preset.model, preset.name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "_class_name": self.CLASS,
            "_jali_version": __version__,
            "format": FORMAT,
            "model": self.model,
            "preset": self.preset,
            "backend": self.backend,
            **write_method(self.method),
        }

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], source: str = "the config"
    ) -> SparseAttentionConfig:
        """Strict: every key is known, every value of its type, and this version can read it."""
        plain: PlainConfig = read_object(PlainConfig, data, source)
        if plain._class_name != cls.CLASS:
            raise ValueError(f"{source} is a {plain._class_name}, not a {cls.CLASS}")
        if plain.format != FORMAT:
            raise ValueError(
                f"{source} has format {plain.format}, written by jali {plain._jali_version}; "
                f"this one reads format {FORMAT}"
            )
        method = read_method(data, source)
        with errors_at(source):
            return cls(method, plain.backend, plain.model, plain.preset)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **hub: Any,
    ) -> Path:
        """Write `sparse_attention_config.json` into a folder, a model's own or any other one.

        With `push_to_hub` it is uploaded too, to `repo_id` (the folder's name without one); `hub`
        are further arguments of `push_to_hub`. Returns the path of the file. `ValueError` where
        the folder is a file, `files.WriteError` where it cannot be written.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise ValueError(f"{folder} is a file; save_pretrained wants a folder")
        if hub and not push_to_hub:
            raise TypeError(f"{sorted(hub)} only mean something with push_to_hub=True")
        file = folder / CONFIG_NAME
        files.write_text(file, self._text())
        if push_to_hub:
            self.push_to_hub(repo_id or folder.name, **hub)
        return file

    @classmethod
    def from_pretrained(
        cls,
        pretrained: str | os.PathLike[str],
        *,
        subfolder: str | None = None,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> SparseAttentionConfig:
        """From a folder, the file itself, or a repository of the hub (or its cache).

        `FileNotFoundError` where a folder holds none, `OSError` where a repository cannot be read,
        `ValueError` where the file is not a configuration that this version can read.
        """
        path = Path(pretrained).expanduser()
        if path.is_dir():
            path = path / (subfolder or "") / CONFIG_NAME
            if not path.is_file():
                raise FileNotFoundError(f"{path.parent} holds no {CONFIG_NAME}")
        elif not path.is_file():
            path = _from_hub(
                str(pretrained),
                subfolder=subfolder,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        return cls.from_dict(files.read_json(path), path.name)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        subfolder: str | None = None,
    ) -> str:
        """Upload the file to a repository, which is made where there is none. Returns its URL."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        done = api.upload_file(
            path_or_fileobj=self._text().encode(),
            path_in_repo=f"{subfolder}/{CONFIG_NAME}" if subfolder else CONFIG_NAME,
            repo_id=repo.repo_id,
            commit_message=commit_message or f"Upload {CONFIG_NAME}",
            revision=revision,
            create_pr=create_pr,
        )
        return str(done.commit_url)

    def _text(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


def _from_hub(repo: str, **options: Any) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(repo, CONFIG_NAME, **options))
    except (OSError, HFValidationError) as error:
        raise OSError(
            f"{repo} is neither a folder with a {CONFIG_NAME} nor a repository that can be read "
            f"({type(error).__name__})"
        ) from error
