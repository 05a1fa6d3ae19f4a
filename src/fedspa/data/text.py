"""Text as tokens, `dataset=text`: the next token to predict, or the class of a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import datasets
import numpy as np
import torch

from fedspa.core.errors import UserError
from fedspa.core.limits import limited
from fedspa.data.parts import Part
from fedspa.data.sets import ArraySet
from fedspa.data.tables import TableSource

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
    length: int = limited(40, low=1)
    stride: int = limited(1, low=1)
    """Without a label: the distance between two tokens to predict; 1: every token is one."""
    vocabulary: int = 0
    """Tokens that there are, 0 included; 0: read from the data."""
    things: ClassVar[str] = "texts"
    FACTS: ClassVar[tuple[str, ...]] = (*TableSource.FACTS, "vocabulary")

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

    def _describe(self) -> None:
        train = self._part("train")
        train.column("dataset.text", self.text, train.data.column_names, "column of texts")
        if self._of_ids(train):
            vocabulary = 1 + max(tokens.max(initial=NOTHING) for tokens in self._tokens(train))
        else:
            vocabulary = 1 + len(self._characters)
        self._set(vocabulary=int(vocabulary), **({} if self.label else {"classes": int(vocabulary)}))
        super()._describe()

    @property
    def _is_labelled(self) -> bool:
        return bool(self.label)

    @property
    def class_names(self) -> tuple[str, ...]:
        if self.label or self._of_ids(self._part("train")):
            return super().class_names
        return ("", *self._characters)

    @cached_property
    def _characters(self) -> dict[str, int]:
        """The token of each character."""
        texts = self._part("train").cells(self.text)
        return {
            character: number
            for number, character in enumerate(sorted(set().union(*map(str, texts))), start=1)
        }

    def _of_ids(self, part: Part) -> bool:
        return not isinstance(part.data.features[self.text], datasets.Value)

    def _tokens(self, part: Part) -> list[np.ndarray]:
        """The tokens int64 [n] of each text. Raises `UserError` for a missing text, and for an id out of range."""
        texts, of_ids = part.cells(self.text), self._of_ids(part)
        if None in texts:
            raise UserError(f"{part.place(texts.index(None))}: the column {self.text} is empty there.")
        tokens = []
        for index, text in enumerate(texts):
            ids = text if of_ids else [self._characters.get(character, NOTHING) for character in str(text)]
            for token in ids:
                if type(token) is not int or not 0 <= token < (self.vocabulary or np.inf):
                    top = f" below dataset.vocabulary={self.vocabulary}" if self.vocabulary else ""
                    raise UserError(
                        f"{part.place(index)}: the token {token} is no whole number from 0 on{top}."
                    )
            tokens.append(np.array(ids, dtype=np.int64))
        return tokens

    def _ends(self, tokens: np.ndarray) -> range:
        """The numbers of tokens before each one to predict; to classify the text, the number of all."""
        return range(len(tokens), len(tokens) + 1) if self.label else range(1, len(tokens), self.stride)

    def _count(self, part: Part) -> int:
        return sum(len(self._ends(tokens)) for tokens in self._tokens(part))

    def _examples(self, part: Part, chosen: np.ndarray) -> ArraySet:
        texts, groups = self._tokens(part), self._groups(part)
        ends = np.array([(row, end) for row, tokens in enumerate(texts) for end in self._ends(tokens)])
        rows, before = ends[chosen].T
        # All texts in one row, each behind `length` blanks: an example begins where its text does, `before` tokens on.
        blanks = np.full(self.length, NOTHING)
        line = np.concatenate([*(piece for tokens in texts for piece in (blanks, tokens)), blanks])
        starts = np.cumsum([0, *(self.length + len(tokens) for tokens in texts)])[rows] + before
        inputs = np.lib.stride_tricks.sliding_window_view(line, self.length)[starts]
        targets = self._labels.numbered(part)[rows] if self.label else line[starts + self.length]
        groups = None if groups is None else groups[rows]
        return ArraySet(torch.from_numpy(inputs), torch.from_numpy(targets), groups)
