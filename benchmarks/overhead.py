"""What the framework itself costs a client update: `python benchmarks/overhead.py [repeats]`.

A client of 8 images of 8 x 8 takes one step on one thread: a whole client update of ours, from the job to its result,
against the same update written down in plain PyTorch. Neither tests a model. (What a search of DST adds is measured
by mask_search.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from bench import Row, cpu_seconds, federation, in_turns, plain_training, repeats, report

from fedspa.data.sets import ArraySet
from fedspa.federated.jobs import UpdateJob
from fedspa.models.small_cnn import SmallCNN

METHODS = {
    "FedAvg": ("method=fedavg",),
    "FedSpa (RSM)": ("mask=rsm",),
}


def rows(repeats: int) -> Iterator[Row]:
    for method in METHODS:
        yield measured(method, repeats)


def measured(method: str, repeats: int) -> Row:
    """The row of one of `METHODS`."""
    made = federation(
        *METHODS[method], "dataset=synthetic", "partition=iid", "model=small_cnn", "federation.clients=1",
        "federation.clients_per_round=1", "hardware.workers=1", "dataset.image_size=8", "dataset.train_size=8",
        "dataset.test_size=50", "training.batch_size=8", "training.epochs=1",
    )  # fmt: skip
    runner, train = replace(made.runner, evaluators=[]), made.data.train
    own, network, state = torch.from_numpy(made.rows.train[0]), SmallCNN(1, 8, 10), made.loop.state
    assert isinstance(train, ArraySet)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    job = UpdateJob(round=0, client=0, first=True, state=state.client_state(0))

    def plain() -> None:
        end = plain_training(network, start, train.inputs, train.targets, own, epochs=1)
        {name: start[name] - value for name, value in end.items()}

    def ours() -> None:
        runner.perform(job, state.server)

    spent = in_turns(repeats, [partial(cpu_seconds, work) for work in (plain, ours)], warm=20)
    plain_ms, own_ms = (1000 * seconds for seconds in spent)
    return {"method": method, "plain_ms": plain_ms, "fedspa_ms": own_ms, "overhead_ms": own_ms - plain_ms}


if __name__ == "__main__":
    report(rows(repeats(200)))
