"""Sources give what they declare, or say in one sentence why not."""

from __future__ import annotations

import gzip
import io
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra.utils import get_class, instantiate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image

from fedspa.config.schema import register
from fedspa.core.errors import UserError
from fedspa.data.digits import Digits
from fedspa.data.images import PublishedImages
from fedspa.data.pixels import Augmentation
from fedspa.data.source import Source
from fedspa.data.synthetic import SyntheticImages
from fedspa.data.tables import TableSource

CONF = Path(__file__).parents[1] / "conf"
SIDE = 6
TRAIN, TEST = 12, 5
REAL = os.environ.get("FEDSPA_DATA")


def facts(**changes: Any) -> dict[str, Any]:
    base = dict(
        name="tiny",
        classes=3,
        channels=1,
        image_size=SIDE,
        train_size=TRAIN,
        test_size=TEST,
        mean=[0.5],
        std=[0.5],
    )
    return base | changes


def published(path: Path, **changes: Any) -> PublishedImages:
    return PublishedImages(**facts(path=str(path), **changes))


def shipped(name: str, **changes: Any) -> Source:
    """The source that conf/dataset/<name>.yaml describes, with changes."""
    register()  # the resolvers that the files use
    file = OmegaConf.load(CONF / f"dataset/{name}.yaml")
    section = cast(dict[str, Any], OmegaConf.to_container(file, resolve=True)["dataset"])
    typed = OmegaConf.structured(get_class(section["_target_"]))
    typed.merge_with({key: value for key, value in section.items() if key != "_target_"})
    return cast(Source, instantiate(section | changes))


def pictures(count: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, channels), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(stream, "PNG")
    return stream.getvalue()


def table(encoded: Sequence[bytes | None], labels: Sequence[int | None]) -> pa.Table:
    cells = [{"bytes": data, "path": None} for data in encoded]
    image = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    return pa.table({"image": image, "label": pa.array(labels, pa.int64())})


