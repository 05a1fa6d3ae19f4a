"""What a run asks of its engine, from its settings and the sizes of its clients."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from fedspa.config.plan import Plan
from fedspa.training.workload import Workload

LEAST_TEST_BATCH = 64
"""Images that a GPU should be shown at a time, even where each client has fewer to test its models on."""


def workload(plan: Plan, train_sizes: Sequence[int] | np.ndarray, most_tested: int) -> Workload:
    """Its steps are those of rounds whose clients are all of mean size.

    Args:
        train_sizes: training rows of each client.
        most_tested: test rows of the client that has most.
    """
    federation, training = plan.settings.federation, plan.settings.training
    sizes = np.asarray(train_sizes)
    updates = federation.rounds * federation.clients_per_round
    batches = ceil(float(sizes.mean()) / training.batch_size)
    return Workload(
        largest=int(sizes.max()),
        steps=round(updates * training.epochs * batches),
        gradients=plan.mask is not None and (plan.mask.needs_gradient or plan.mask.needs_first_gradient),
        # A client's test images are one batch, not filled up; those of all clients, several of a fair size.
        test_batch=min(plan.settings.eval.batch_size, max(LEAST_TEST_BATCH, most_tested)),
    )
