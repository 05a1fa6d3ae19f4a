"""What the framework itself costs a visit: `python benchmarks/overhead.py [repeats]`.

A client of 8 images of 8 x 8 takes one step on one thread: a whole visit of ours, from the call to the update, against
the same visit written down in plain PyTorch. Neither tests a model. (What
a search of DST adds is measured by mask_search.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from bench import Row, cpu_seconds, federation, in_turns, plain_visit, repeats, report

from fedspa.data.source import ImageSet
from fedspa.models.small_cnn import SmallCNN
from fedspa.rounds.visitor import Call

METHODS = {
    "FedAvg": ("method=fedavg",),
    "FedSpa (RSM)": ("mask=rsm",),
}


def rows(repeats: int) -> Iterator[Row]:
    for visit in METHODS:
        yield measured(visit, repeats)


def measured(visit: str, repeats: int) -> Row:
    """The row of one of `METHODS`."""
    made = federation(
        *METHODS[visit], "dataset=synthetic", "partition=iid", "model=small_cnn", "federation.clients=1",
        "federation.clients_per_round=1", "hardware.workers=1", "dataset.image_size=8", "dataset.train_size=8",
        "dataset.test_size=50", "training.batch_size=8", "training.epochs=1",
    )  # fmt: skip
    visitor, train = replace(made.visitor, evaluators=[]), made.data.train
    weights, own, network = (
        visitor.engine.weights,
        torch.from_numpy(made.rows.train[0]),
        SmallCNN(1, 8, 10),
    )
    assert isinstance(train, ImageSet)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    call = Call(0, 0, first_visit=True, state=made.loop.client_state(0))

    def plain() -> None:
        end = plain_visit(network, start, train.images, train.labels, own, epochs=1)
        {name: start[name] - value for name, value in end.items()}

    def ours() -> None:
        visitor.perform([call], weights)

    spent = in_turns(repeats, [partial(cpu_seconds, work) for work in (plain, ours)], warm=20)
    plain_ms, own_ms = (1000 * seconds for seconds in spent)
    return {"visit": visit, "plain_ms": plain_ms, "fedspa_ms": own_ms, "overhead_ms": own_ms - plain_ms}


if __name__ == "__main__":
    report(rows(repeats(200)))
