"""Malformed input of every kind, by seeded mutation: one clear error, and what was there stays as it was.

300 inputs in this process, 10 more as whole commands. Where a checksum stands in the way, half of the mutants
have it made sound again, so that the code behind it is reached as well.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from archives import pack, unpack
from PIL import Image

from fedspa.checkpoints.archive import ArchiveError
from fedspa.checkpoints.checkpoint import Checkpoints
from fedspa.cli import main
from fedspa.communication.wire import Envelope, Message, WireError, decode, encode
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.weights import ParameterSpace
from fedspa.data.images import PublishedImages

ROOT = Path(__file__).parents[1]
SIDE, TRAIN, TEST = 6, 12, 5


def mutant(data: bytes, seed: int) -> bytes:
    """`data` with one to three wounds: bits, bytes, numbers, pieces cut out, put in, repeated or blanked."""
    rng, wounded = random.Random(seed), bytearray(data)
    while bytes(wounded) == data:
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(wounded) + 1)
            size = rng.choice((1, 2, 4, 8, 40))
            piece = {
                "bit": bytes(byte ^ (1 << rng.randrange(8)) for byte in wounded[at : at + 1]),
                "noise": rng.randbytes(size),
                "blank": bytes(size),
                "number": rng.choice((b"\xff" * 8, struct.pack("<q", -1 << 62), struct.pack(">I", 1 << 31))),
                "cut out": b"",
                "put in": rng.randbytes(size) + wounded[at : at + size],
                "repeat": wounded[at : at + size] * 2,
                "end": None,
            }[kind := rng.choice(("bit", "noise", "blank", "number", "cut out", "put in", "repeat", "end"))]
            if piece is None:
                del wounded[at:]
            else:
                replaced = len(piece) if kind in ("bit", "noise", "blank", "number") else size
                wounded[at : at + replaced] = piece
    return bytes(wounded)


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file below a folder."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


def one_sentence(error: BaseException) -> None:
    text = str(error)
    assert text and "\n" not in text and len(text) < 600, text


# ---- wire messages

SPACE = ParameterSpace(("conv", "bias", "dense"), ((5, 3), (4,), (6, 5)))
FLAGS = torch.arange(SPACE.total) % 3 != 0
KNOWN, NEXT = PackedMask.pack(FLAGS), PackedMask.pack(torch.arange(SPACE.total) % 2 == 0)
UPDATE = Envelope("update", round=7, client=3)
MESSAGE = encode(Message(UPDATE, torch.randn(SPACE.total), KNOWN, NEXT), SPACE, KNOWN)


def sealed(data: bytes, digest_size: int) -> bytes:
    """The same with a sound checksum at its end."""
    body = data[:-digest_size]
    return body + hashlib.blake2b(body, digest_size=digest_size).digest()


@pytest.mark.parametrize("seed", range(60))
def test_wire_messages(seed: int) -> None:
    before = KNOWN.bits.clone()
    wounded = mutant(MESSAGE, seed)
    with pytest.raises(WireError) as refusal:
        decode(wounded, SPACE, KNOWN, UPDATE)
    one_sentence(refusal.value)
    try:
        decoded = decode(sealed(wounded, 8), SPACE, KNOWN, UPDATE)
    except WireError as error:
        one_sentence(error)
    else:  # a liar that knows how: other values, but of the right number, under a known mask
        assert decoded.vector.shape == (SPACE.total,) and decoded.mask == KNOWN
    assert torch.equal(KNOWN.bits, before)


# ---- checkpoints

STATE = {
    "round": 3,
    "weights": torch.arange(20, dtype=torch.float32),
    "masks": {5: KNOWN, 9: NEXT},
    "curve": [{"accuracy": 41.25, "loss": None}, {"accuracy": 50.0, "loss": 0.5}],
    "sizes": torch.arange(4),
}
ARCHIVE = pack(STATE)


@pytest.mark.parametrize("seed", range(60))
def test_checkpoints(seed: int) -> None:
    wounded = mutant(ARCHIVE, seed)
    with pytest.raises(ArchiveError) as refusal:
        unpack(wounded)
    one_sentence(refusal.value)
    if len(wounded) > 32:
        try:
            unpack(sealed(wounded, 32))
        except ArchiveError as error:
            one_sentence(error)


def test_a_wounded_checkpoint_is_left_alone_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, every=1)
    checkpoints.write(1, {"round": 1})
    checkpoints.write(2, STATE)
    newest = tmp_path / "round-000002.ckpt"
    for seed in range(20):
        caplog.clear()
        newest.write_bytes(mutant(ARCHIVE, 1000 + seed))
        before = contents(tmp_path)
        assert checkpoints.newest() == tmp_path / "round-000001.ckpt"
        (warning,) = caplog.messages
        assert "round-000002.ckpt is left out" in warning and "\n" not in warning
        assert contents(tmp_path) == before


# ---- data files


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def parquet(rows: int, compression: str) -> bytes:
    pixels = np.random.default_rng(rows).integers(0, 256, (rows, SIDE, SIDE), dtype=np.uint8)
    images = [{"bytes": png(picture), "path": None} for picture in pixels]
    table = pa.table({"image": images, "label": [row % 3 for row in range(rows)]})
    stream = io.BytesIO()
    pq.write_table(table, stream, compression=compression, row_group_size=5)
    return stream.getvalue()


def idx(rows: int) -> tuple[bytes, bytes]:
    images = struct.pack(">HBB3I", 0, 8, 3, rows, SIDE, SIDE) + random.Random(rows).randbytes(
        rows * SIDE * SIDE
    )
    return images, struct.pack(">HBBI", 0, 8, 1, rows) + bytes(row % 3 for row in range(rows))


FACTS: dict[str, Any] = dict(
    name="tiny", classes=3, channels=1, image_size=SIDE, train_size=TRAIN, test_size=TEST, mean=[0.5], std=[0.5],
    hub="nobody/nothing",
)  # fmt: skip


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound Parquet files in one folder, sound IDX files in another."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "parquet").mkdir()
    (folder / "idx").mkdir()
    for name, rows in (("train", TRAIN), ("test", TEST)):
        (folder / f"parquet/{name}.parquet").write_bytes(parquet(rows, "snappy"))
        images, labels = idx(rows)
        (folder / f"idx/{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"idx/{name}-labels-idx1-ubyte").write_bytes(labels)
    return folder


def load(source: PublishedImages, file: Path, wounded: bytes) -> None:
    """Load with a wounded file in place of a sound one: the source as declared, or one sentence."""
    sound = file.read_bytes()
    file.write_bytes(wounded)
    before = contents(file.parent)
    try:
        data = source.load()
    except UserError as error:
        one_sentence(error)
        assert file.name in str(error) or str(file.parent) in str(error)
    else:  # the wound hit a pixel, a label (within its range), or bytes without meaning
        assert data.train.inputs.shape == (TRAIN, 1, SIDE, SIDE) and data.train.targets.max() < 3
    finally:
        assert contents(file.parent) == before
        file.write_bytes(sound)


@pytest.mark.parametrize("seed", range(60))
def test_parquet_files(data_folder: Path, seed: int) -> None:
    folder = data_folder / "parquet"
    wounded = mutant(parquet(TRAIN, ("snappy", "zstd", "none")[seed % 3]), seed)
    load(PublishedImages(**FACTS, path=str(folder)), folder / "train.parquet", wounded)


@pytest.mark.parametrize("seed", range(60))
def test_idx_files(data_folder: Path, seed: int) -> None:
    folder = data_folder / "idx"
    kind = ("images-idx3", "labels-idx1")[seed % 2]
    sound = folder / f"train-{kind}-ubyte"
    source = PublishedImages(**FACTS, path=str(folder))
    if seed % 4 < 2:
        load(source, sound, mutant(sound.read_bytes(), seed))
        return
    zipped = folder / f"train-{kind}-ubyte.gz"
    content = sound.read_bytes()
    sound.unlink()
    try:
        zipped.write_bytes(gzip.compress(content))
        load(source, zipped, mutant(zipped.read_bytes(), seed))
    finally:
        zipped.unlink()
        sound.write_bytes(content)


# ---- configs

KEYS = (
    *(
        "seed",
        "sparsity",
        "name",
        "dataset",
        "dataset.train_rows",
        "dataset.mean",
        "dataset._target_",
        "dataset",
    ),
    *(
        "model",
        "model._target_",
        "method",
        "method._target_",
        "mask",
        "mask._target_",
        "mask.initial",
        "hardware",
    ),
    *("federation.clients", "federation.rounds", "federation.wire", "training.lr", "training.clip_norm"),
    *("training.batch_size", "eval.targets", "hardware.workers", "partition", "partition.gamma", "loggers"),
    *(
        "metrics.accuracy",
        "trusted_packages",
        "checkpoint.keep",
        "layer_sparsity",
        "federation",
        "training",
        "nope",
    ),
)
VALUES = (
    *("null", "-1", "0", "1e999", "nan", "99999999999999999999999", "[]", "{}", "[[1],{a:b}]", "text", "''"),
    *("os.system", "builtins.eval", "fedspa.cli.main", "pickle.Unpickler", "../../../etc/passwd", "${seed}"),
    *(
        "${nope}",
        "${oc.env:HOME}",
        "{_target_:os.system}",
        "{_target_:subprocess.Popen,args:[ls]}",
        "'\\x00'",
        "a=b",
    ),
)


@pytest.mark.parametrize("seed", range(40))
def test_configs(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    rng = random.Random(seed)
    words = [
        f"{rng.choice(('', '', '', '+', '++'))}{rng.choice(KEYS)}={rng.choice(VALUES)}" for _ in range(2)
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "logger=none", f"hydra.run.dir={tmp_path}/run"])
    begun: list[object] = []
    code = main(lambda plan, folder: begun.append(plan))
    told = capfd.readouterr().err
    if code == 0:  # odd, but of the right type and within its range
        assert begun and not told
    else:
        assert (code, begun) == (2, []), (words, told)
        assert told.startswith("Error: ") and told.count("\n") == 1, (words, told)
    assert list(tmp_path.iterdir()) == []


# ---- whole commands


def damaged_parquet(folder: Path) -> list[str]:
    for name, rows in (("train", TRAIN), ("test", TEST)):
        (folder / f"{name}.parquet").write_bytes(parquet(rows, "snappy")[: -20 if name == "train" else None])
    return cifar_like(folder)


def label_out_of_range(folder: Path) -> list[str]:
    images, labels = idx(TRAIN)
    for name in ("train", "t10k"):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels[:-1] + b"\xc8")
    facts = [f"dataset.image_size={SIDE}", f"dataset.train_size={TRAIN}", f"dataset.test_size={TRAIN}"]
    return ["dataset=mnist", f"dataset.path={folder}", *facts, *SMALL]


def cifar_like(folder: Path) -> list[str]:
    return ["dataset=cifar10", f"dataset.path={folder}", *SMALL]


def damaged_config(folder: Path) -> list[str]:
    (folder / "config.yaml").write_text(
        "# config_hash: 0123456789abcdef\nseed: [0\n  }: !!python/object:os.system\n"
    )
    return [f"resume={folder}"]


def no_run(folder: Path) -> list[str]:
    (folder / "config.yaml").write_bytes(b"\xff\xfe\x00")
    return [f"resume={folder}"]


def damaged_rest(folder: Path) -> list[str]:
    (folder / "mlflow.json").write_text('{"store": [1]}')
    return ["sync.py", str(folder)]


SMALL = ["model=small_cnn", "federation.clients=2", "federation.clients_per_round=1"]
COMMANDS: list[tuple[str, Callable[[Path], list[str]]]] = [
    ("train.parquet is no readable Parquet file", damaged_parquet),
    ("does not exist", lambda folder: ["dataset=mnist", f"dataset.path={folder}/nothing"]),
    ("split train, row 11 (from 0): the label 200 is out of range", label_out_of_range),
    ("config.yaml cannot be read", damaged_config),
    ("holds no run", no_run),
    ("mlflow.json is damaged", damaged_rest),
    ("os.system is not a class of fedspa", lambda folder: ["dataset._target_=os.system"]),
    ("builtins.eval is not a class of fedspa", lambda folder: ["+loggers.spy._target_=builtins.eval"]),
    (
        "federation.clients=99999999999999999999999",
        lambda folder: ["federation.clients=99999999999999999999999"],
    ),
    ("federation has another form", lambda folder: ["federation=[1]"]),
]


@pytest.mark.parametrize(("sentence", "prepare"), COMMANDS, ids=[sentence for sentence, _ in COMMANDS])
def test_whole_commands(tmp_path: Path, sentence: str, prepare: Callable[[Path], list[str]]) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    words = prepare(folder)
    if words[0] != "sync.py":
        words = ["train.py", *words, "logger=none", f"hydra.run.dir={tmp_path}/run"]
    before = contents(tmp_path)
    done = subprocess.run(
        [sys.executable, str(ROOT / "src" / words[0]), *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1, done.stderr
    assert sentence in done.stderr
    assert contents(tmp_path) == before
