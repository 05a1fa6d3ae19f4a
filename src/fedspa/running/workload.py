"""What a run asks of its engine, from its settings and the sizes of its clients."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from fedspa.config import Plan
from fedspa.costing.costs import NetworkCosts
from fedspa.engines.choice import Workload

LEAST_TEST_BATCH = 64
"""Images that a GPU should be shown at a time, even where each client has fewer to test its models on."""


def workload(
    plan: Plan, train_sizes: Sequence[int] | np.ndarray, most_tested: int, costs: NetworkCosts, ranks: int = 1
) -> Workload:
    """Its steps are those of rounds whose clients are all of mean size.

    Args:
        train_sizes: training rows of each client.
        most_tested: test rows of the client that has most.
        costs: of the network.
        ranks: how many processes share the clients of a round.
    """
    federation, training = plan.settings.federation, plan.settings.training
    sizes = np.asarray(train_sizes)
    visits = federation.rounds * federation.clients_per_round
    mean_size, largest = float(sizes.mean()), int(sizes.max())
    batches = ceil(mean_size / training.batch_size)
    return Workload(
        largest=largest,
        steps=round(visits * training.epochs * batches),
        clients=ceil(federation.clients_per_round / ranks),
        batch_flops=costs.forward_flops() * min(training.batch_size, largest),
        evenness=batches / ceil(largest / training.batch_size),
        gradients=plan.mask is not None and (plan.mask.needs_gradient or plan.mask.needs_first_gradient),
        # A client's test images are one batch, not filled up; those of all clients, several of a fair size.
        test_batch=min(plan.settings.eval.batch_size, max(LEAST_TEST_BATCH, most_tested)),
    )
