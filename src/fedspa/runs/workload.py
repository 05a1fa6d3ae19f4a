"""Computes the facts for the choice of an engine, from a run's settings and the sizes of its clients."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from fedspa.config.plan import Plan
from fedspa.training.workload import Workload

LEAST_TEST_BATCH = 64
"""The least number of images in a GPU's test batch, even if each client has fewer test images."""


def workload(plan: Plan, train_sizes: Sequence[int] | np.ndarray, most_tested: int) -> Workload:
    """The workload of a run. Its number of steps is computed with the mean size of clients.

    Args:
        train_sizes: the number of training rows of each client.
        most_tested: the largest number of test rows of a client.
    """
    federation, training = plan.settings.federation, plan.settings.training
    sizes = np.asarray(train_sizes)
    updates = federation.rounds * federation.clients_per_round
    whole_batch = plan.settings.eval.batch_size
    # The test images of one client are a batch that is not filled up. Those of all clients are several batches.
    client_batch = min(whole_batch, max(LEAST_TEST_BATCH, most_tested))
    batches = ceil(float(sizes.mean()) / training.batch_size)
    return Workload(
        largest=int(sizes.max()),
        participants=federation.clients_per_round,
        steps=round(updates * training.epochs * batches),
        gradients=plan.mask is not None and (plan.mask.needs_gradient or plan.mask.needs_first_gradient),
        masked=plan.mask is not None,
        test_batches=tuple(
            sorted({client_batch, whole_batch} if "global" in plan.method.kinds else {client_batch})
        ),
    )
