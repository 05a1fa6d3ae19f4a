"""One step of local training, by model and engine, on one thread: `python benchmarks/local_step.py [repeats]`.

Ours (augmentation off, clipping and all) against the same step written down in plain PyTorch, on the same images.
Every model by the eager engine, and those that compile in seconds by the compiled one too. Words of src/train.py
after the repeats, such as `engine=compiled`, are measured instead; `model=vgg11` measures one model alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from bench import (
    PlainLeNet5,
    Row,
    cpu_seconds,
    federation,
    in_turns,
    plain_training,
    repeats,
    report,
    seconds,
)

from fedspa.core.randomness import generator
from fedspa.data.sets import ArraySet
from fedspa.models.resnet18 import ResNet18
from fedspa.models.small_cnn import SmallCNN
from fedspa.models.vgg11 import VGG11
from fedspa.training.base import LocalTask

MODELS = {
    "small_cnn": (lambda: SmallCNN(1, 8, 10), 1, 8, 10, 64),
    "lenet5": (PlainLeNet5, 1, 28, 26, 128),
    "vgg11": (lambda: VGG11(3, 32, 10), 3, 32, 10, 32),
    "resnet18": (lambda: ResNet18(3, 32, 100), 3, 32, 100, 16),
}
"""The plain loop's network, channels, side, classes, and a batch that keeps a repeat short on a CPU."""
STEPS = 5
CELLS = (
    *((model, ("engine=eager",)) for model in MODELS),
    *((model, ("engine=compiled",)) for model in ("small_cnn", "lenet5")),
)


def rows(repeats: int, words: Sequence[str]) -> Iterator[Row]:
    chosen = [word.removeprefix("model=") for word in words if word.startswith("model=")] or list(MODELS)
    others = tuple(word for word in words if not word.startswith("model="))
    cells = [(model, others) for model in MODELS] if others else CELLS
    for model, overrides in cells:
        if model in chosen:
            yield measured(model, repeats, overrides)


def measured(model: str, repeats: int, overrides: Sequence[str]) -> Row:
    """One model's row: milliseconds are those of one step."""
    build, channels, side, classes, batch = MODELS[model]
    made = federation(
        "dataset=synthetic", "partition=iid", "method=fedavg", "federation.clients=1",
        "federation.clients_per_round=1", "hardware.workers=1", f"model={model}",
        f"dataset.channels={channels}", f"dataset.image_size={side}", f"dataset.classes={classes}",
        f"dataset.train_size={STEPS * batch}", "dataset.test_size=200", f"training.batch_size={batch}",
        *overrides,
    )  # fmt: skip
    engine, train = made.runner.setup.engine, made.data.train
    own = torch.from_numpy(made.rows.train[0])
    assert isinstance(train, ArraySet)
    network = build().to(engine.device)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    images, labels, weights = (
        item.to(engine.device) for item in (train.inputs, train.targets, engine.weights)
    )

    def wait() -> None:
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)

    def plain() -> None:
        plain_training(network, start, images, labels, own, epochs=1, batch_size=batch)
        wait()

    def ours() -> None:
        source = generator(0, "benchmark")
        engine.train(LocalTask(weights=weights, rows=own, epochs=1, learning_rate=0.1, generator=source))
        wait()

    spent = seconds if engine.device.type == "cuda" else cpu_seconds
    works = [lambda work=work: 1000 * spent(work) / STEPS for work in (plain, ours)]
    plain_ms, own_ms = in_turns(repeats, works)
    return {
        "model": model,
        "engine": engine.name,
        "device": engine.device.type,
        "batch": batch,
        "plain_ms": plain_ms,
        "fedspa_ms": own_ms,
        "ratio": own_ms / plain_ms,
        "samples_per_s": 1000 * batch / own_ms,
    }


if __name__ == "__main__":
    report(rows(repeats(5), sys.argv[2:]))