def write(folder: Path, train: pa.Table | None = None, test: pa.Table | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, count, given_table in (("train", TRAIN, train), ("test", TEST, test)):
        default = table([png(p) for p in pictures(count)], [i % 3 for i in range(count)])
        pq.write_table(given_table if given_table is not None else default, folder / f"{name}.parquet")
    return folder


# ---- declared facts


def test_row_limits_change_the_effective_size_only() -> None:
    source = Digits(**facts(train_rows=7))
    assert (source.train_size, source.effective_train_size, source.effective_test_size) == (TRAIN, 7, TEST)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"train_rows": TRAIN + 1}, r"dataset.train_rows=13 is out of range: it must be in \[1, 12\]"),
        ({"test_rows": 0}, r"dataset.test_rows=0 is out of range"),
        ({"val_fraction": 1.0}, r"dataset.val_fraction=1.0 is out of range"),
        ({"client_test_rounding": "exakt"}, "did you mean exact"),
        ({"image_size": "8x8"}, r"dataset.image_size=8x8 is no size: .* such as 32, or \[height,width\]"),
        ({"image_size": [8, 0]}, "dataset.image_size=0 is out of range"),
        ({"channels": 3, "mean": [0.1, 0.2]}, "dataset.mean has 2 values: it must have 1, or one for each"),
        ({"std": [0.0]}, "dataset.std=0.0 is out of range: it must be more than 0"),
        ({"augmentation": Augmentation(crop_padding=SIDE)}, "dataset.augmentation.crop_padding=6"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Digits(**facts(**changes))


@pytest.mark.parametrize("file", sorted(CONF.glob("dataset/*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_data_set_is_typed_and_builds(file: Path) -> None:
    source = shipped(file.stem)
    assert isinstance(source, Source)
    if isinstance(source, TableSource) and not isinstance(source, PublishedImages):  # read from the data
        return
    assert source.name == file.stem
    assert len(source.mean) == len(source.std) == source.channels  # type: ignore[attr-defined]


# ---- digits


def test_digits_are_split_evenly_and_completely() -> None:
    data = Digits(**facts(classes=10, image_size=8, train_size=1397, test_size=400)).load()
    assert torch.bincount(data.test.targets).tolist() == [40] * 10
    assert len(data.train) == 1397
    from sklearn.datasets import load_digits

    original = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    ours = torch.cat([data.train.inputs, data.test.inputs]).numpy()[:, 0]
    assert sorted(image.tobytes() for image in original) == sorted(image.tobytes() for image in ours)
    assert ours.max() == 255


# ---- Parquet folders


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_gives_the_exact_pixels_in_shard_order(tmp_path: Path, channels: int) -> None:
    pixels, labels = pictures(TRAIN, channels), [i % 3 for i in range(TRAIN)]
    encoded = [png(p) for p in pixels]
    folder = tmp_path / "data"
    write(folder, test=table([png(p) for p in pictures(TEST, channels)], [0] * TEST))
    (folder / "train.parquet").unlink()
    pq.write_table(table(encoded[:5], labels[:5]), folder / "train-00000-of-00002.parquet")
    pq.write_table(table(encoded[5:], labels[5:]), folder / "train-00001-of-00002.parquet")
    for rows in (None, 3, 8):
        data = published(tmp_path, channels=channels, train_rows=rows).load()
        assert data.train.inputs.dtype == torch.uint8
        assert np.array_equal(data.train.inputs.permute(0, 2, 3, 1).numpy(), pixels[:rows])
        assert data.train.targets.tolist() == labels[:rows]


def test_grey_pictures_serve_a_colour_data_set(tmp_path: Path) -> None:
    data = published(write(tmp_path), channels=3).load()
    assert np.array_equal(data.train.inputs[:, 0].numpy(), pictures(TRAIN)[..., 0])
    assert torch.equal(data.train.inputs[:, 0], data.train.inputs[:, 2])


def test_transpose_swaps_rows_and_columns(tmp_path: Path) -> None:
    data = published(write(tmp_path), transpose=True).load()
    assert np.array_equal(data.train.inputs[:, 0].numpy(), pictures(TRAIN)[..., 0].transpose(0, 2, 1))


@pytest.mark.parametrize("labels", [[0, 1, 2], [1, 2, 3]])
def test_labels_are_counted_from_0_or_from_1(tmp_path: Path, labels: list[int]) -> None:
    part = table([png(p) for p in pictures(3)], labels)
    data = published(write(tmp_path, part, part), train_size=3, test_size=3).load()
    assert data.train.targets.tolist() == [0, 1, 2]


def test_missing_folders_and_splits_are_named(tmp_path: Path) -> None:
    for nothing in (Path("/nowhere"), tmp_path):
        with pytest.raises(UserError, match=f"dataset.path={nothing} holds no data: it must be a table"):
            published(nothing).load()
    write(tmp_path)
    (tmp_path / "train.parquet").unlink()
    with pytest.raises(UserError, match="dataset.train_split=train is no split of .*: valid are test"):
        published(tmp_path).load()
    write(tmp_path / "a")
    write(tmp_path / "b")
    (tmp_path / "test.parquet").unlink()
    with pytest.raises(UserError, match="has (train|test) tables in more than one folder below it"):
        published(tmp_path).load()


def test_sizes_are_held_to_the_declared_ones(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match="holds 12 train images, but dataset.train_size=20 are declared"):
        published(tmp_path, train_size=20).load()
    with pytest.raises(UserError, match="dataset.train_rows=15 is more than the 12 train images"):
        published(tmp_path, train_size=20, train_rows=15).load()
    assert len(published(tmp_path, train_size=20, train_rows=12).load().train) == 12


GOOD = [png(p) for p in pictures(TRAIN)]
LABELS = [i % 3 for i in range(TRAIN)]


def changed(row: int, image: bytes | None = GOOD[0], label: int | None = 0) -> pa.Table:
    encoded: list[bytes | None] = list(GOOD)
    labels: list[int | None] = list(LABELS)
    encoded[row], labels[row] = image, label
    return table(encoded, labels)


@pytest.mark.parametrize(
    "train, sentence",
    [
        (changed(7, image=GOOD[7][:60]), r"split train, row 7 \(from 0\): "),
        (changed(7, image=b"no picture"), r"split train, row 7 \(from 0\): cannot identify"),
        (changed(3, image=None), r"row 3 \(from 0\): its image cannot be read"),
        (
            changed(3, image=png(np.zeros((6, 7), np.uint8))),
            "row 3 .* it is 7 x 6 pixels, dataset.image_size=6",
        ),
        (changed(3, image=png(pictures(1, 3)[0])), "row 3 .* its colour mode is RGB, dataset.channels=1"),
        (changed(9, label=None), r"split train, row 9 \(from 0\): the column label is empty there"),
        (changed(9, label=3), r"split train, row 9 \(from 0\): the label 3 is out of range: .* be 0 to 2"),
        (changed(9, label=-1), r"row 9 \(from 0\): the label -1 is out of range"),
        (changed(3, image=png(np.zeros((5000, 5000), np.uint8))), "row 3 .* it is 5000 x 5000 pixels"),
        (changed(3, image=b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n"), "row 3 .* cannot identify"),
        (table(GOOD, LABELS).rename_columns(["img", "label"]), r"dataset.image=image is no column of .*img"),
        (
            table(GOOD, LABELS).rename_columns(["label", "image"]),
            r"dataset.image=image is no image column of .* \(it holds int64\)",
        ),
        (
            table(GOOD, LABELS).set_column(1, "label", pa.array(["a"] * TRAIN)),
            r"split train, row 0 \(from 0\): the label a is out of range",
        ),
        (
            table(GOOD, LABELS).set_column(1, "label", pa.array([0.5] * TRAIN)),
            r"dataset.label=label is no column of whole numbers or names of .* \(it holds double|float64\)",
        ),
        (
            table(GOOD, LABELS).set_column(
                1, "label", pa.array([0] * (TRAIN - 1) + [2**64 - 1], pa.uint64())
            ),
            r"row 11 \(from 0\): the label \d+ is out of range",
        ),
    ],
)
def test_broken_rows_and_columns_are_named(tmp_path: Path, train: pa.Table, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        published(write(tmp_path, train), image="image", label="label").load()


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path) / "train.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match="train.parquet is no readable Parquet file"):
        published(tmp_path).load()


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_end_in_one_sentence(tmp_path: Path, damage: list[tuple[float, int]]) -> None:
    file = write(tmp_path) / "train.parquet"
    content = bytearray(file.read_bytes())
    for place, value in damage:
        content[int(place * len(content))] = value
    file.write_bytes(content)
    try:
        data = published(tmp_path).load()
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert data.train.inputs.shape == (
            TRAIN,
            1,
            SIDE,
            SIDE,
        )  # the damage hit bytes without meaning, or a pixel


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["a folder", "an empty file"])
def test_no_file_of_data(tmp_path: Path, make: Callable[[Path], None]) -> None:
    for source, name in (
        (published(write(tmp_path / "parquet")), "parquet/train.parquet"),
        (published(write_idx(tmp_path)), "train-labels-idx1-ubyte"),
    ):
        (tmp_path / name).unlink()
        make(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is no readable|train is no split of"):
            source.load()


def test_a_damaged_scikit_learn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import sklearn.datasets

    def broken() -> None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")

    monkeypatch.setattr(sklearn.datasets, "load_digits", broken)
    with pytest.raises(
        UserError, match=r"the copy inside scikit-learn .* \(Compressed file ended .*reinstall"
    ):
        shipped("digits").load()


# ---- idx files


def write_idx(folder: Path, suffix: str = "", test_name: str = "t10k") -> Path:
    for name, count in (("train", TRAIN), (test_name, TEST)):
        images = struct.pack(">HBB3I", 0, 8, 3, count, SIDE, SIDE) + pictures(count).tobytes()
        labels = struct.pack(">HBBI", 0, 8, 1, count) + bytes(i % 3 for i in range(count))
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            packed = gzip.compress(content) if suffix else content
            (folder / f"{name}-{kind}-ubyte{suffix}").write_bytes(packed)
    return folder


@pytest.mark.parametrize("suffix, test_name", [("", "t10k"), (".gz", "t10k"), (".gz", "emnist-letters-test")])
def test_idx_files_are_read_exactly(tmp_path: Path, suffix: str, test_name: str) -> None:
    write_idx(tmp_path, suffix, test_name)
    data = published(tmp_path, train_rows=10).load()
    assert np.array_equal(data.train.inputs[:, 0].numpy(), pictures(10)[..., 0])
    assert data.test.targets.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_broken_idx_files_are_named_with_the_row(tmp_path: Path, suffix: str) -> None:
    source = published(write_idx(tmp_path, suffix))
    file = tmp_path / f"train-images-idx3-ubyte{suffix}"
    whole = file.read_bytes()
    file.write_bytes(whole[: 16 + 7 * SIDE * SIDE + 5] if not suffix else whole[:-60])
    with pytest.raises(
        UserError, match=r"idx3-ubyte.* (breaks off in row 7 \(from 0\)|is no readable idx file)"
    ):
        source.load()
    file.write_bytes(b"garbage")
    with pytest.raises(UserError, match="is no readable idx file"):
        source.load()


@pytest.mark.parametrize(
    "images, labels, sentence",
    [
        (
            (2**31, SIDE, SIDE),
            2**31,
            r"images-idx3-ubyte is no readable idx file .it breaks off in row 2 \(from 0\)",
        ),
        (
            (TRAIN, 2**15, 2**15),
            TRAIN,
            r"images-idx3-ubyte is no readable idx file .it breaks off in row 0 \(from 0\)",
        ),
        ((2, SIDE, SIDE), TRAIN, "holds 2 images, but .* 12 labels"),
        ((2, SIDE, 2 * SIDE), 2, "breaks off in row 1"),
    ],
)
def test_an_absurd_idx_header_takes_no_memory(
    tmp_path: Path, images: tuple[int, ...], labels: int, sentence: str
) -> None:
    write_idx(tmp_path)
    content = struct.pack(">HBB3I", 0, 8, 3, *images) + bytes(100)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, labels) + bytes(100))
    with pytest.raises(UserError, match=sentence):
        published(tmp_path).load()


def test_a_label_in_an_idx_file_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    labels = bytearray((tmp_path / "train-labels-idx1-ubyte").read_bytes())
    labels[8 + 5] = 200
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(UserError, match=r"split train, row 5 \(from 0\): the label 200 is out of range"):
        published(tmp_path).load()


# ---- synthetic


@pytest.mark.parametrize("channels, side, classes", [(1, 8, 2), (3, 16, 7)])
def test_synthetic_images_are_learnable_and_repeatable(channels: int, side: int, classes: int) -> None:
    shape = dict(channels=channels, image_size=side, classes=classes, train_size=1500, test_size=300)
    source = SyntheticImages(**facts(**shape))
    data, again = source.load(), SyntheticImages(**facts(**shape, train_rows=1100)).load()
    assert torch.equal(data.train.inputs[:1100], again.train.inputs)
    assert torch.equal(data.train.targets[:1100], again.train.targets)
    assert not torch.equal(data.train.inputs[:300], data.test.inputs)
    other = SyntheticImages(**facts(**shape, data_seed=1)).load()
    assert not torch.equal(data.train.inputs, other.train.inputs)
    means = torch.stack([data.train.inputs[data.train.targets == c].double().mean(0) for c in range(classes)])
    nearest = torch.cdist(data.test.inputs.double().flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == data.test.targets).double().mean() > 0.9


# ---- real data, where there is some


@pytest.mark.skipif(not REAL, reason="FEDSPA_DATA names no folder of real data sets")
@pytest.mark.parametrize(
    "name, folder", [("cifar10", "cifar10"), ("cifar100", "cifar100"), ("mnist", "mnist")]
)
def test_real_data_has_its_declared_facts(name: str, folder: str) -> None:
    path = Path(str(REAL)) / folder
    if not path.is_dir():
        pytest.skip(f"no {folder} there")
    source = shipped(name, path=str(path), train_rows=5000, test_rows=1000)
    data = source.load()
    pixels = data.train.inputs.double() / 255
    # JPEG copies differ a little from the originals, and the first 5,000 images from all
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(source.mean, dtype=torch.float64), atol=0.01)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(source.std, dtype=torch.float64), atol=0.01)
    assert len(data.train.targets.unique()) == source.classes


@pytest.mark.skipif(not REAL, reason="FEDSPA_DATA names no folder of real data sets")
def test_real_letters_stand_upright() -> None:
    path = Path(str(REAL)) / "emnist_letters-fixture"
    if not path.is_dir():
        pytest.skip("no emnist_letters-fixture there")
    source = shipped("emnist_letters", path=str(path), test_rows=51)
    letters = source.read("test")
    assert letters.inputs.shape == (51, 1, 28, 28)
    assert letters.targets.unique().tolist() == list(range(26))
    for letter in "fgj":  # taller than wide
        ink = letters.inputs[letters.targets == ord(letter) - ord("a")][0, 0] > 0
        assert ink.any(1).sum() > ink.any(0).sum() + 3
    with pytest.raises(UserError, match="dataset.train_split=train is no split of"):
        source.load()
