"""A real ComfyUI on the loopback, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import jali

HERE = Path(__file__).parent
SHIM = HERE.parents[1] / "comfyui"


class RefusedError(Exception):
    """What the server says of a prompt that it does not take."""


class Server:
    """A server in a process of its own, with jali's nodes and those of `extra_nodes.py`."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.base = base
        nodes = base / "custom_nodes"
        nodes.mkdir(parents=True)
        (base / "empty").mkdir()
        shutil.copytree(SHIM, nodes / "jali")
        shutil.copy(HERE / "extra_nodes.py", nodes / "extra_nodes.py")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        python = os.environ.get("JALI_COMFYUI_PYTHON", sys.executable)
        self.log = base / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "main.py", "--cpu", "--use-pytorch-cross-attention", "--listen",
                 "127.0.0.1", "--port", str(port), "--disable-api-nodes", "--front-end-root",
                 str(base / "empty"), "--base-directory", str(base), "--database-url",
                 "sqlite:///:memory:"],
                cwd=folder, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(jali.__file__).parents[1])},
            )  # fmt: skip
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        for _ in range(240):
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended:\n{self.log.read_text()[-2000:]}")
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"ComfyUI did not answer:\n{self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            raise RefusedError(error.read().decode()) from None

    def start(self, prompt: dict[str, Any]) -> str:
        return str(self.post("/prompt", {"prompt": prompt})["prompt_id"])

    def wait(self, number: str, seconds: float = 300) -> dict[str, Any]:
        """The history of a prompt, once it is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.get(f"/history/{number}")
            if found:
                return dict(found[number])
            time.sleep(0.1)
        raise TimeoutError(f"prompt {number}")

    def run(self, prompt: dict[str, Any], seconds: float = 300) -> dict[str, Any]:
        """What a prompt put out, by node; its error where it failed."""
        done = self.wait(self.start(prompt), seconds)
        if done["status"]["status_str"] != "success":
            raise RefusedError(error_of(done))
        return dict(done["outputs"])

    def latents(self, prefix: str) -> torch.Tensor:
        """The latest file that `SaveLatent` wrote under a name."""
        files = sorted((self.base / "output").rglob(f"{prefix}_*.latent"))
        return load_file(files[-1])["latent_tensor"]


def error_of(done: dict[str, Any]) -> str:
    """Type of the node and what it said."""
    for kind, message in done["status"]["messages"]:
        if kind == "execution_error":
            return f"{message['node_type']}: {message['exception_message']}"
        if kind == "execution_interrupted":
            return "interrupted"
    return str(done["status"])
