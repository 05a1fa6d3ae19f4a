"""Checks of accuracy for `gpu_check.py`: CIFAR-10 with VGG11 for 200 rounds, against known accuracies."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from gpu_base import Check, Options, engine_of, plan, require
from PIL import Image

from fedspa.data.sets import ArraySet, Data
from fedspa.runs import assembly

ROUNDS = 200
SPREAD = 2.5
"""An accuracy may differ from the known one by so many points."""
IN_MEMORY = (
    "dataset._target_=fedspa.data.synthetic.SyntheticImages",
    *("~dataset.hub", "~dataset.image", "~dataset.label"),
)
"""The facts of CIFAR-10 for images that are set here. So the library `datasets` is not needed."""
KNOWN = {"fedavg": ("global", 68.0), "fedspa": ("local", 74.0)}
"""By method: the kind of model, and its accuracy in percent after round 200."""


def split(options: Options, name: str) -> ArraySet:
    """The images of train.parquet or test.parquet: columns img (a record with the file's bytes) and label."""
    assert options.cifar10 is not None
    table = pyarrow.parquet.read_table(options.cifar10 / f"{name}.parquet")
    files = table["img"].combine_chunks().field("bytes").to_pylist()
    images = np.stack([np.asarray(Image.open(BytesIO(file)).convert("RGB")) for file in files])
    labels = torch.from_numpy(table["label"].to_numpy().copy())
    return ArraySet(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels)


def accuracy(method: str, options: Options) -> dict[str, Any]:
    """Train for 200 rounds, and compare the accuracy. Tiny sizes train for 2 rounds, and any accuracy is right."""
    require(options.cifar10 is not None, "--cifar10 names no folder with CIFAR-10")
    train, test = (split(options, name) for name in ("train", "test"))
    rounds = 2 if options.tiny else ROUNDS
    words = options.compiled("training.lr=0.1") if not options.tiny else options.compiled("model=small_cnn")
    if options.tiny:
        words += ("federation.clients=4", "federation.clients_per_round=2", "dataset.least_test_share=0")
        words += ("dataset.client_test_images=5", "training.batch_size=8", "training.epochs=1")
    made = plan(
        *(
            "experiment=cifar10_a",
            *IN_MEMORY,
            f"method={method}",
            "partition.gamma=0.3",
            f"federation.rounds={rounds}",
        ),
        *(["mask=dst", "mask.anneal_rounds=1000"] if method == "fedspa" else []),
        *(f"dataset.train_size={len(train)}", f"dataset.test_size={len(test)}", f"eval.every={rounds}"),
        *words,
    )
    made.dataset.load = lambda: Data(train, test)  # type: ignore[method-assign]
    federation = assembly.build(made)
    *_, last = federation.loop.rounds()
    kind, known = KNOWN[method]
    found = last.scores[kind]["accuracy"].mean
    facts = {"engine": engine_of(federation).name, "kind": kind, "accuracy": round(found, 2), "known": known}
    require(
        options.tiny or abs(found - known) <= SPREAD,
        f"it is further than {SPREAD} from the known one",
        **facts,
    )
    return facts


CHECKS = [
    Check("accurate", f"{method} after round {ROUNDS}", 180, partial(accuracy, method)) for method in KNOWN
]
