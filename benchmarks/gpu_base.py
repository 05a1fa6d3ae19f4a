"""The parts of `gpu_check.py` have these in common: the form of a check, its options, and federations to check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hydra import compose, initialize_config_dir

from fedspa.config.plan import Plan, check
from fedspa.core.paths import config_dir
from fedspa.runs import assembly

if TYPE_CHECKING:
    from fedspa.runs.assembly import Federation
    from fedspa.training.base import Engine

CLIENTS, TINY_CLIENTS = 100, 4
IMAGES = {"lenet5": (26, 1, 28), "vgg11": (10, 3, 32), "resnet18": (100, 3, 32)}
"""Classes, channels and pixels of the images on which the paper trains each model."""


class Wrong(Exception):
    """Raised by a check that found something wrong. The message says what; `facts` are values that it measured."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    tiny: bool = False
    """Small sizes on the CPU, to try the checks themselves."""
    cifar10: Path | None = None
    """A folder with train.parquet and test.parquet of CIFAR-10."""

    def compiled(self, *words: str) -> tuple[str, ...]:
        """The words of a run by the compiled engine, on the GPU unless the sizes are tiny."""
        if self.tiny:
            return ("engine=compiled", "engine.compiler=null", "hardware=cpu", *words)
        return ("engine=compiled", "hardware=gpu", *words)


class Check(NamedTuple):
    """A check. It runs in its own process, which ends at the deadline."""

    part: str
    """right, fast or accurate."""
    name: str
    deadline: float
    """Seconds, so that a check that hangs ends. A guess: its work by arithmetic, and a minute or two to compile."""
    run: Callable[[Options], dict[str, Any]]
    """Returns the values that it measured. Raises `Wrong`, or any other error."""


def plan(*words: str) -> Plan:
    """The checked plan of a command line."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return check(compose("config", overrides=["logger=none", *words]))


def made_up(
    model: str, options: Options, train_size: int, test_size: int, augmented: bool = True
) -> list[str]:
    """The words for a model and made-up images, which need no file. Tiny sizes have a small network for each model."""
    classes, channels, side = IMAGES[model]
    if options.tiny:
        classes, side = 3, 8
    return [
        *("dataset=synthetic", f"model={'small_cnn' if options.tiny else model}", "partition=iid"),
        *(f"dataset.classes={classes}", f"dataset.channels={channels}", f"dataset.image_size={side}"),
        *(f"dataset.train_size={train_size}", f"dataset.test_size={test_size}"),
        *(["+dataset.augmentation={crop_padding: 4, flip: true}"] if augmented else []),
        "dataset.least_test_share=0",
    ]


def small(model: str, options: Options, *words: str) -> Federation:
    """A federation of four clients with 40 images each: two whole batches of 16 and a partial one."""
    return assembly.build(
        plan(
            *made_up(model, options, train_size=160, test_size=200),
            *("federation.clients=4", "federation.clients_per_round=3", "federation.rounds=4"),
            *("training.batch_size=16", "training.epochs=2", "training.clip_norm=0.5", "training.lr=0.05"),
            *("dataset.client_test_images=20", "method=fedspa", "mask=dst", "hardware.workers=1"),
            *words,
        )
    )


def engine_of(federation: Federation) -> Engine:
    """The engine that a federation computes with."""
    return federation.runner.setup.engine


def require(right: bool, message: str, **facts: Any) -> None:
    """Raise `Wrong` unless something is right."""
    if not right:
        raise Wrong(message, **facts)
