"""What a run remembers from round to round, as one state that is written now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from fedspa.checkpoints.checkpoint import Checkpoints
from fedspa.checkpoints.resuming import refuse_other_settings
from fedspa.core.errors import UserError, brief
from fedspa.core.records import ACCURACY, MAIN_KINDS, VALIDATION, RoundRecord
from fedspa.core.saved import Misfit, Saved


class Part(Protocol):
    """Something that lives from round to round."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """The parts of a run, their state after the last complete round, and its checkpoints.

    What is written is always the state that `completed` saw last: a run that ends in the middle of a round, or
    while its trackers write, leaves the round before.
    """

    def __init__(
        self, config: dict[str, Any], data_hash: str, partition_hash: str, parts: Mapping[str, Part]
    ) -> None:
        """`config`, resolved, and the two hashes tell what run it is; `data_hash` is "" of images made on demand."""
        self._config, self._parts = config, dict(parts)
        self._data_hash, self._partition_hash = data_hash, partition_hash
        self._begin, self._earlier = time.perf_counter(), 0.0
        self._state: dict[str, Any] = {}
        self._best: float | None = None
        self._score: float | None = None
        self._round = self._written = -1

    @property
    def round(self) -> int:
        """Complete rounds that are told of: those of the checkpoint that was loaded, and those since; at first 0."""
        return max(self._round, 0)

    @property
    def seconds(self) -> float:
        """Since the run began, without the time between its processes."""
        return self._earlier + time.perf_counter() - self._begin

    def load(self, state: Any) -> None:
        """Go on from what a checkpoint holds.

        Raises `UserError` for the state of a run with other settings or data, and for what cannot be the state of a
        run like this: in a sentence that names what differs. Nothing has changed then.
        """
        before = {name: part.state_dict() for name, part in self._parts.items()}
        try:
            self._load(Saved(state, "the state"))
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            for name, part in self._parts.items():
                with suppress(Exception):  # of a tracker that is not ours
                    part.load_state_dict(before[name])
            reason = str(error) if isinstance(error, Misfit) else f"{type(error).__name__}: {brief(error)}"
            raise UserError(
                f"The checkpoint is whole, but holds no state that this run can go on from ({reason}): remove it, and "
                "the run goes on from the one before, or begins anew."
            ) from error

    def _load(self, saved: Saved) -> None:
        config, data, rows = (
            saved["config"].plain(),
            saved["data_hash"].text(),
            saved["partition_hash"].text(),
        )
        refuse_other_settings(config, self._config, "The checkpoint")
        if data != self._data_hash:
            raise UserError(
                "The checkpoint is of a run on other images or labels (data hash "
                f"{data or 'none'} there, {self._data_hash or 'none'} here): dataset.path must have the data that the "
                "run began with."
            )
        if rows != self._partition_hash:
            raise UserError(
                f"The checkpoint's clients hold other rows of the data (partition hash {rows} there, "
                f"{self._partition_hash} here), though the settings and the data are the same: another version of "
                "fedspa drew them, so begin a new run in another folder."
            )
        round, seconds = saved["round"].integer(), saved["seconds"].number(0)
        best = saved["best"].number() if saved["best"].optional() else None
        for name, part in self._parts.items():
            part.load_state_dict(saved["parts"][name].mapping())
        self._earlier, self._best, self._round, self._written = seconds, best, round, round

    def completed(self, round: int, record: RoundRecord | None = None) -> None:
        """Take note that so many rounds are complete and told of.

        `record`: of the last round; None before the first round of this process.
        """
        self._round, self._score = round, _selection_score(record) if record else None
        self._state = {
            "config": self._config,
            "data_hash": self._data_hash,
            "partition_hash": self._partition_hash,
            "round": round,
            "seconds": self.seconds,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def due(self, checkpoints: Checkpoints) -> bool:
        """Whether it is time to write the last complete round."""
        return checkpoints.due(self._round, self._state)

    def write(self, checkpoints: Checkpoints) -> None:
        """Write the last complete round, unless that is done."""
        if self._round <= self._written:
            return
        is_best = self._score is not None and (self._best is None or self._score > self._best)
        self._best = self._score if is_best else self._best
        checkpoints.write(self._round, {**self._state, "best": self._best}, best=is_best)
        self._written = self._round


def _selection_score(record: RoundRecord) -> float | None:
    """Mean accuracy in percent on the clients' validation rows, where there are any and this round tested them."""
    scores = next((record.scores[kind] for kind in MAIN_KINDS if kind in record.scores), {})
    spread = scores.get(VALIDATION + ACCURACY)
    return spread.mean if spread else None
