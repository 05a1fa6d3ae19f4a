"""Whole checkpoints that somebody made by hand: one sentence names what differs, and nothing is half taken up."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kill_points import run_until
from test_malformed import one_sentence
from test_resume import ONE, TINY, files

from fedspa.checkpoints.archive import pack, unpack, write
from fedspa.checkpoints.checkpoint import checkpoint_files
from fedspa.checkpoints.run_state import RunState
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.runs.assembly import Federation, build
from fedspa.runs.experiment import describe, run
from fedspa.tracking.console import ConsoleView
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.mlflow_store import MLflowTracker
from fedspa.tracking.pictures import Pictures
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.summary import History
from fedspa.tracking.tensorboard import TensorBoard

RICH = (
    *(*TINY, ONE, "save.local=true", "theory.every=1", "dataset.val_fraction=0.3", "dataset.train_size=120"),
    *("mask.initial=different", "faults.dropout=0.2", "eval.final_rounds=2"),
)


class Run:
    """The parts of a run that are saved, after two rounds."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.federation = plan, build(plan)
        eval_settings, info = plan.settings.eval, describe(plan, self.federation, folder)
        self.history = History(eval_settings.targets, eval_settings.final_rounds, info.metrics)
        self.mlflow = MLflowTracker()
        files = {"run_folder": RunFolder(), "tensorboard": TensorBoard(), "pictures": Pictures()}
        self.trackers = Trackers({**files, "console_view": ConsoleView(), "mlflow": self.mlflow})
        parts = {"federation": self.federation, "history": self.history, "trackers": self.trackers}
        self.state = RunState(plan.resolved, info.data_hash, info.partition_hash, parts)
        rounds = self.federation.loop.rounds()
        for _ in range(2):
            record = next(rounds)
            self.history.add(record)
        self.state.completed(2, record)
        self.saved: dict[str, Any] = {**self.state._state, "best": 41.5}
        trackers = self.saved["parts"]["trackers"]
        trackers["run_folder"] = {"bytes": {"rounds.csv": 900, "timing.csv": 90, "events.csv": 30}}
        trackers["pictures"] = {"curves": {"personal": [[1, 50.0, 2.5]]}}
        trackers["tensorboard"] = {"bytes": {"events.out.tfevents.1": 900}}
        trackers["console_view"] = {"accuracy": {"personal": 50.0}, "mentioned": ["dropout"]}
        trackers["mlflow"] = {
            "run_id": "a1",
            "tracking_uri": "sqlite:///m.db",
            "points": [["loss", 0.5, 1, 7]],
        }

    def held(self) -> bytes:
        """All that the parts hold, as bytes."""
        parts = (self.federation, self.history)
        return pack([part.state_dict() for part in parts])


