"""What a visit can ask of the engine, and what it is answered.

A visit (`Method.visit`) computes nothing on the network itself: it yields one of these requests and is sent the
answer. Whoever drives it decides when, where and with whose other requests together the work is done, so that
the same method runs client after client, or with the clients of a round in lockstep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    import torch

    from fedspa.data.batches import Pixels
    from fedspa.masks.base import MaskSearcher, SearchInput


@dataclass(frozen=True)
class Pull:
    """A proximal pull towards fixed weights, applied after each step: v <- v - lr * strength * (v - anchor)."""

    anchor: torch.Tensor
    """Weights [total]."""
    strength: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Train:
    """Train a client from given weights. Answered by `Trained`."""

    phase: ClassVar[str] = "train"

    weights: torch.Tensor
    """[total], where training starts, already masked; not written to."""
    rows: torch.Tensor
    """int64 [n] on the CPU: the client's training rows."""
    epochs: int
    """Passes over the rows."""
    learning_rate: float
    """Of every step."""
    generator: torch.Generator
    """Draws the order of the rows and the augmentation; continued by later requests. Its seed is also that of
    layers which draw for themselves, such as dropout."""
    mask: torch.Tensor | None = None
    """[total], zeros and ones in the dtype of the weights; None trains densely."""
    pull: Pull | None = None
    personal: bool = False
    """Whether a personal model is trained that is not the one whose update is sent. Layers that stay with a client are
    then there twice (see `Method.trains_personal`)."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What local training leaves."""

    weights: torch.Tensor
    """[total]; the asker's own."""
    loss: torch.Tensor
    """float64 scalar where the weights lie: the mean over the samples; NaN where there are none."""
    samples: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
    """The dense, unclipped gradient of the mean loss of one mini-batch of the client. Answered by a tensor [total]."""

    phase: ClassVar[str] = "search"

    weights: torch.Tensor
    """[total], where the gradient is taken; not written to."""
    rows: torch.Tensor
    """int64 [n] on the CPU: the client's training rows."""
    generator: torch.Generator
    """Draws the mini-batch and its augmentation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NextMask:
    """A client's mask for its next visit. Answered by what the searcher's `next_mask` says, a tensor [total]."""

    phase: ClassVar[str] = "search"

    searcher: MaskSearcher
    """The same for all clients."""
    search: SearchInput


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingAccuracy:
    """The accuracy of weights on training rows, without augmentation. Answered by a float in [0, 1]."""

    phase: ClassVar[str] = "search"

    weights: torch.Tensor
    """[total]; not written to."""
    rows: torch.Tensor
    """int64 [n] on the CPU: the client's training rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Predict:
    """The most likely class of each image, without augmentation. Answered by int64 [n], where the weights lie."""

    phase: ClassVar[str] = "evaluate"

    weights: torch.Tensor
    """[total]; not written to."""
    pixels: Pixels
    """The set that the images are of."""
    rows: torch.Tensor
    """int64 [n] on the CPU: at least one image."""
    batch_size: int
    """The network sees at most so many at a time."""


Request: TypeAlias = Train | Gradient | NextMask | TrainingAccuracy | Predict
"""`phase` is the part of a round (of `records.PHASES`) whose seconds the work counts for."""

Answer: TypeAlias = "Trained | torch.Tensor | float"
