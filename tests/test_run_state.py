"""What a run makes of a checkpoint that is whole, and yet holds nothing that it could go on from."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fedspa.checkpoints.run_state import RunState
from fedspa.core.errors import UserError
from fedspa.core.settings import Config


class Curve:
    def state_dict(self) -> dict[str, Any]:
        return {"points": [1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["points"][0]


CONFIG = {field.name: {} for field in fields(Config)} | {
    "save": {"local": False},
    "hardware": {"precision": "32-true"},
}
PARTS = {"curve": {"points": [1]}}
WHOLE = {
    "config": CONFIG,
    "data_hash": "d",
    "partition_hash": "p",
    "seconds": 1.0,
    "best": None,
    "round": 3,
    "parts": PARTS,
}


def test_a_whole_state_is_taken() -> None:
    part = Curve()
    RunState(CONFIG, "d", "p", {"curve": part}).load(WHOLE)
    assert part.first == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        {"data_hash": None},
        {"partition_hash": None},
        {"parts": 5},
        {"parts": {}},
        {"parts": {"curve": {"points": []}}},
        {"seconds": ...},
    ],
)
def test_a_whole_file_of_something_else_is_told_in_a_sentence(nonsense: dict[str, Any]) -> None:
    state = WHOLE | nonsense
    if nonsense.get("seconds") is ...:
        del state["seconds"]
    with pytest.raises(UserError, match=r"checkpoint"):
        RunState(CONFIG, "d", "p", {"curve": Curve()}).load(state)
