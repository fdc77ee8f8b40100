"""Teaching the text encoder to read before the transformer listens to it.

A transformer that learns pictures and spelling at once learns the spelling last. So the encoder is
first asked, sentence by sentence, which words of the grammar were said; what answers the question
is thrown away, the encoder stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training.world.scene import sample_scenes
from training.world.sentence import read
from training.world.words import KINDS


class Reader(nn.Module):
    """An encoder, one question for every kind of word, and the answers."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        width = encoder.config.d_model
        self.encoder = encoder
        self.questions = nn.Parameter(torch.randn(len(KINDS), width) / width**0.5)
        # One answer more than words: nothing was said.
        self.answers = nn.ModuleList(nn.Linear(width, len(words) + 1) for words in KINDS.values())

    def forward(self, tokens: Tensor, said: Tensor) -> Tensor:
        """Mean loss; `said` [n, kinds] holds index + 1 of the word, 0 where none was said."""
        mask = tokens > 0
        states = self.encoder(tokens.long(), attention_mask=mask.long()).last_hidden_state
        looked = torch.einsum("kd,nsd->nks", self.questions, states).float()
        looked = looked.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        found = torch.einsum("nks,nsd->nkd", looked.to(states.dtype), states)
        losses = [
            nn.functional.cross_entropy(answer(found[:, i]).float(), said[:, i])
            for i, answer in enumerate(self.answers)
        ]
        return torch.stack(losses).mean()


def lesson(count: int, seed: int, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Sentences as bytes [count, longest], and what they say [count, kinds]."""
    sentences = sample_scenes(count, seed).captions(seed)
    longest = max(map(len, sentences)) + 1
    ids = tokenizer(sentences, padding="max_length", max_length=longest).input_ids
    said = [[words.get(kind, -1) + 1 for kind in KINDS] for words in map(read, sentences)]
    return torch.tensor(ids, dtype=torch.int16), torch.tensor(said)
