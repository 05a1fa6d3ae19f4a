"""A partition that is given: that of another run, or one of the user's own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedspa.core.errors import UserError, brief
from fedspa.partition.base import AnyPartition, Assignment, partition_hash

if TYPE_CHECKING:
    from fedspa.data.source import ImageData

NAME = "partition.json"
LARGEST = 2**62


@dataclass(frozen=True)
class Given:
    """What a file says."""

    train: list[np.ndarray]
    test: list[np.ndarray] | None
    data: str
    """The hash of the data that its rows count; "" where it does not say."""
    names: tuple[str, ...]

    @property
    def digest(self) -> str:
        """16 hex digits of all rows."""
        test = "" if self.test is None else partition_hash(self.test)
        return hashlib.sha256(f"{partition_hash(self.train)} {test}".encode()).hexdigest()[:16]


@dataclass(kw_only=True)
class FilePartition(AnyPartition):
    """The clients of a file as a run leaves it, partition.json: {"train_rows": [[0, 5, 7], [1, 2]]}, a list a client.

    Optional: "test_rows", a list a client of rows of the test split (without, they are drawn by label shares); "data",
    the hash of the data set whose rows these are (without, only their range is checked); "names", a name a client.
    Training rows that no list holds are not used.
    """

    path: str | None = None
    """The file, or the folder of a run."""
    digest: str = ""
    """Of its rows; told from the file. Part of the config hash, as the path is not."""

    def described(self) -> Self:
        return self if self.digest else replace(self, digest=self._read().digest)

    def assign(self, data: ImageData, clients: int, seed: int) -> Assignment:
        given = self._read()
        where = f"partition.path={self.path}"
        if self.digest and given.digest != self.digest:
            raise UserError(
                f"{where} holds other rows ({given.digest}) than partition.digest={self.digest} says."
            )
        if len(given.train) != clients:
            raise UserError(
                f"{where} is a partition of {len(given.train)} clients: set federation.clients={len(given.train)}."
            )
        if given.data and data.hash and given.data != data.hash:
            raise UserError(
                f"{where} counts the rows of another data set (hash {given.data}, here {data.hash}): it needs the same "
                'images in the same order; where its rows are meant all the same, remove "data" from the file.'
            )
        for kind, lists, size in (
            ("train", given.train, len(data.train)),
            ("test", given.test or [], len(data.test)),
        ):
            for client, rows in enumerate(lists):
                if rows[-1] >= size:
                    raise UserError(
                        f"{where}: {kind}_rows of client {client} holds row {rows[-1]}, but there are {size} {kind} "
                        f"images: it must be in [0, {size - 1}]."
                    )
        return Assignment(given.train, given.test, given.names)

    def _read(self) -> Given:
        """The file, in itself sound. Raises `UserError` that says what is wrong in it, and where."""
        if not self.path:
            raise UserError(f"partition=file needs partition.path=<{NAME} of a run, or its folder>.")
        file = Path(self.path).expanduser()
        file = file / NAME if file.is_dir() else file
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"partition.path={self.path} is no readable JSON file ({brief(error)})."
            ) from error
        if not isinstance(content, dict) or "train_rows" not in content:
            lists = "of very many clients a run keeps no lists, unless save.client_files is larger"
            raise UserError(
                f'partition.path={self.path} must hold {{"train_rows": [[0, 5], [1, 2]]}}: {lists}.'
            )
        train = self._lists("train_rows", content["train_rows"])
        owner: dict[int, int] = {}
        for client, rows in enumerate(train):
            for row in rows.tolist():
                if row in owner:
                    raise UserError(
                        f"partition.path={self.path}: train_rows gives row {row} to client {owner[row]} and to client "
                        f"{client}: a row must be one client's."
                    )
                owner[row] = client
        test = content.get("test_rows")
        if test is not None:
            test = self._lists("test_rows", test)
        names = content.get("names") or []
        for name, per_client in (("test_rows", test), ("names", names or None)):
            if per_client is not None and (not isinstance(per_client, list) or len(per_client) != len(train)):
                raise UserError(
                    f"partition.path={self.path}: {name} is not one for each of the {len(train)} clients in train_rows."
                )
        return Given(train, test, str(content.get("data") or ""), tuple(map(str, names)))

    def _lists(self, key: str, value: Any) -> list[np.ndarray]:
        """Sorted rows int64 of each client: whole numbers from 0, none twice in a list, no list empty."""
        if not isinstance(value, list) or not value:
            raise UserError(
                f"partition.path={self.path}: {key} must be a list of lists of rows, one a client."
            )
        checked = []
        for client, rows in enumerate(value):
            where = f"partition.path={self.path}: {key} of client {client}"
            if not isinstance(rows, list) or not rows:
                raise UserError(f"{where} must be a list of rows, and not empty.")
            bad = next((row for row in rows if type(row) is not int or not 0 <= row < LARGEST), None)
            if bad is not None or None in rows:
                raise UserError(f"{where} holds {json.dumps(bad)}: rows are whole numbers from 0.")
            array = np.sort(np.array(rows, dtype=np.int64))
            twice = array[:-1][np.diff(array) == 0]
            if len(twice):
                raise UserError(f"{where} holds row {twice[0]} twice.")
            checked.append(array)
        return checked