@pytest.fixture(scope="module")
def rich() -> Iterator[Callable[[Callable[..., Plan], Path], Run]]:
    made: list[Run] = []

    def rich(plan: Callable[..., Plan], folder: Path) -> Run:
        if not made:
            made.append(Run(plan(*RICH), folder))
        return made[0]

    yield rich


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every node of a state but those of the config."""
    if path == ("config",):
        return
    if path:
        yield path
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*path, key))


def wounded(value: Any, rng: random.Random) -> Any:
    """Something else in place of a value, often of a kind with it."""
    others = [None, "text", -1, 10**9, 0.5, float("nan"), [], {}, {"a": 1}, torch.zeros(3), [1, 2], True]
    if isinstance(value, torch.Tensor):
        others = [
            value[:-1],
            value.double(),
            value.half(),
            value[None],
            value * float("nan"),
            value.numpy(),
            None,
        ]
    if isinstance(value, np.ndarray):
        others = [
            value[:-1],
            value.astype("f4"),
            value * float("nan"),
            value + float("inf"),
            value.tolist(),
            1,
        ]
    if isinstance(value, PackedMask):
        ones = torch.ones(value.length)
        longer, overfull = torch.ones(value.length + 8), torch.full_like(value.bits, 255)
        others = [
            PackedMask.pack(ones[1:]),
            PackedMask.pack(longer),
            PackedMask(overfull, value.length),
            ones,
            None,
        ]
    if isinstance(value, int | float) and not isinstance(value, bool):
        others += [-value - 1, value + 10**12, str(value), float("inf"), [value]]
    if isinstance(value, dict | list) and len(value):
        less = copy.copy(value)
        del less[next(iter(value)) if isinstance(value, dict) else 0]
        others += [less]
    if isinstance(value, dict):
        others += [{f"{key}x": item for key, item in value.items()}, {-3: 1}, {10**6: 1} | value]
    if isinstance(value, list):
        others += [value * 3]
    return rng.choice(others)


@pytest.mark.parametrize("seed", range(150))
def test_a_changed_state_is_refused_in_a_sentence_or_can_be_gone_on_from(
    rich: Any, plan: Callable[..., Plan], tmp_path: Path, seed: int
) -> None:
    whole: Run = rich(plan, tmp_path)
    rng = random.Random(seed)
    state = unpack(pack(whole.saved))
    # First how deep, then where: else nearly all wounds would be in the longest list.
    by_depth: dict[int, list[tuple[Any, ...]]] = {}
    for path in places(state):
        by_depth.setdefault(len(path), []).append(path)
    *way, last = rng.choice(by_depth[rng.choice(list(by_depth))])
    node = state
    for key in way:
        node = node[key]
    if isinstance(node, dict) and rng.random() < 0.15:
        del node[last]
    else:
        node[last] = wounded(node[last], rng)
    before = whole.held()
    try:
        whole.state.load(state)
    except UserError as error:
        one_sentence(error)
        assert whole.held() == before
        return
    if whole.state.round == whole.federation.loop.state.round:
        for record in whole.federation.loop.rounds():  # it is odd, but a state: nothing falls over it
            whole.history.add(record)
    pack([whole.federation.state_dict(), whole.mlflow.state_dict()])
    whole.state.load(unpack(pack(whole.saved)))


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        (
            "loop.weights",
            torch.zeros(3),
            r"loop.weights must be a tensor of torch.float32 \[\d+\], not Tensor of",
        ),
        ("loop.clients", {99: {}}, "must be the clients of loop.visits"),
        ("loop.visits", {99: 1}, "a key of loop.visits must be a whole number from 0 to 4, not 99"),
        ("loop.round", 9, "must be a whole number from 0 to 4, not 9"),
        (
            "loop.first",
            {"mask": PackedMask.pack(torch.ones(8))},
            r"must be a mask of \d+ parameters, not a mask of 8",
        ),
        ("curves.moments", {0: {"weights": torch.zeros(2)}}, "curves.moments.0 has no visits"),
        ("history.final", [{}] * 99, "must be a list of at most 2 items, not one of 99"),
        (
            "pictures.curves",
            {"personal": [[1, 50.0]]},
            r"pictures.curves.personal\[0\] must be a list of 3 items",
        ),
        (
            "pictures.curves",
            {"best": []},
            "a key of pictures.curves must be one of finetuned, global, local,",
        ),
        (
            "tensorboard.bytes",
            {"events": -1},
            "tensorboard.bytes.events must be a whole number from 0, not -1",
        ),
        ("run_folder.bytes", {"rounds.csv": 1}, "must have the keys events.csv, rounds.csv, timing.csv"),
    ],
)
def test_the_sentence_names_what_differs(
    rich: Any, plan: Callable[..., Plan], tmp_path: Path, where: str, value: Any, sentence: str
) -> None:
    whole: Run = rich(plan, tmp_path)
    state = unpack(pack(whole.saved))
    part, last = where.split(".")
    parts = state["parts"] | state["parts"]["federation"] | state["parts"]["trackers"]
    parts[part][last] = value
    with pytest.raises(UserError, match=rf"The checkpoint is whole, but .*{sentence}"):
        whole.state.load(state)


def test_a_whole_run_refuses_and_leaves_what_was_there(plan: Callable[..., Plan], tmp_path: Path) -> None:
    tiny = plan(*TINY, ONE, "checkpoint.every=1")
    run_until(tiny, tmp_path, "merge", 4)
    newest = checkpoint_files(tmp_path / "checkpoints")[0]
    whole = newest.read_bytes()
    for change in ({"round": 99}, {"round": 2}, {"parts": []}, {"config": 3}):
        with newest.open("wb") as file:
            write(unpack(whole) | change, file)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as refused:
            run(tiny, tmp_path)
        one_sentence(refused.value)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    newest.unlink()
    run(tiny, tmp_path)
    run(replace(tiny), tmp_path / "whole")
    assert files(tmp_path) == files(tmp_path / "whole")


def test_federations_are_saved_whole(rich: Any, plan: Callable[..., Plan], tmp_path: Path) -> None:
    """What was saved is what is held after loading, and goes on alike."""
    whole: Run = rich(plan, tmp_path)
    other: Federation = build(whole.plan)
    other.load_state_dict(unpack(pack(whole.saved))["parts"]["federation"])
    whole.state.load(unpack(pack(whole.saved)))
    assert pack(other.state_dict()) == pack(whole.federation.state_dict())
