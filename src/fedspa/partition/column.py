"""Natural clients, such as writers or devices, by a column of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.core.randomness import numpy_generator
from fedspa.partition.base import AnyPartition, Assignment

if TYPE_CHECKING:
    from fedspa.data.sets import Data


@dataclass(kw_only=True)
class ColumnPartition(AnyPartition):
    """A client gets all images with its value of a column, and is tested on all test images with that value.

    If the data set has a test split, that must have the column too. If it has none, the source holds out a share
    of each value's images (`dataset.test_fraction`), so that every client is tested on its own images.
    """

    column: str | None = None
    min_size: int = limited(1, low=1)
    """The least number of training images of a client. Values with fewer, or without a test image, are not used."""
    fewer: str | None = limited(None, choices=("sample", "group"))
    """The rule for fewer clients than values: sample draws some values; group divides all values equally among the
    clients. Both use the run's seed. null: there must be as many clients as values."""

    def described(self) -> Self:
        if not self.column:
            raise UserError(
                "partition=column needs partition.column=<a column of the data set>, such as writer_id."
            )
        return self

    def assign(self, data: Data, clients: int, seed: int) -> Assignment:
        train, test = (
            self._rows(part, split) for part, split in ((data.train, "train"), (data.test, "test"))
        )
        able = sorted(name for name, rows in train.items() if len(rows) >= self.min_size and name in test)
        left_out = f" ({len(train) - len(able)} others have too few training images or no test image)"
        where = f"partition.column={self.column} has {len(able)} values{left_out if len(able) < len(train) else ''}"
        if not able:
            raise UserError(
                f"{where}: no value is in both splits with partition.min_size={self.min_size} training images; "
                "dataset.test_split=none holds out a share of each one's own."
            )
        if clients > len(able) or (clients < len(able) and self.fewer is None):
            fewer = ", or fewer with partition.fewer=sample or group" if self.fewer is None else " or fewer"
            raise UserError(f"{where}, so federation.clients={clients} must be {len(able)}{fewer}.")
        order = (
            numpy_generator(seed, "partition").permutation(len(able)) if self.fewer else np.arange(len(able))
        )
        if self.fewer == "sample":
            order = np.sort(order[:clients])
        shares = [[able[i] for i in np.sort(part)] for part in np.array_split(order, clients)]
        return Assignment(
            [np.sort(np.concatenate([train[name] for name in share])) for share in shares],
            [np.sort(np.concatenate([test[name] for name in share])) for share in shares],
            tuple(" ".join(share) for share in shares),
        )

    def _rows(self, part: object, split: str) -> dict[str, np.ndarray]:
        """The rows int64 [n] of each value."""
        groups: np.ndarray | None = getattr(part, "groups", None)
        if groups is None:
            if split == "test":
                raise UserError(
                    f"partition.column={self.column} is no column of the test split: dataset.test_split=none holds out "
                    "a share of each client's own training examples instead."
                )
            raise UserError(
                "partition=column needs a data set with columns, such as dataset=hub, folder, table or text."
            )
        names, number = np.unique(groups.astype(str), return_inverse=True)
        order = np.argsort(number, kind="stable")
        cuts = np.cumsum(np.bincount(number))[:-1]
        return dict(zip(names.tolist(), np.split(order, cuts), strict=True))
