"""Image files in folders as tables, joined with the metadata of the images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fedspa.core.errors import UserError, brief
from fedspa.data.files import TABLES, listed, open_tables, read_table, spelled, unpacked

if TYPE_CHECKING:
    import datasets
    import pandas as pd

CLASS, FOLDER = "class_folder", "folder"
"""Columns of an image file: the folder of its class, and the path of folders between that one and the image."""
NAMES = ("file_name", "filename", "file", "image", "path", "id")
"""The column of a table that names the images is the first of these that there is."""


def open_images(
    path: str, origin: str, splits: Sequence[str], label: str | None
) -> dict[str, datasets.Dataset]:
    """Image files as tables by split: the file, its class, its folder, and its metadata. The same as `open_tables`
    where there are no image files.

    The splits are folders of these names, if one has the first name. label: the column of the labels; None for the
    folders. Raises `UserError` for images in no class.
    """
    import datasets
    import pandas as pd
    from datasets.packaged_modules.imagefolder.imagefolder import IMAGE_EXTENSIONS

    folder, found = listed(path, origin)
    images = [file for file in found if file.suffix.lower() in IMAGE_EXTENSIONS]
    if not images or not unpacked(path, origin).is_dir():
        return open_tables(path, origin, splits)
    for name in map(str, images):
        if name != name.encode(errors="ignore").decode():
            raise UserError(
                f"{origin} holds an image whose name is not UTF-8, {spelled(name)}: rename it, as "
                "convmv -f latin1 -t utf8 does."
            )
    depth = int(any(file.parts[0] == splits[0] for file in images if len(file.parts) > 1))
    if depth:
        images = [file for file in images if file.parts[0] in splits or len(file.parts) == 1]
    columns = _metadata(images, folder, [file for file in found if file.suffix.lower() in TABLES])
    in_classes = label is None and (columns.empty or any(len(file.parts) > depth + 1 for file in images))
    for file in images:
        if len(file.parts) <= depth + in_classes:
            raise UserError(
                f"{origin} holds an image that lies in no class, {spelled(file)}: put it into the folder of its class, "
                "take it out, or name the column of its label in a table by dataset.label."
            )
        if in_classes and not depth and file.parts[0].lower() in ("train", "training", *splits[1:]):
            raise UserError(
                f"{origin} holds the folder {file.parts[0]}, which looks like a split and would be a class: name the "
                "splits with dataset.train_split and dataset.test_split, or rename it."
            )
    tables = {}
    try:
        if in_classes:
            columns[CLASS] = [file.parts[depth] for file in images]
        columns["image"] = [str(folder / file) for file in images]
        if FOLDER not in columns:  # where it is in the metadata, that is meant
            below = ["/".join(file.parts[depth + in_classes : -1]) or None for file in images]
            columns[FOLDER] = pd.array(below, "string")
        for split in sorted({file.parts[0] for file in images}) if depth else splits[:1]:
            rows = columns[[not depth or file.parts[0] == split for file in images]]
            table = datasets.Dataset.from_pandas(rows, preserve_index=False)
            tables[split] = table.cast_column("image", datasets.Image())
    except Exception as error:  # Arrow, of columns of mixed types
        raise UserError(f"{origin} has a name or value that no table can hold ({brief(error)}).") from error
    return tables


def _metadata(images: Sequence[PurePosixPath], folder: Path, tables: Sequence[PurePosixPath]) -> pd.DataFrame:
    """The metadata, a row for each image: of the tables called metadata or, without any, of the only one in the folder.

    They name an image by its path from the table's own folder; its name, or that without the ending, will do. Raises
    `UserError` for a table without such a column, and for an image that is named twice or is not there.
    """
    import pandas as pd

    known: dict[str, set[str]] = {}
    for file in images:
        for name in (str(file), file.name, str(file.with_suffix("")), file.stem):
            known.setdefault(name, set()).add(str(file))
    lines = [pd.DataFrame()]
    metadata = [table for table in tables if table.stem == "metadata"]
    others = [table for table in tables if len(table.parts) == 1 and table.suffix != ".txt"]
    for table in metadata or others[: len(others) == 1]:
        frame = read_table(folder / table, NAMES).to_pandas().convert_dtypes()
        column = next((name for name in NAMES if name in frame), None)
        if column is None:
            raise UserError(
                f"{spelled(folder / table)} has no column {NAMES[0]} (or {', '.join(NAMES[1:])}) of the images' names."
            )
        places: list[str] = []
        for name in frame.pop(column):
            below = os.path.normpath(table.parent / str(name))
            matches = known.get(below) or known.get(os.path.basename(below)) or ()
            if len(matches) != 1:
                which = "more than one such image" if matches else "no such image"
                raise UserError(
                    f"{spelled(folder / table)} names {spelled(below)}, but there is {which} in {spelled(folder)}."
                )
            places += matches
        lines.append(frame.set_index(pd.Index(places)))
    joined = pd.concat(lines)
    for name in joined.index[joined.index.duplicated()][:1]:
        raise UserError(f"{spelled(folder)}: the metadata has more than one line for {spelled(name)}.")
    return joined.reindex(list(map(str, images)))
