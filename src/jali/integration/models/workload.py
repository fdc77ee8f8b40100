"""How much a model of the registry has to attend to at its default size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jali.integration.models.registry import ModelCard


@dataclass(frozen=True, slots=True)
class Workload:
    """Frames, height and width behind one token; text tokens beside them; weights of one
    transformer; and how many samples a call has (guidance may come as a batch)."""

    frames: int
    height: int
    width: int
    weights: float
    text: int = 0
    batch: int = 1

    def tokens(self, card: ModelCard) -> int:
        """Of one sequence at the model's default size; the first frame is one of its own."""
        times = 1 + (card.frames - 1) // self.frames
        return times * (card.height // self.height) * (card.width // self.width) + self.text


# From the checkpoints' own configurations.
WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "wan-t2v-1.3b": Workload(4, 16, 16, 1.4e9),
        "wan-t2v-14b": Workload(4, 16, 16, 14.3e9),
        "wan2.2-ti2v-5b": Workload(4, 32, 32, 5.0e9),
        "wan2.2-t2v-a14b": Workload(4, 16, 16, 14.3e9),
        "cogvideox-5b": Workload(4, 16, 16, 5.6e9, text=226, batch=2),
        "cogvideox1.5-5b": Workload(8, 16, 16, 5.6e9, text=226, batch=2),
        "hunyuan-video": Workload(4, 16, 16, 12.8e9, text=256),
        "hunyuan-video-1.5": Workload(4, 16, 16, 8.3e9, text=1000),
        "ltx-video": Workload(8, 32, 32, 1.9e9, batch=2),
        "flux.1-dev": Workload(1, 16, 16, 11.9e9, text=512),
        "qwen-image": Workload(1, 16, 16, 20.4e9, text=64),
        "nano": Workload(4, 8, 8, 9.1e6),
    }
)
