"""Rows of features, `dataset=table`: numbers and categories from a table, with a class or numbers to predict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.data.parts import FRACTIONS, Part
from fedspa.data.sets import ArraySet
from fedspa.data.tables import TableSource

TASKS = ("classification", "regression")
MOST_CLASSES = 20
"""A column of whole numbers with more distinct values is a regression's."""


@dataclass(kw_only=True)
class Features(TableSource):
    """Each number of a row is one input, each value of a category one input that is 0 or 1.

    Numbers are standardised by mean and standard deviation of all training rows, and so are the targets of a
    regression.
    """

    inputs: int = 0
    """The number of inputs of a row; 0: read from the data."""
    label: Any = None
    """The column to predict; of a regression also a list of several."""
    task: str | None = limited(None, choices=TASKS)
    """classification or regression; null: a regression where the label holds fractions, or whole numbers of more
    than 20 values."""
    columns: list[str] = field(default_factory=list)
    """The columns to predict from; []: all but `label` and `group_by`."""
    things: ClassVar[str] = "rows"
    FACTS: ClassVar[tuple[str, ...]] = (*TableSource.FACTS, "inputs", "task")

    @property
    def is_regression(self) -> bool:
        return self.task == "regression"

    @property
    def targets(self) -> list[str]:
        """The columns to predict."""
        return self.label if isinstance(self.label, list) else [self.label]

    @property
    def outputs(self) -> int:
        return len(self.targets) if self.is_regression else self.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    @property
    def shape_text(self) -> str:
        return f"rows of {self.inputs} inputs"

    @property
    def model_facts(self) -> dict[str, Any]:
        return super().model_facts | {"features": self.inputs}

    def _describe(self) -> None:
        train = self._split("train_split", self.train_split)
        for name in self.targets:
            train.column("dataset.label", name, train.data.column_names, "column to predict")
        self._set(
            task=self.task or TASKS[all(_measured(train, name) for name in self.targets)],
            columns=self._inputs(train),
        )
        if self.is_regression:
            for name in self.targets:
                train.column("dataset.label", name, train.numeric, "column of numbers")
        elif isinstance(self.label, list):
            raise UserError(
                f"dataset.label=[{','.join(self.label)}] names several classes: a classification has one."
            )
        super()._describe()
        train = self._part("train")
        self._set(inputs=self._encoded(train, train).shape[1])

    def _inputs(self, part: Part) -> list[str]:
        """The columns to predict from. Raises `UserError` for one that is neither numbers nor categories."""
        able = list(dict.fromkeys([*part.numeric, *part.discrete]))
        others = [name for name in part.data.column_names if name not in (*self.targets, self.group_by)]
        for name in self.columns or others:
            part.column("dataset.columns", name, able, "column of numbers or categories")
        return self.columns or others

    def _encoded(self, part: Part, train: Part) -> np.ndarray:
        """The inputs float32 [n, inputs] of rows, by the values that the training rows have.

        Raises `UserError` for a missing value; a category that no training row has is 0 in all its inputs.
        """
        made: list[np.ndarray] = []
        for name in self.columns:
            if name in part.numeric:
                made.append(_standardised(part, train, name)[:, None])
            else:
                known = np.unique(train.values(name).astype(str))
                made.append((part.values(name).astype(str)[:, None] == known[None, :]).astype(np.float32))
        return np.concatenate(made, axis=1)

    def _examples(self, part: Part, chosen: np.ndarray) -> ArraySet:
        train, part = self._part("train"), part.of(part.rows[chosen])
        train = train.of(train.rows[self._chosen("train", len(train.rows))])
        if self.is_regression:
            targets = np.stack([_standardised(part, train, name) for name in self.targets], axis=1)
        else:
            targets = self._labels.numbered(part)
        inputs = self._encoded(part, train)
        return ArraySet(torch.from_numpy(inputs), torch.from_numpy(targets), self._groups(part))

    @property
    def remarks(self) -> list[str]:
        lines = super().remarks
        if self.is_regression:
            train = self._part("train")
            spread = ", ".join(f"{name} {np.std(_numbers(train, name)):.4g}" for name in self.targets)
            lines.append(
                f"Targets are standardised: an error of 1 is a standard deviation of training rows ({spread})"
            )
        return lines


def _measured(part: Part, name: str) -> bool:
    """True if a column looks like measured numbers, not like classes."""
    if name not in part.numeric:
        return False
    return part.data.features[name].dtype.startswith(FRACTIONS) or len(set(part.cells(name))) > MOST_CLASSES


def _numbers(part: Part, name: str) -> np.ndarray:
    """A column as float64 [n]. Raises `UserError` where a value is missing or not finite."""
    numbers = np.array(part.cells(name), dtype=np.float64)
    for index in np.flatnonzero(~np.isfinite(numbers))[:1]:
        raise UserError(
            f"{part.place(index)}: the column {name} has no number there: fill it in, take the row out, or name the "
            "columns to use by dataset.columns."
        )
    return numbers


def _standardised(part: Part, train: Part, name: str) -> np.ndarray:
    """A column of rows as float32 [n], by mean and standard deviation of the training rows; one that is always the
    same stays at 0."""
    known = _numbers(train, name)
    return ((_numbers(part, name) - known.mean()) / (known.std() or 1.0)).astype(np.float32)
