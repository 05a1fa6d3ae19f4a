"""Tests of the models that the server can make: global, personal, and fine-tuned at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedspa.core.client_state import ClientState
from fedspa.federated.client_runner import ClientRunner
from fedspa.federated.evaluation import Model, Scores, score_models
from fedspa.federated.executor import Executor
from fedspa.federated.jobs import FineTuneJob
from fedspa.federated.scores import ClientScores, Kept, merged
from fedspa.federated.state import FederationState


@dataclass(frozen=True)
class ModelTests:
    """Tests global and personal models on the test sets of some clients."""

    runner: ClientRunner
    executor: Executor
    clients: Sequence[int]
    """The clients whose models are tested."""

    def scores(self, state: FederationState) -> Kept:
        """The scores of the global and the personal models, if the method has them, merged into the earlier scores.

        Afterwards no client is marked as changed.
        """
        method, layers = self.runner.method, self.runner.setup.own_layers
        models: list[tuple[Model, Sequence[int]]] = []
        if "global" in method.kinds:
            if layers.first:
                states = ((client, layers.of(state.stored_state(client))) for client in self.clients)
                models += _by_state("global", states)
            else:
                models.append((Model("global"), self.clients))
        if "personal" in method.kinds:
            models += _by_state(
                "personal", ((client, state.stored_state(client)) for client in self._due(state))
            )
            state.changed = set()
        run = partial(self.executor.run, server=state.server)
        return merged(state.scores, score_models(self.runner.evaluators, models, run))

    def _due(self, state: FederationState) -> Iterable[int]:
        """The clients whose personal models may have changed since their last test."""
        if self.runner.method.personal_is_own and "personal" in state.scores:
            return [client for client in self.clients if client in state.changed]
        return self.clients

    def finetune(self, state: FederationState, epochs: int) -> dict[str, ClientScores]:
        """The scores, by metric, after every client trained a copy of the final global weights."""
        layers = self.runner.setup.own_layers
        jobs = [
            FineTuneJob(state.round, client, epochs, layers.of(state.stored_state(client)))
            for client in self.clients
        ]
        by_client = list(self.executor.run(jobs, state.server))
        return by_metric(dict(zip(self.clients, by_client, strict=True)))

    def finetune_flops(self, epochs: int) -> int | None:
        """The FLOPs of `finetune`. They are not part of the rounds' costs."""
        setup = self.runner.setup
        samples = sum(
            setup.training.samples(len(setup.client_rows[client]), epochs) for client in self.clients
        )
        return setup.network.training_flops(None, samples)


def by_metric(scores: Mapping[int, Scores]) -> dict[str, ClientScores]:
    """The scores by metric, from clients that were tested one by one."""
    metrics = next(iter(scores.values()), {})
    return {
        metric: ClientScores().updated(
            list(scores), np.concatenate([each[metric] for each in scores.values()])
        )
        for metric in metrics
    }


def _by_state(kind: str, states: Iterable[tuple[int, ClientState]]) -> list[tuple[Model, list[int]]]:
    """The models of clients in these states, each with its clients. Clients with the same state share a model."""
    sharers: dict[Any, tuple[Model, list[int]]] = {}
    for client, state in states:
        sharers.setdefault(state.identity, (Model(kind, state), []))[1].append(client)
    return list(sharers.values())
