"""A mask search of DST, by model: `python benchmarks/mask_search.py [repeats]`.

`gradient_ms` is the dense gradient of one batch, `select_ms` dropping and growing by it, tensor by tensor, and
packing the mask; the share is that of both in a client update of 5 epochs of 10 such batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from bench import Row, cpu_seconds, federation, in_turns, repeats, report

from fedspa.core.packed_mask import PackedMask
from fedspa.core.randomness import generator
from fedspa.masks.search_input import SearchInput
from fedspa.methods.base import MaskedMethod
from fedspa.training.base import LocalTask

MODELS = {"lenet5": (1, 28, 26, 128), "vgg11": (3, 32, 10, 32), "resnet18": (3, 32, 100, 16)}
"""Channels, side, classes, batch."""


def rows(repeats: int) -> Iterator[Row]:
    for model in MODELS:
        yield measured(model, repeats)


def measured(model: str, repeats: int) -> Row:
    """One model's row."""
    channels, side, classes, batch = MODELS[model]
    made = federation(
        "dataset=synthetic", "partition=iid", "mask=dst", "federation.clients=1", "federation.clients_per_round=1",
        "hardware.workers=1", f"model={model}", f"dataset.channels={channels}", f"dataset.image_size={side}",
        f"dataset.classes={classes}", f"dataset.train_size={batch}", "dataset.test_size=200",
        f"training.batch_size={batch}",
    )  # fmt: skip
    engine, own = made.runner.setup.engine, torch.from_numpy(made.rows.train[0])
    assert isinstance(made.runner.method, MaskedMethod)
    searcher = made.runner.method.searcher
    mask = made.loop.state.mask(0).unpack(like=engine.weights)
    weights = mask * engine.weights

    def gradient() -> torch.Tensor:
        return engine.gradient(weights, own, generator(0, "benchmark"))

    search = SearchInput(
        space=engine.space, mask=mask, weights=weights, gradient=gradient(), round=0,
        generator=generator(0, "benchmark"), counts=engine.space.count(mask),
    )  # fmt: skip

    def select() -> None:
        PackedMask.pack(searcher.next_mask(search))

    def step() -> None:
        source = generator(0, "benchmark")
        engine.train(
            LocalTask(weights=weights, rows=own, mask=mask, epochs=1, learning_rate=0.1, generator=source)
        )

    spent = in_turns(repeats, [partial(cpu_seconds, work) for work in (gradient, select, step)])
    gradient_ms, select_ms, step_ms = (1000 * seconds for seconds in spent)
    return {
        "model": model,
        "parameters": engine.space.total,
        "gradient_ms": gradient_ms,
        "select_ms": select_ms,
        "share_of_an_update_%": 100 * (gradient_ms + select_ms) / (gradient_ms + select_ms + 50 * step_ms),
    }


if __name__ == "__main__":
    report(rows(repeats(5)))
