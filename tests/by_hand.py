"""Local training, the mask search and the server's step in NumPy, on a problem that fits in the head.

The model is softmax regression on pictures of four pixels: 12 weights and 3 biases, whose gradient takes
four lines. Two clients hold 3 and 5 pictures; a batch takes all of a client's, so that an epoch is one SGD
step and the order of the pictures does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Vector = np.ndarray
"""Flat weights, gradients and masks: float64 [15], the 3 x 4 weights row by row, then the 3 biases."""

# This seed makes the gates of Sub-FedAvg decide differently for the two clients and rounds.
DRAW = np.random.default_rng(277)
PICTURES, LABELS = DRAW.integers(0, 256, (14, 4)), DRAW.integers(0, 3, 14)
W0: Vector = DRAW.normal(0, 0.5, 15)


class Client(NamedTuple):
    x: np.ndarray  # training pictures as the network sees them, [n, 4]
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def seen(pictures: np.ndarray) -> np.ndarray:
    return (pictures / 255 - 0.5) / 0.25


CLIENTS = [
    Client(seen(PICTURES[train]), LABELS[train], seen(PICTURES[test]), LABELS[test])
    for train, test in [(slice(0, 3), slice(8, 12)), (slice(3, 8), slice(12, 14))]
]

LRS = [0.5, 0.25]  # of the two rounds: lr = 0.5, lr_decay = 0.5

MASKS = [  # 6 of 12 weights and 2 of 3 biases are active: density 8 / 15
    np.array([1, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0.0]),
    np.array([0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1.0]),
]


def logits(w: Vector, x: np.ndarray) -> np.ndarray:
    return x @ w[:12].reshape(3, 4).T + w[12:]


def loss_and_gradient(w: Vector, x: np.ndarray, y: np.ndarray) -> tuple[float, Vector]:
    """Mean cross-entropy of softmax(W x + b), and its gradient: (p - onehot) x^T and p - onehot."""
    odds = np.exp(logits(w, x))
    p = odds / odds.sum(axis=1, keepdims=True)
    error = (p - np.eye(3)[y]) / len(y)
    return -np.log(p[np.arange(len(y)), y]).mean(), np.concatenate([(error.T @ x).ravel(), error.sum(axis=0)])


def accuracy(w: Vector, x: np.ndarray, y: np.ndarray) -> float:
    return float((logits(w, x).argmax(axis=1) == y).mean())


class Descent(NamedTuple):
    weights: list[Vector]  # from the start to the end of local training
    losses: list[float]  # of each step, before it

    @property
    def end(self) -> Vector:
        return self.weights[-1]


def sgd(
    w: Vector,
    client: Client,
    lr: float,
    steps: int = 2,
    mask: Vector | float = 1.0,
    clip_norm: float | None = None,
    clip_scope: str = "all",
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    anchor: Vector | None = None,
    pull: float = 0.0,
) -> Descent:
    """Local training: clip the gradient, mask it, add the weight decay, step; then pull to the anchor."""
    path, velocity = Descent([w], []), np.zeros(15)
    for _ in range(steps):
        loss, gradient = loss_and_gradient(w, client.x, client.y)
        clipped = mask * gradient if clip_scope == "active" else gradient
        if clip_norm is not None:  # 1e-6 as in torch's clip_grad_norm_, which related code uses
            clipped = clipped * min(1, clip_norm / (np.linalg.norm(clipped) + 1e-6))
        velocity = momentum * velocity + mask * clipped + weight_decay * w
        w = w - lr * velocity
        if anchor is not None:
            w = w - lr * pull * (w - anchor)
        path.weights.append(w)
        path.losses.append(loss)
    return path


def exchange(mask: Vector, weights: Vector, gradient: Vector, k: int) -> Vector:
    """The DST step on one tensor: drop the k active of smallest |w|, grow k of largest |gradient|."""
    mask = mask.copy()
    active = np.flatnonzero(mask == 1)
    mask[active[np.argsort(abs(weights[active]))[:k]]] = 0
    inactive = np.flatnonzero(mask == 0)  # the just dropped ones included
    mask[inactive[np.argsort(-abs(gradient[inactive]))[:k]]] = 1
    return mask


def merge(
    w: Vector,
    updates: list[Vector],
    holds: list[Vector],
    weighting: str = "uniform",
    normaliser: str = "participants",
) -> Vector:
    """w - sum a_k U_k: over all participants, or coordinate by coordinate over those who hold it."""
    a = [len(client.y) if weighting == "samples" else 1 for client in CLIENTS]
    total = sum(a_k * update for a_k, update in zip(a, updates, strict=True))
    if normaliser == "participants":
        return w - total / sum(a)
    held = sum(a_k * hold for a_k, hold in zip(a, holds, strict=True))
    return w - np.array([t / h if h > 0 else 0 for t, h in zip(total, held, strict=True)])


def mean_loss(paths: list[Descent], clients: list[Client] = CLIENTS) -> float:
    """Over all pictures trained on: every step of a client looks at all of its pictures."""
    pairs = list(zip(paths, clients, strict=True))
    loss = sum(len(client.y) * sum(path.losses) for path, client in pairs)
    return loss / sum(len(client.y) * len(path.losses) for path, client in pairs)
