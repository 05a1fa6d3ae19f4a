"""RigL (Evci, Gale, Menick, Castro and Elsen, ICML 2020), with one search for each client update.

After its local training a client drops the active weights of smallest magnitude and grows as many coordinates of
largest gradient, tensor by tensor. The just dropped ones are candidates too. The share that changes falls along a
cosine to 0 at a part of the run. After that masks stay, and no gradient is computed.

It differs from DST in the start value of a new connection. In DST it is the server's dense value (a warm start); in
RigL it is 0 at the client's next update. A connection that one search drops and grows is not new.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.masks.dynamic import Annealed
from fedspa.masks.search_input import SearchInput
from fedspa.masks.select import by_piece, drop_and_grow


@dataclass(kw_only=True)
class RigL(Annealed):
    """Prunes by magnitude, and regrows by gradient from zero."""

    needs_gradient = True
    grows_from_zero = True

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        """Exchange floor(fraction x active) coordinates of each tensor."""
        if not self.searching(search.round):
            return search.mask
        assert search.gradient is not None
        vectors = (search.mask, search.weights.abs(), search.gradient.abs())
        counts = self.exchanged(search.round, search.counts)
        return by_piece(drop_and_grow, search.space.split, vectors, counts)
