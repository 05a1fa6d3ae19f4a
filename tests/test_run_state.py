"""What a run makes of a checkpoint that is whole, and yet holds nothing that it could go on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import pack, unpack
from kill_points import run_until
from omegaconf import OmegaConf
from test_checkpoint import same
from test_malformed import one_sentence
from test_resume import ONE, TINY, files

from fedspa.checkpoints.archive import write
from fedspa.checkpoints.checkpoint import checkpoint_files
from fedspa.checkpoints.run_state import RunState
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError
from fedspa.core.packed_mask import PackedMask
from fedspa.core.settings import Config
from fedspa.runs.assembly import build
from fedspa.runs.experiment import run


class Curve:
    """In place of a federation."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "points": {},
            "round": 0,
            "weights": torch.zeros(3),
            "mask": PackedMask.pack(torch.ones(9)),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["points"]["first"]
        self.state = state


CONFIG: Any = OmegaConf.to_container(OmegaConf.structured(Config))


def whole(**changed: Any) -> dict[str, Any]:
    """The state of a run with a curve; some of the curve's values are others."""
    return {
        "config": CONFIG,
        "data_hash": "d",
        "partition_hash": "p",
        "continued": None,
        "seconds": 1.0,
        "best": None,
        "round": 3,
        "parts": {"federation": Curve().state | {"points": {"first": 1}} | changed},
    }


def test_a_whole_state_is_taken() -> None:
    part = Curve()
    state = RunState(CONFIG, "d", "p", part)
    state.load(unpack(pack(whole())))
    assert (part.first, state.round) == (1, 3)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (whole() | {"data_hash": ""}, r"on other images or labels \(data hash none there, d here\)"),
        (
            whole() | {"partition_hash": "q"},
            r"hold other rows of the data \(partition hash q there, p here\)",
        ),
        (whole() | {"parts": {}}, r"\(parts.federation is missing there\)"),
        (
            whole(weights=torch.zeros(4)),
            r"parts.federation.weights is torch.float32 \[4\] there, torch.float32 \[3\]",
        ),
        (whole(weights=torch.zeros(3).half()), r"parts.federation.weights is torch.float16 \[3\] there"),
        (
            whole(mask=PackedMask.pack(torch.ones(8))),
            r"parts.federation.mask is a mask of 8 there, a mask of 9 here",
        ),
        (whole(round="3"), r"parts.federation.round is str there, int here"),
        (whole(points={}), r"\(KeyError: 'first'\): the code of the model, .* has changed"),
    ],
)
def test_a_whole_file_of_something_else_is_refused_in_a_sentence(state: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        RunState(CONFIG, "d", "p", Curve()).load(unpack(pack(state)))
    one_sentence(refused.value)


def test_a_whole_run_refuses_and_leaves_what_was_there(plan: Callable[..., Plan], tmp_path: Path) -> None:
    tiny = plan(*TINY, ONE, "checkpoint.every=1")
    run_until(tiny, tmp_path, "merge", 4)
    newest = checkpoint_files(tmp_path / "checkpoints")[0]
    content = newest.read_bytes()
    for change in ({"parts": {}}, {"config": {}}, {"data_hash": "another"}):
        with newest.open("wb") as file:
            write(unpack(content) | change, file)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as refused:
            run(tiny, tmp_path)
        one_sentence(refused.value)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    newest.unlink()
    run(tiny, tmp_path)
    run(replace(tiny), tmp_path / "whole")
    assert files(tmp_path) == files(tmp_path / "whole")


def test_a_federation_is_saved_whole(plan: Callable[..., Plan]) -> None:
    """With everything that a run may keep. What was loaded is what was saved, and goes on alike."""
    rich = plan(
        *(
            *TINY,
            ONE,
            "save.local=true",
            "theory.every=1",
            "dataset.val_fraction=0.3",
            "dataset.train_size=120",
        ),
        *("mask.initial=different", "faults.dropout=0.2", "eval.final_rounds=2"),
    )
    federations = [build(rich) for _ in range(2)]
    rounds = federations[0].loop.rounds()
    for _ in range(2):
        next(rounds)
    federations[1].load_state_dict(unpack(pack(federations[0].state_dict())))
    assert same(*(unpack(pack(federation.state_dict())) for federation in federations))
    records = [next(federation.loop.rounds()) for federation in federations]
    assert replace(records[0], seconds={}) == replace(records[1], seconds={})
    assert same(*(unpack(pack(federation.state_dict())) for federation in federations))
