"""Image files in folders, one folder a class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fedspa.data.tabular import TEST_SPLITS, TableImages
from fedspa.errors import UserError, brief

if TYPE_CHECKING:
    import datasets


@dataclass(kw_only=True)
class FolderImages(TableImages):
    """`path`/train/<class>/* and `path`/test/<class>/*, or just `path`/<class>/*; any image format that Pillow reads.

    A metadata.csv beside the classes, with a column file_name, may give further columns, to group or to label by.
    """

    path: str | None = None
    fingerprint: str = ""
    """Of the names and sizes of all files; told from the folder. Another one is another data set."""

    @property
    def origin(self) -> str:
        return f"dataset.path={self.path}"

    @property
    def key(self) -> tuple[str | None, ...]:
        return ("folder", self.path, self.fingerprint, self.train_split, self.test_split)

    @property
    def _root(self) -> Path:
        if not self.path:
            raise UserError(
                "dataset=folder needs dataset.path=<a folder with a folder of images for each class>."
            )
        root = Path(self.path).expanduser().resolve()
        if not root.is_dir():
            raise UserError(
                f"dataset.path={self.path} is no folder: it must hold a folder of images for each class."
            )
        return root

    def split_folders(self) -> dict[str, Path]:
        """Where the images of each split are; all in one where the folder is not divided into splits."""
        root = self._root
        try:
            folders = {entry.name: entry for entry in root.iterdir() if entry.is_dir()}
        except OSError as error:
            raise UserError(f"dataset.path={self.path} cannot be read ({brief(error)}).") from error
        # A class may be called train, so that name alone means nothing.
        named = {name: folders[name] for name in (self.train_split, *TEST_SPLITS) if name in folders}
        if self.test_split in folders and self.train_split in folders:
            named[str(self.test_split)] = folders[str(self.test_split)]
        if self.train_split not in (*folders, "train"):
            return folders  # of which it is none
        divided = self.train_split in named and (len(named) > 1 or len(folders) == 1)
        return named if divided else {self.train_split: root}

    def open(self) -> Mapping[str, datasets.Dataset]:
        from datasets import load_dataset

        folders = self.split_folders()
        for split, folder in folders.items():
            if not any(entry.is_dir() for entry in folder.iterdir()):
                raise UserError(
                    f"dataset.path={self.path} has no folder of images for each class in {folder} (split {split})."
                )
        try:
            patterns = {split: f"{_literal(folder)}/**" for split, folder in folders.items()}
            with _without_bars():  # they would speak of a download
                return load_dataset("imagefolder", data_files=patterns, drop_labels=True)
        except Exception as error:  # the library and the disk fail in many ways
            raise UserError(f"dataset.path={self.path} is no folder of images ({brief(error)}).") from error

    def labels_are_folders(self, data: datasets.Dataset) -> bool:
        return self.label is None

    def pinned(self) -> Self:
        return self if self.fingerprint else replace(self, fingerprint=self._fingerprint())

    def check_version(self) -> None:
        if self.fingerprint and (now := self._fingerprint()) != self.fingerprint:
            raise UserError(
                f"dataset.path={self.path} holds other files than those that dataset.fingerprint={self.fingerprint} "
                f"was taken from: theirs is {now}; leave it out to take the folder as it is."
            )

    def _fingerprint(self) -> str:
        """16 hex digits of the names, relative to the folder, and the sizes of all files."""
        root, digest = self._root, hashlib.sha256()
        for folder, folders, files in os.walk(root, followlinks=True):
            folders.sort()
            for name in sorted(files):
                file = Path(folder, name)
                digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
        return digest.hexdigest()[:16]


@contextmanager
def _without_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _literal(folder: Path) -> str:
    """The path as a pattern that means just it."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in str(folder))
