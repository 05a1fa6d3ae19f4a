"""DeepR: deep rewiring (Bellec, Kappel, Maass and Legenstein, ICLR 2018).

A connection has a sign. After its local training a client drops the active weights whose sign has changed since the
training began. It grows as many random ones of the same tensor, which start from 0. The published rule acts after each
step, on weights that L1 regularisation and noise push towards 0; here the client's own training moves them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspa.masks.dynamic import DynamicSearcher
from fedspa.masks.search_input import SearchInput, random_scores
from fedspa.masks.select import by_piece, drop_and_grow


@dataclass(kw_only=True)
class DeepR(DynamicSearcher):
    """Drops weights that changed their sign, and regrows at random."""

    grows_from_zero = True

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        if not self.searching(search.round):
            return search.mask
        assert search.start is not None
        product = search.start * search.weights  # below 0 where the sign changed
        vectors = (search.mask, product, random_scores(search))
        return by_piece(drop_and_grow, search.space.split, vectors, search.space.count(product < 0))
