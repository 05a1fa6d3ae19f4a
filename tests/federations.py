"""Small federations for the tests: a few images, a small network, and the real loop around them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from fedspa.communication.link import Link
from fedspa.core.client import ClientUpdate, Initial, Trained
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import RoundRecord
from fedspa.core.settings import EvalSettings, FaultSettings, FederationSettings, TrainingSettings
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.data.pixels import Augmentation, Pixels
from fedspa.data.sets import ArraySet
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.client_setup import ClientSetup
from fedspa.federated.evaluation import Evaluator
from fedspa.federated.executor import Executor, InProcess
from fedspa.federated.loop import FederatedLoop
from fedspa.federated.messages import Messages
from fedspa.federated.own_layers import OwnLayers
from fedspa.layer_sparsity.erk import ErdosRenyiKernel
from fedspa.masks.base import MaskSearcher
from fedspa.masks.initial import InitialMasks
from fedspa.methods.base import Method
from fedspa.metrics.accuracy import Accuracy
from fedspa.models.initialise import seeded
from fedspa.models.small_cnn import SmallCNN
from fedspa.runs.workers import Workers
from fedspa.training.base import Engine, LocalTask
from fedspa.training.eager import EagerEngine
from fedspa.training.local_training import LocalTraining

torch.set_num_threads(1)

PRECISIONS = {torch.float64: "64-true", torch.float32: "32-true"}


@cache
def fabric(dtype: torch.dtype = torch.float64) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, precision=PRECISIONS[dtype])


def random_images(count: int, side: int, classes: int, seed: int, channels: int = 1) -> ArraySet:
    """Noise with labels; brighter on average in higher classes, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count)
    noise = rng.integers(0, 128, size=(count, channels, side, side))
    images = noise + 127 * labels.reshape(-1, 1, 1, 1) // max(classes - 1, 1)
    return ArraySet(torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels))


def pixels(
    images: ArraySet, dtype: torch.dtype = torch.float64, mean: float = 0.5, std: float = 0.25
) -> Pixels:
    return Pixels(images, [mean], [std], Augmentation(), "cpu", dtype)


def engine(
    network: nn.Module, train: Pixels, training: TrainingSettings, module: Any = LocalTraining
) -> EagerEngine:
    """The engine of a network, in the dtype of the pixels."""
    return EagerEngine(fabric(train.dtype), network.to(train.dtype), training, train, module)


def train(runner: Engine, weights: torch.Tensor, rows: torch.Tensor, **options: Any) -> Trained:
    """One client's training."""
    return runner.train(LocalTask(weights=weights, rows=rows, **options))


@dataclass(frozen=True)
class Clients:
    """Images, and which rows of them each client holds."""

    train: ArraySet
    test: ArraySet
    train_rows: Sequence[np.ndarray]
    test_rows: Sequence[np.ndarray]
    classes: int


def random_clients(*sizes: int, side: int = 8, classes: int = 3, seed: int = 0) -> Clients:
    """Clients of so many random training images, and four test images each."""
    return Clients(
        train=random_images(sum(sizes), side, classes, seed),
        test=random_images(4 * len(sizes), side, classes, seed + 1),
        train_rows=np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]),
        test_rows=np.split(np.arange(4 * len(sizes)), len(sizes)),
        classes=classes,
    )


@dataclass(frozen=True)
class Federation:
    """A loop, the updates of every round, and the first global weights."""

    loop: FederatedLoop
    updates: list[tuple[int, ClientUpdate]]
    """Client and update, in the order in which they happened."""
    losses: list[tuple[int, float]]
    """Client and mean loss, likewise."""
    space: ParameterSpace
    initial: torch.Tensor

    def run(self) -> list[RoundRecord]:
        return list(self.loop.rounds())

    def close(self) -> None:
        """End the processes of its executor."""
        self.loop._executor.close()

    @property
    def weights(self) -> torch.Tensor:
        return self.loop.state.weights


