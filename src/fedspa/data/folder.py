"""Image files in folders, one folder a class."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from fedspa.core.errors import UserError
from fedspa.data.image_files import Listing, spelled
from fedspa.data.tabular import TEST_SPLITS, TableImages

if TYPE_CHECKING:
    import datasets

CLASS, FOLDER = "class_folder", "folder"
"""Columns of each image: the folder of its class, and the path of folders between that one and the image."""
SPLIT_WORDS = ("train", "training", "test", "testing", "eval", "evaluation", *TEST_SPLITS)


@dataclass(kw_only=True)
class FolderImages(TableImages):
    """`path`/train/<class>/... and `path`/test/<class>/..., or just `path`/<class>/...

    An image's class is the folder directly below the split (or below `path`); the path below the class, such as that of
    a patient, is the column `folder`. A metadata.csv with a column file_name may give further columns, to group or to
    label by. Hidden files and folders do not count.
    """

    path: str | None = None
    fingerprint: str = ""
    """Of the names and sizes of all images and metadata; told from the folder. Another one is another data set."""

    few_classes: ClassVar[str] = "it must hold a folder of images for each class, two or more"

    @property
    def origin(self) -> str:
        return f"dataset.path={self.path}"

    @property
    def key(self) -> tuple[str | None, ...]:
        return ("folder", self.path, self.fingerprint, self.train_split, self.test_split, self.label)

    @property
    def label_column(self) -> str | None:
        return self.label or CLASS

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

    @cached_property
    def _listing(self) -> Listing:
        listing = Listing.of(self._root, self.origin)
        if not listing.images:
            raise UserError(f"{self.origin} holds no image: it must hold a folder of images for each class.")
        return listing

    @cached_property
    def _splits(self) -> tuple[str, ...]:
        """The folders that are splits; none where the folder is not divided into splits."""
        images = self._listing.images
        folders = {parts[0] for parts in images if len(parts) > 1}
        if self.train_split not in (*folders, "train"):
            return tuple(sorted(folders))  # of which it is none
        if self.train_split not in folders:
            return ()
        named = {name for name in (self.train_split, self.test_split, *TEST_SPLITS) if name in folders}
        # A class may be called train, so that its name alone means nothing.
        holds_images = any(len(parts) == 2 and parts[0] == self.train_split for parts in images)
        divided = len(named) > 1 or len(folders) == 1 or not holds_images
        return tuple(sorted(map(str, named))) if divided else ()

    def open(self) -> Mapping[str, datasets.Dataset]:
        import datasets
        import pandas as pd

        text = partial(pd.array, dtype="string")
        images, depth = self._listing.images, int(bool(self._splits))
        if self.label is None:
            self._check_classes(depth)
        columns = self._listing.columns()
        columns["image"] = text([self._listing.path(parts) for parts in images])
        columns[CLASS] = text([parts[depth] if len(parts) > depth + 1 else None for parts in images])
        if FOLDER not in columns:  # where it is in the metadata, that is meant
            below = depth + (self.label is None)
            columns[FOLDER] = text(["/".join(parts[below:-1]) or None for parts in images])
        of_split = [parts[0] if self._splits else self.train_split for parts in images]
        tables = {}
        for split in self._splits or (self.train_split,):
            rows = columns[[name == split for name in of_split]]
            table = datasets.Dataset.from_pandas(rows, preserve_index=False)
            tables[split] = table.cast_column("image", datasets.Image())
        return tables

    def _check_classes(self, depth: int) -> None:
        """Raise `UserError` for an image in no class, and where a split would be taken for a class."""
        images = self._listing.images
        for parts in images:
            if len(parts) == 1 or (len(parts) <= depth + 1 and parts[0] in self._splits):
                raise UserError(
                    f"{self.origin} holds an image that lies in no class, {spelled('/'.join(parts))}: put it into the "
                    "folder of its class, or take it out."
                )
        if not depth:
            direct = {parts[0] for parts in images if len(parts) == 2}
            nested = sorted({parts[0] for parts in images} - direct)
            split = next((name for name in nested if name.lower() in SPLIT_WORDS), None)
            if split:
                raise UserError(
                    f"{self.origin} holds the folder {spelled(split)}, which looks like a split and would be a class: "
                    f"name the splits with dataset.train_split and dataset.test_split, or rename it."
                )

    def pinned(self) -> Self:
        return self if self.fingerprint else replace(self, fingerprint=self._fingerprint(self._listing))

    def check_version(self) -> None:
        if not self.fingerprint:
            return
        if (now := self._fingerprint(Listing.of(self._root, self.origin))) != self.fingerprint:
            raise UserError(
                f"dataset.path={self.path} holds other files than those that dataset.fingerprint={self.fingerprint} "
                f"was taken from: theirs is {now}; leave it out to take the folder as it is."
            )

    @staticmethod
    def _fingerprint(listing: Listing) -> str:
        """16 hex digits of the names, relative to the folder, and the sizes of all images and metadata files."""
        digest = hashlib.sha256()
        for name, size in listing.sizes():
            digest.update(f"{name}\0{size}\0".encode())
        return digest.hexdigest()[:16]

    @property
    def remarks(self) -> list[str]:
        lines, used = super().remarks, (self.train_split, self.test_split)
        unused = Counter(parts[0] for parts in self._listing.images if self._splits and parts[0] not in used)
        if unused:
            counts = ", ".join(f"{spelled(name)} ({count:,} images)" for name, count in unused.items())
            lines.append(f"Not used, for they are neither its training nor its test split: {counts}")
        if others := self._listing.others:
            first = spelled("/".join(others[0]))
            lines.append(f"Not used, for they are no images: {len(others):,} files, such as {first}")
        return lines
