"""A mask search of DST, by model: `python benchmarks/mask_search.py [repeats]`.

`gradient_ms` is the dense gradient of one batch, `select_ms` dropping and growing by it, tensor by tensor, and packing
the mask; the share is that of both in a visit of 5 epochs of 10 such batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from bench import Row, cpu_seconds, federation, in_turns, repeats, report

from fedspa.masks.base import SearchInput
from fedspa.masks.packed import PackedMask
from fedspa.randomness import generator
from fedspa.rounds.requests import Gradient, Train

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
    engine, own, searcher = (
        made.visitor.engine,
        torch.from_numpy(made.rows.train[0]),
        made.visitor.searcher,
    )
    own_mask = made.loop.client_state(0).mask
    assert searcher is not None and own_mask is not None
    mask = own_mask.unpack(like=engine.weights)
    weights = mask * engine.weights
    (found,) = engine.answer([Gradient(weights=weights, rows=own, generator=generator(0, "benchmark"))])
    assert isinstance(found, torch.Tensor)

    def gradient() -> None:
        engine.answer([Gradient(weights=weights, rows=own, generator=generator(0, "benchmark"))])

    def select() -> None:
        source = generator(0, "benchmark")
        PackedMask.pack(searcher.next_mask(SearchInput(engine.space, mask, weights, found, 0, source)))

    def step() -> None:
        source = generator(0, "benchmark")
        step = Train(weights=weights, rows=own, mask=mask, epochs=1, learning_rate=0.1, generator=source)
        engine.answer([step])

    spent = in_turns(repeats, [partial(cpu_seconds, work) for work in (gradient, select, step)])
    gradient_ms, select_ms, step_ms = (1000 * seconds for seconds in spent)
    return {
        "model": model,
        "parameters": engine.space.total,
        "gradient_ms": gradient_ms,
        "select_ms": select_ms,
        "share_of_a_visit_%": 100 * (gradient_ms + select_ms) / (gradient_ms + select_ms + 50 * step_ms),
    }


if __name__ == "__main__":
    report(rows(repeats(5)))
