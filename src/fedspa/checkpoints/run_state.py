"""The state of a run after its last complete round, which is written to a checkpoint from time to time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from fedspa.checkpoints.checkpoint import Checkpoints
from fedspa.checkpoints.resuming import refuse_other_settings
from fedspa.config.recorded import settings_today
from fedspa.core.errors import UserError, brief
from fedspa.core.identity import ROUNDS, following_rounds
from fedspa.core.packed_mask import PackedMask
from fedspa.core.records import MAIN_KINDS, VALIDATION, RoundRecord
from fedspa.core.tracker import Continued


class Stateful(Protocol):
    """The functions of `Federation` that a checkpoint uses."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """The state of a federation after its last complete round, and its checkpoints.

    A checkpoint always has the state of the last call of `completed`. So a run that ends in the middle of a round,
    or while its trackers write, leaves the round before.
    """

    def __init__(
        self,
        config: dict[str, Any],
        data_hash: str,
        partition_hash: str,
        federation: Stateful,
        lower_is_better: Sequence[str] = (),
    ) -> None:
        """Args:
        config: the resolved config. With the two hashes it identifies the run.
        data_hash: "" for images that are made on demand.
        lower_is_better: the names of such scores.
        """
        self._lower_is_better = lower_is_better
        self._config, self._federation = config, federation
        self._data_hash, self._partition_hash = data_hash, partition_hash
        self._begin, self._earlier = time.perf_counter(), 0.0
        self._state: dict[str, Any] = {}
        self._best: float | None = None
        self._score: float | None = None
        self._round = self._written = -1
        self.continued: Continued | None = None
        """The finished run that this one continues; None if there is none."""

    @property
    def round(self) -> int:
        """The number of complete and recorded rounds, with those of the loaded checkpoint."""
        return max(self._round, 0)

    @property
    def seconds(self) -> float:
        """The seconds since the run began, without the time between its processes."""
        return self._earlier + time.perf_counter() - self._begin

    def load(self, state: Any, *, continues: str | None = None) -> None:
        """Restore the content of a checkpoint.

        `continues`: the folder of a finished run, if this is a new run that continues it with more rounds.

        Raises `UserError` that names the difference for a run with other settings, data, tensors or code.
        """
        theirs = settings_today(state["config"], self._config["trusted_packages"])
        follows = [] if continues is None else following_rounds(theirs, self._config)
        refuse_other_settings(theirs, self._config, "The checkpoint", follows)
        self._check(state)
        self.continued = state["continued"] and Continued(**state["continued"])
        if continues is not None:
            self.continued = Continued(continues, state["round"], [key for key in follows if key != ROUNDS])
        try:
            self._federation.load_state_dict(state["parts"]["federation"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _unfit(f"{type(error).__name__}: {brief(error)}") from error
        self._earlier, self._best, self._round = state["seconds"], state["best"], state["round"]
        self._written = self._round if continues is None else -1

    def _check(self, state: dict[str, Any]) -> None:
        data, rows = state["data_hash"], state["partition_hash"]
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
        here = {"federation": self._federation.state_dict()}
        if misfit := next(_misfits(state["parts"], here, "parts"), None):
            raise _unfit(misfit)

    def completed(self, round: int, record: RoundRecord | None = None) -> None:
        """Record that so many rounds are complete.

        `record`: the last round; None before the first round of this process.
        """
        self._round, self._score = round, self._selection_score(record) if record else None
        self._state = {
            "config": self._config,
            "data_hash": self._data_hash,
            "partition_hash": self._partition_hash,
            "continued": self.continued and self.continued._asdict(),
            "round": round,
            "seconds": self.seconds,
            "parts": {"federation": self._federation.state_dict()},
        }

    def write(self, checkpoints: Checkpoints) -> None:
        """Write the last complete round, unless it is already written."""
        if self._round <= self._written:
            return
        is_best = self._score is not None and (self._best is None or self._score > self._best)
        self._best = self._score if is_best else self._best
        checkpoints.write(self._round, {**self._state, "best": self._best}, best=is_best)
        self._written = self._round

    def _selection_score(self, record: RoundRecord) -> float | None:
        """The mean of the main metric on the clients' validation rows, negative if lower is better; None without such
        rows or without a test in this round."""
        scores = next((record.scores[kind] for kind in MAIN_KINDS if kind in record.scores), {})
        name, spread = next(
            ((name, s) for name, s in scores.items() if name.startswith(VALIDATION)), ("", None)
        )
        if spread is None:
            return None
        return -spread.mean if name in self._lower_is_better else spread.mean


def _misfits(there: Any, here: Any, where: str) -> Iterator[str]:
    """The differences in kind, shape or presence between the values of a saved state and those of a new run's state."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key, value in here.items():
            if key in there:
                yield from _misfits(there[key], value, f"{where}.{key}")
            else:
                yield f"{where}.{key} is missing there"
    elif there is not None and here is not None and _kind(there) != _kind(here):  # costs, say, may be None
        yield f"{where} is {_kind(there)} there, {_kind(here)} here"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"a mask of {value.length}" if isinstance(value, PackedMask) else type(value).__name__


def _unfit(reason: str) -> UserError:
    return UserError(
        f"The checkpoint is whole, but this run cannot go on from it ({reason}): the code of the model, the method or "
        "fedspa has changed, so begin a new run in another folder."
    )
