"""Words from features: one linear map for textures and one for backgrounds.

Their weights, a few kilobytes, are made by `lesson.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.world import words

FILE = Path(__file__).with_name("probe.safetensors")
TABLES = {"texture": words.TEXTURES, "ground": words.GROUNDS}
PLAIN = 0  # in both
RIDGE = 3.0
FARTHEST = 4.0  # deviations: beyond, a feature says no more


@dataclass(frozen=True)
class Probe:
    """Scores of words from features x: [z, z², 1] @ weight, z being (x - mean) / deviation."""

    mean: Tensor
    deviation: Tensor
    weight: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """[n, words] of [n, k]."""
        return _terms(features, self.mean, self.deviation) @ self.weight


def _terms(features: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    z = ((features - mean) / deviation).clamp(-FARTHEST, FARTHEST)
    return torch.cat((z, z * z, torch.ones_like(z[:, :1])), 1)


def fit(features: Tensor, answers: Tensor, count: int) -> Probe:
    """Least squares, of features [n, k] and the numbers of their words [n], below `count`."""
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-3)
    terms = _terms(features, mean, deviation).double()
    wanted = torch.nn.functional.one_hot(answers, count).double()
    penalty = RIDGE * torch.eye(terms.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(terms.T @ terms + penalty, terms.T @ wanted)
    return Probe(mean, deviation, weight.float())


def save(probes: dict[str, Probe], file: Path) -> None:
    """In half precision."""
    parts = {f"{name}.{part}": x for name, p in probes.items() for part, x in vars(p).items()}
    save_file({name: x.half().contiguous() for name, x in parts.items()}, file)


@functools.lru_cache(maxsize=8)
def load(name: str, device: torch.device) -> Probe:
    saved = load_file(FILE)
    parts = (saved[f"{name}.{part}"] for part in ("mean", "deviation", "weight"))
    return Probe(*(x.to(device, torch.float32) for x in parts))


def answer(name: str, features: Tensor, weight: Tensor, flat: Tensor) -> str | None:
    """The word that frames say together, each as much as it weighs: features [F, k], weight [F].

    Frames that are `flat` [F] say "plain": without a pattern its features say nothing.
    """
    if not float(weight.sum()) > 0:
        return None
    scores = load(name, features.device).scores(features)
    plain = torch.nn.functional.one_hot(torch.tensor(PLAIN), len(TABLES[name])).to(scores)
    scores = torch.where(flat[:, None], plain, scores)
    return TABLES[name][int((scores * weight[:, None]).sum(0).argmax())]