def losses(folder: Path) -> list[float]:
    """Of each round of a run, from its folder."""
    with (folder / "rounds.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


def halved(network: nn.Module) -> list[int]:
    """How many parameters of each tensor are active: half of every weight tensor, and all of the others."""
    space = ParameterSpace.of(network).shared
    return [
        size // 2 if len(shape) > 1 else size for size, shape in zip(space.sizes, space.shapes, strict=True)
    ]


def federation(
    method: Method,
    network: nn.Module,
    clients: Clients,
    training: TrainingSettings,
    *,
    searcher: MaskSearcher | None = None,
    initial_mask: Callable[[int], PackedMask] | None = None,
    active: Sequence[int] = (),
    public: Sequence[int] = (),
    clients_per_round: int | None = None,
    rounds: int = 1,
    eval_every: int = 1,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    convention: str = "honest",
    wire: str | None = None,
    faults: FaultSettings | None = None,
    executor: Callable[[ClientRunner], Executor] = InProcess,
    engine_of: Callable[[EagerEngine], Engine] = lambda eager: eager,
) -> Federation:
    """A federation in which every client takes part, unless told otherwise. Takes the network over.

    Of `active` parameters of each tensor, first masks are drawn as a run draws them, unless they are given.
    """
    train, test = (pixels(images, dtype) for images in (clients.train, clients.test))
    runner = engine_of(engine(network, train, training, method.training_module))
    space, whole = runner.space.shared, runner.weights
    full_mask = PackedMask.pack(torch.ones(space.total))
    if searcher is not None:
        method, searcher = copy(method), copy(searcher)
        method.searcher = searcher
        searcher.fit(space.parameters, active[: len(space.parameters.names)], rounds)
    if initial_mask is None and active and not (searcher and searcher.searches_first):
        initial_mask = (
            InitialMasks.of(searcher, space, seed=0)
            if searcher
            else InitialMasks(space, active, shared=True, seed=0)
        )
    accuracy = {"accuracy": Accuracy(name="accuracy")}
    setup = ClientSetup(
        seed=seed,
        training=training,
        engine=runner,
        network=NetworkCosts.of(network, tuple(clients.train.inputs.shape[1:]), convention),
        client_rows=clients.train_rows,
        initial=whole[: space.total].clone(),
        public=torch.tensor(public, dtype=torch.int64),
        own_layers=OwnLayers(whole[space.total :], method.trains_personal),
    )
    client_runner = ClientRunner(
        setup=setup,
        method=method,
        evaluators=[Evaluator(test, clients.test_rows, accuracy, clients.classes, batch_size=8)],
        messages=Messages(setup.network, seed, Link(space, wire, seed) if wire else None),
        faults=faults or FaultSettings(),
    )
    count, weights, updates, losses = len(clients.train_rows), whole[: space.total], [], []

    def on_update(job, weights, result):
        updates.append((job.client, result.update))
        losses.append((job.client, float(result.loss)))

    loop = FederatedLoop(
        client_runner,
        executor(client_runner),
        FederationSettings(count, clients_per_round or count, rounds),
        EvalSettings(every=eval_every),
        Initial(
            weights, initial_mask or (lambda client: full_mask), full_mask, (len(public), clients.classes)
        ),
        on_update=on_update,
    )
    return Federation(loop, updates, losses, space, weights.clone())


SMALL_CLIENTS = random_clients(6, 10, 14, 10)


def small(
    method: Method,
    searcher: MaskSearcher | None = None,
    sparsity: str = "0.5",
    epochs: int = 2,
    rounds: int = 3,
    clients: Clients = SMALL_CLIENTS,
    **options: Any,
) -> Federation:
    """Two of four clients a round, a convolutional network, float32, ERK masks."""
    network = seeded(lambda: SmallCNN(channels=1, image_size=8, classes=3), seed=0)
    space = ParameterSpace.of(network)
    active = ErdosRenyiKernel(name="erk").active_counts(space.shapes, 1 - Fraction(sparsity))
    return federation(
        method,
        network,
        clients,
        TrainingSettings(epochs=epochs, batch_size=4),
        searcher=searcher,
        active=active,
        clients_per_round=2,
        rounds=rounds,
        dtype=torch.float32,
        **options,
    )


def two_workers(runner: ClientRunner) -> Workers:
    """An executor of two processes, which the test has to close."""
    weights = runner.setup.engine.weights[: runner.setup.space.total]
    full_mask = PackedMask.pack(torch.ones_like(weights))
    return Workers(
        runner, 2, runner.method.server_init(Initial(weights, lambda client: full_mask, full_mask))
    )


def pack(mask: Iterable[float]) -> PackedMask:
    return PackedMask.pack(torch.tensor(list(mask)))
