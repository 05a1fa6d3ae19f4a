"""A source of data: facts that the config states, and a `load` that checks the data against them.

The facts (sizes, shape, classes) stand in the config, so that costs, models and hashes need no data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from fedspa.core.errors import UserError, check_range, written
from fedspa.core.limits import Component, limited
from fedspa.data.examples import Arrays, Examples
from fedspa.data.pixels import Augmentation, MadePixels, Pixels
from fedspa.data.sets import ArraySet, Data, MadeImages

SPLITS = ("train", "test")


@dataclass(kw_only=True)
class Source(Component, ABC):
    """Examples in a training and a test split. Without `read`, it states facts only."""

    section: ClassVar[str] = "dataset"
    classes: int
    """0 where the targets are numbers (a regression)."""
    train_size: int
    test_size: int
    train_rows: int | None = None
    """The number of training examples to use; null: all. A table of the user draws them by `data_seed`; other sources
    take the first ones."""
    test_rows: int | None = None
    val_fraction: float = limited(0.0, low=0, high=1, high_open=True)
    """Share of each client's own training rows that is kept apart for validation."""
    public_fraction: float = limited(0.0, low=0, high=1, high_open=True)
    """Share of each client's training rows that becomes public: all clients have these rows, and none its own."""
    client_test_images: int = limited(100, low=1)
    """Test examples of a client, drawn with its own label shares."""
    client_test_rounding: str = limited("exact", choices=("exact", "ceil"))
    """exact: that many, by largest remainder. ceil: each class's share rounded up, as related code does."""
    least_test_share: float = limited(0.5, low=0, high=1)
    """Where the test split has too few examples of a class for a client's label shares, it gets fewer than
    `client_test_images`: the run is refused where that is less than this share of them."""

    things: ClassVar[str] = "examples"
    """The word for the examples in sentences."""
    augmentation = Augmentation()
    """The augmentation of images. It is no field, so other data sets have no such setting."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_described:
            self.check_facts()

    def check_facts(self) -> None:
        """Raise `UserError` for facts that cannot be, and for settings that do not go with them."""
        if not self.is_regression:
            check_range("dataset.classes", self.classes, low=2)
        for split, size, used in (
            ("train", self.train_size, self.effective_train_size),
            ("test", self.test_size, self.effective_test_size),
        ):
            check_range(f"dataset.{split}_size", size, low=1)
            check_range(f"dataset.{split}_rows", used, low=1, high=size)

    # ---- the shape of inputs and targets

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example, such as (channels, height, width)."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype of a network's inputs: int64 for tokens; None for floats, which have the dtype of the weights."""
        return None

    @property
    def outputs(self) -> int:
        """Numbers that a network gives for an example: one for each class, or for each number of a target."""
        return self.classes

    @property
    def is_regression(self) -> bool:
        """True if the targets are numbers, not classes."""
        return False

    @property
    def shape_text(self) -> str:
        """One example in words, for sentences."""
        return f"{self.things} of {' x '.join(map(str, self.input_shape))}"

    @property
    def model_facts(self) -> dict[str, Any]:
        """The arguments that a model may take, by the names in `fedspa.models.arguments`."""
        return {"input_shape": self.input_shape, "outputs": self.outputs}

    @property
    def row_bytes(self) -> int:
        """Memory of one example."""
        return self.probe(1).inputs.nbytes

    def blank(self, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Inputs [count, *input_shape] of zeros; `dtype` is that of the floats, float32 if None."""
        return torch.zeros(count, *self.input_shape, dtype=self.input_dtype or dtype)

    def probe(self, count: int) -> ArraySet:
        """`count` made-up examples of this shape, to measure how fast a network trains."""
        classes = torch.zeros(count, dtype=torch.int64)
        return ArraySet(
            self.blank(count), torch.zeros(count, self.outputs) if self.is_regression else classes
        )

    def normaliser(self) -> dict[str, list[float]]:
        """mean and std of each channel, which an exported model applies itself; empty of other inputs than images."""
        return {}

    # ---- sizes

    @property
    def effective_train_size(self) -> int:
        """Training examples in use: `train_size`, or `train_rows` if it is set."""
        return self.train_size if self.train_rows is None else self.train_rows

    @property
    def effective_test_size(self) -> int:
        """Test examples in use."""
        return self.test_size if self.test_rows is None else self.test_rows

    def rows_in_memory(self, *, copies: bool = True) -> int:
        """Examples in the memory of a process, once they are loaded. copies: count those that preparing them makes."""
        return self.effective_train_size + self.effective_test_size

    # ---- the data

    @property
    def is_described(self) -> bool:
        """True if nothing has to be read from the data."""
        return True

    def described(self, group_by: str | None) -> Source:
        """This source with every fact stated, read from the data where the config left it open.

        group_by: the column that the partition goes by. Raises `UserError` where the data cannot be read.
        """
        return self

    @property
    def remarks(self) -> list[str]:
        """Sentences on the data for the start of a run."""
        return []

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the labels; empty if the data has no names."""
        return ()

    @abstractmethod
    def read(self, split: str) -> ArraySet:
        """The first `rows_to_read` examples of "train" or "test"; broken data raises `UserError`."""

    def load(self) -> Data:
        """Both splits, checked against the declared facts; a difference raises `UserError`."""
        train, test = (self._checked(split, self.read(split)) for split in SPLITS)
        return Data(train, test, self.class_names)

    def examples(
        self,
        part: ArraySet | MadeImages,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        augmented: bool = False,
    ) -> Examples:
        """A part of `load` on a device, floats of `dtype`; `augmented` as for training."""
        if isinstance(part, ArraySet) and part.inputs.dtype != torch.uint8:
            return Arrays(part.inputs, part.targets, device, dtype)
        values = self.normaliser() or {"mean": [0.0], "std": [1.0]}
        augmentation = self.augmentation if augmented else Augmentation()
        kind: Any = MadePixels if isinstance(part, MadeImages) else Pixels
        return kind(part, values["mean"], values["std"], augmentation, device, dtype)

    def rows_to_read(self, split: str, found: int, where: str) -> int:
        """The number of `found` rows of a split that are used; refuses a split of another size than declared.

        Without a row limit the split must have exactly its declared size, since costs and comparisons rest on
        it. With one, the split may have any size that has so many rows. `where` says whose rows they are.
        """
        limit = self.train_rows if split == "train" else self.test_rows
        declared = self.train_size if split == "train" else self.test_size
        if limit is None and found != declared:
            raise UserError(
                f"{where} holds {found} {split} {self.things}, but dataset.{split}_size={declared} are declared: "
                f"set dataset.{split}_size={found} to use all, or dataset.{split}_rows for the first ones."
            )
        if limit is not None and limit > found:
            raise UserError(
                f"dataset.{split}_rows={limit} is more than the {found} {split} {self.things} that {where} holds: "
                f"it must be at most {found}."
            )
        return found if limit is None else limit

    def _checked(self, split: str, data: ArraySet) -> ArraySet:
        """The data itself. Raises `UserError` if it is not as the facts say."""
        inputs, count, wanted = data.inputs, len(data.targets), torch.uint8 if self.normaliser() else None
        if list(inputs.shape) != [count, *self.input_shape] or wanted not in (None, inputs.dtype):
            raise UserError(
                f"dataset={self.name} gives {split} {self.things} {inputs.dtype} {list(inputs.shape)}: they must be "
                f"{wanted or 'numbers'} {[count, *self.input_shape]}."
            )
        if self.is_regression:
            return data
        bad = torch.nonzero((data.targets < 0) | (data.targets >= self.classes))
        if len(bad):
            row = int(bad[0])
            raise UserError(
                f"dataset={self.name} has label {int(data.targets[row])} in row {row} (from 0) of its {split} "
                f"split: with dataset.classes={self.classes} it must be 0 to {self.classes - 1}."
            )
        return data


@dataclass(kw_only=True)
class ImageSource(Source):
    """Labelled images of one size."""

    channels: int
    image_size: Any
    """Pixels: the side of square images, or [height, width]."""
    mean: list[float]
    """The mean of each channel, for pixels in [0, 1]; a single value serves all channels."""
    std: list[float]
    augmentation: Augmentation = field(default_factory=Augmentation)

    things: ClassVar[str] = "images"

    def check_facts(self) -> None:
        super().check_facts()
        check_range("dataset.channels", self.channels, low=1)
        side = min(self.sides)
        check_range("dataset.image_size", side, low=1)
        check_range("dataset.augmentation.crop_padding", self.augmentation.crop_padding, high=side - 1)
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise UserError(
                    f"dataset.{key} has {len(values)} values: it must have 1, or one for each of the "
                    f"dataset.channels={self.channels}."
                )
        for value in self.std:
            check_range("dataset.std", value, low=0, low_open=True)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return sides(self.image_size)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.channels, *self.sides)

    @property
    def model_facts(self) -> dict[str, Any]:
        height, width = self.sides
        size = height if height == width else (height, width)
        return super().model_facts | {"channels": self.channels, "image_size": size}

    def probe(self, count: int) -> ArraySet:
        pixels = torch.randint(256, (count, *self.input_shape), dtype=torch.uint8)
        return replace(super().probe(count), inputs=pixels)

    def normaliser(self) -> dict[str, list[float]]:
        return {"mean": list(self.mean), "std": list(self.std)}

    def rows_in_memory(self, *, copies: bool = True) -> int:
        """Random crops read training images from a copy."""
        train = self.effective_train_size * (2 if copies and self.augmentation.crop_padding else 1)
        return train + self.effective_test_size


def sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width, from one side or from both. Raises `UserError` for anything else."""
    given = image_size if isinstance(image_size, list | tuple) else [image_size] * 2
    if len(given) != 2 or any(type(side) is not int for side in given):
        raise UserError(
            f"dataset.image_size={written(image_size)} is no size: it must be the side of square images in pixels, "
            "such as 32, or [height,width]."
        )
    height, width = given
    return height, width  # type: ignore[return-value]
