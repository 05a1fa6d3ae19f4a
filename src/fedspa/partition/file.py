"""A partition from a file: that of another run, or the user's own."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedspa.core.errors import UserError, brief
from fedspa.partition.base import AnyPartition, Assignment, partition_hash

if TYPE_CHECKING:
    from fedspa.data.sets import Data

NAME = "partition.json"
LARGEST = 2**62


@dataclass(kw_only=True)
class FilePartition(AnyPartition):
    """The clients of a partition.json as a run writes it: {"train_rows": [[0, 5, 7], [1, 2]]}, one list for each
    client.

    Optional: "test_rows", the rows of the test split for each client (default: drawn by label shares); "data",
    the hash of the data set of these rows (default: only the range is checked); "names", a name for each client.
    Training rows in no list are not used.
    """

    path: str | None = None
    """The file, or the folder of a run."""
    digest: str = ""
    """The hash of the file's rows, read from the file. It is part of the config hash; the path is not."""

    def described(self) -> Self:
        return self if self.digest else replace(self, digest=_digest(self._read()))

    def assign(self, data: Data, clients: int, seed: int) -> Assignment:
        given = self._read(data)
        if self.digest and (found := _digest(given)) != self.digest:
            raise self._error(f"holds other rows ({found}) than partition.digest={self.digest} says")
        if (count := len(given.train)) != clients:
            raise self._error(f"is a partition of {count} clients: set federation.clients={count}")
        return given

    def _error(self, fault: str) -> UserError:
        return UserError(f"partition.path={self.path} {fault}.")

    def _read(self, data: Data | None = None) -> Assignment:
        """The file's contents, checked, also against the data if it is given. Raises `UserError`."""
        if not self.path:
            raise UserError(f"partition=file needs partition.path=<{NAME} of a run, or its folder>.")
        file = Path(self.path).expanduser()
        try:
            content = json.loads((file / NAME if file.is_dir() else file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._error(f"is no readable JSON file ({brief(error)})") from error
        if not isinstance(content, dict) or "train_rows" not in content:
            lists = "of very many clients a run keeps no lists, unless save.client_files is larger"
            raise self._error(f'must hold {{"train_rows": [[0, 5], [1, 2]]}}: {lists}')
        if data and data.hash and (of := content.get("data")) not in (None, "", data.hash):
            raise self._error(
                f"counts the rows of another data set (hash {of}, here {data.hash}): it needs the same rows in the "
                'same order; to use its row numbers with this data set, remove "data" from the file'
            )
        train = self._lists("train_rows", content["train_rows"], len(data.train) if data else LARGEST)
        test, names = content.get("test_rows"), content.get("names") or [""] * len(train)
        rows, counts = np.unique(np.concatenate(train), return_counts=True)
        for row in rows[counts > 1][:1]:
            first, second, *_ = (client for client, part in enumerate(train) if row in part)
            raise self._error(
                f"gives row {row} to client {first} and to client {second}: a row must be one client's"
            )
        if test is not None:
            test = self._lists("test_rows", test, len(data.test) if data else LARGEST)
        for name, each in (("test_rows", test or train), ("names", names)):
            if not isinstance(each, list) or len(each) != len(train):
                raise self._error(
                    f"has {name} that are not one for each of the {len(train)} clients in train_rows"
                )
        return Assignment(train, test, tuple(map(str, content.get("names") or [])))

    def _lists(self, key: str, lists: Any, size: int) -> list[np.ndarray]:
        """The sorted rows int64 of each client: whole numbers below `size`, none twice in a list, no list empty."""
        if not isinstance(lists, list) or not lists:
            raise self._error(f"has {key} that are no list of lists of rows, one a client")
        for client, rows in enumerate(lists):
            if not isinstance(rows, list) or not rows:
                raise self._error(f"has {key} of client {client} that are no list of rows, or an empty one")
            for row in rows:
                if type(row) is not int or not 0 <= row < size:
                    last = f" to {size - 1}" if size < LARGEST else ""
                    raise self._error(
                        f"has {json.dumps(row)} in {key} of client {client}: rows are whole numbers from 0{last}"
                    )
            row, times = Counter(rows).most_common(1)[0]
            if times > 1:
                raise self._error(f"has row {row} twice in {key} of client {client}")
        return [np.sort(np.array(rows, dtype=np.int64)) for rows in lists]


def _digest(given: Assignment) -> str:
    """A hash of all rows: 16 hex digits."""
    test = "" if given.test is None else partition_hash(given.test)
    return hashlib.sha256(f"{partition_hash(given.train)} {test}".encode()).hexdigest()[:16]
