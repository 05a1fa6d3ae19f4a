"""Synthetic images by client: every client's are a pure function of a seed and its number, made when needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.randomness import generator, numpy_generator
from fedspa.data.sets import ArraySet, Data, MadeImages
from fedspa.data.synthetic import SyntheticImages

KEPT = 16
"""Clients whose images are kept."""


@dataclass(kw_only=True)
class SyntheticClients(SyntheticImages):
    """Patterns and noise of `SyntheticImages`; each client draws its label shares from Dirichlet(gamma).

    There is no list of images, rows or clients anywhere: a client costs nothing until it is trained or tested.
    """

    client_train_images: int = limited(50, low=1)
    gamma: float = limited(0.3, low=0, low_open=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        clients = self.clients
        sizes = (clients * self.client_train_images, clients * self.client_test_images)
        if (self.effective_train_size, self.effective_test_size) != sizes or not clients:
            raise UserError(
                f"dataset.train_size={self.effective_train_size} and dataset.test_size={self.effective_test_size} must "
                f"be so many clients times dataset.client_train_images={self.client_train_images} and "
                f"dataset.client_test_images={self.client_test_images}: leave them to the YAML file."
            )

    def rows_in_memory(self, *, copies: bool = True) -> int:
        return 0

    @property
    def clients(self) -> int:
        return self.effective_train_size // self.client_train_images

    def images_of(self, split: str, client: int) -> ArraySet:
        """A client's images of "train" or "test": its labels by its own shares, in random order."""
        count = self.client_train_images if split == "train" else self.client_test_images
        shares = numpy_generator(self.data_seed, "client_shares", client=client).dirichlet(
            [self.gamma] * self.classes
        )
        source = generator(self.data_seed, f"client_{split}", client=client)
        labels = torch.multinomial(torch.from_numpy(shares), count, replacement=True, generator=source)
        noise = torch.randn((count, *self.input_shape), generator=source)
        return ArraySet(self.draw(labels, noise), labels)

    def load(self) -> Data:
        """Both splits, of which nothing is made yet."""

        def made(split: str) -> MadeImages:
            each = self.client_train_images if split == "train" else self.client_test_images
            make = lru_cache(KEPT)(lambda client: self.images_of(split, client))
            return MadeImages(make, self.clients, each, self.input_shape)

        return Data(made("train"), made("test"))

    def read(self, split: str) -> ArraySet:
        """All images of a split at once, for federations that are small enough."""
        sets = [self.images_of(split, client) for client in range(self.clients)]
        return ArraySet(torch.cat([made.inputs for made in sets]), torch.cat([made.targets for made in sets]))
