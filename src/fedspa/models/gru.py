"""A small recurrent network for tokens: the next token of a text, or its class."""

from __future__ import annotations

import torch
from torch import nn


class GRU(nn.Module):
    """An embedding, gated recurrent units, and a linear layer on the last state. PyTorch's default initial weights.

    Takes tokens int64 [B, L], and returns logits [B, outputs].
    """

    def __init__(
        self, vocabulary: int, outputs: int, embedding: int = 8, hidden: int = 64, layers: int = 1
    ) -> None:
        """
        Args:
            vocabulary: the number of tokens.
            embedding, hidden: widths.
            layers: the number of recurrent layers.
        """
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.gru = nn.GRU(embedding, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.embedding(tokens))
        return self.fc(states[:, -1])
