"""Text as tokens, `dataset=text`: the next token to predict, or the class of a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import datasets
import numpy as np
import torch

from fedspa.core.errors import UserError, check_range
from fedspa.data.sets import ArraySet
from fedspa.data.tables import Part, TableSource

NOTHING = 0
"""The token before the first one of a text, and of a character that no training text has."""


@dataclass(kw_only=True)
class Text(TableSource):
    """Without a label the task is to predict each token from those before it: a text of n tokens makes n - 1 examples
    (fewer with a `stride`). With a label it is to classify the text. An example is `length` tokens; a shorter one is
    filled up on the left.

    The tokens are the characters of the training texts, numbered from 1 in sorted order, or ids in a column of lists.
    """

    text: str = "text"
    """The column of the texts: strings, or lists of ids from 1."""
    length: int = 40
    stride: int = 1
    """Without a label: predict every so manieth token."""
    vocabulary: int = 0
    """Tokens that there are, 0 included; 0: read from the data."""
    things: ClassVar[str] = "texts"

    def check_settings(self) -> None:
        super().check_settings()
        check_range("dataset.length", self.length, low=1)
        check_range("dataset.stride", self.stride, low=1)

    @property
    def is_described(self) -> bool:
        return super().is_described and bool(self.vocabulary and self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def shape_text(self) -> str:
        return f"texts of {self.length} tokens out of {self.vocabulary}"

    @property
    def model_facts(self) -> dict[str, Any]:
        return super().model_facts | {"vocabulary": self.vocabulary, "length": self.length}

    def _with_facts(self) -> Self:
        train = self._part("train")
        train.column("dataset.text", self.text, train.data.column_names, "column of texts")
        if self.label:
            return self._agreed({**self._facts(), "vocabulary": self._known})
        sizes = {f"{split}_size": self._count(self._part(split)) for split in ("train", "test")}
        return self._agreed(
            {"classes": self._known, "vocabulary": self._known, "test_split": self._test_split, **sizes}
        )

    @cached_property
    def _characters(self) -> dict[str, int]:
        """The token of each character."""
        texts = self._part("train").cells(self.text)
        return {
            character: number
            for number, character in enumerate(sorted(set().union(*map(str, texts))), start=1)
        }

    @property
    def _known(self) -> int:
        """Size of the vocabulary, from the training texts."""
        train = self._part("train")
        if not self._of_ids(train):
            return len(self._characters) + 1
        return max(max(tokens, default=0) for tokens in self._tokens(train)) + 1

    def _of_ids(self, part: Part) -> bool:
        return not isinstance(part.data.features[self.text], datasets.Value)

    def _tokens(self, part: Part) -> list[list[int]]:
        """The tokens of each text. Raises `UserError` for one that is missing or holds an id out of range."""
        texts = part.cells(self.text)
        if None in texts:
            raise UserError(f"{part.place(texts.index(None))}: the column {self.text} is empty there.")
        if not self._of_ids(part):
            return [[self._characters.get(character, NOTHING) for character in str(text)] for text in texts]
        for index, ids in enumerate(texts):
            bad = [
                token
                for token in ids
                if type(token) is not int or not 0 <= token < (self.vocabulary or np.inf)
            ]
            if bad:
                top = f" below dataset.vocabulary={self.vocabulary}" if self.vocabulary else ""
                raise UserError(f"{part.place(index)}: the token {bad[0]} is no whole number from 0 on{top}.")
        return texts

    def _labels(self, part: Part) -> np.ndarray:
        return super()._labels(part) if self.label else np.zeros(len(part.rows), dtype=np.int64)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        if self.label:
            return super()._names
        return () if self._of_ids(self._part("train")) else ("", *self._characters)

    def _ends(self, tokens: list[int]) -> range:
        """The number of tokens before each one to predict; to classify the text, the number of all tokens."""
        return range(len(tokens), len(tokens) + 1) if self.label else range(1, len(tokens), self.stride)

    def _count(self, part: Part) -> int:
        return sum(len(self._ends(tokens)) for tokens in self._tokens(part))

    def _examples(self, part: Part, chosen: np.ndarray) -> ArraySet:
        texts, groups = self._tokens(part), self._groups(part)
        ends = [(row, end) for row, tokens in enumerate(texts) for end in self._ends(tokens)]
        inputs = np.full((len(chosen), self.length), NOTHING, dtype=np.int64)
        rows, targets = np.empty(len(chosen), dtype=np.int64), np.empty(len(chosen), dtype=np.int64)
        for index, (row, end) in enumerate(ends[number] for number in chosen):
            before = texts[row][max(end - self.length, 0) : end]
            inputs[index, self.length - len(before) :] = before
            rows[index], targets[index] = row, NOTHING if self.label else texts[row][end]
        if self.label:
            targets = self._numbered(part)[rows]
        groups = None if groups is None else groups[rows]
        return ArraySet(torch.from_numpy(inputs), torch.from_numpy(targets), groups)
