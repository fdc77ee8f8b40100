"""What the arena of these tests is made of."""

from __future__ import annotations

from typing import Any

MODEL = "wan-t2v-1.3b"
# 3×4×4 tokens in 6 × 24 blocks, so that a total can be met.
SMALL: dict[str, Any] = {
    "height": 64, "width": 64, "num_frames": 9, "steps": 3, "device": "cpu",
    "arguments": {"max_sequence_length": 16},
}  # fmt: skip
BLOCKS = ":q_block=8,k_block=2"
# One with a threshold, whose authors keep no layers dense: the model has but two.
THRESHOLD = "sparge:cdfthreshd=0.5,k_block=2,q_block=8,simthreshd1=-1"
METHODS = (f"entropy{BLOCKS}", THRESHOLD, f"random{BLOCKS}", f"local{BLOCKS}")
PROMPTS = ("a red ball", "a blue cube", "a green cone")
