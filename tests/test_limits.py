"""The limits that settings and components declare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Optional

import numpy as np
import pytest

from fedspa.core.errors import UserError, check_range
from fedspa.core.limits import Limited, limited
from fedspa.masks.channels import ChannelDST
from fedspa.masks.dst import DST
from fedspa.masks.granet import GraNet
from fedspa.methods.mapper import MAPPER
from fedspa.methods.subfedavg import SubFedAvg


@dataclass(kw_only=True)
class Base(Limited):
    section: ClassVar[str] = "part"
    rate: float = limited(low=0, high=1)
    word: str = limited("one", choices=("one", "two"))
    shares: list[float] = limited([0.5], low=0)
    least: int | None = limited(None, low=1)
    most: Optional[int] = limited(None, low=1)  # noqa: UP045 (a user may write it so)


@dataclass(kw_only=True)
class Derived(Base):
    rate: float = 0.5
    shares: list[float] = field(default_factory=lambda: [0.1])
    word: str = limited("three", choices=("three",))


def test_valid_values_are_kept():
    part = Base(rate=1, word="two", least=None)
    assert (part.rate, part.word, part.shares, part.least) == (1, "two", [0.5], None)
    assert Base(rate=0).shares is not part.shares
    assert Derived().shares == [0.1]


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"rate": -0.5}, "part.rate=-0.5 is out of range: it must be in [0, 1]."),
        ({"rate": float("nan")}, "part.rate=nan is not a finite number: it must be in [0, 1]."),
        ({"rate": 10**400}, f"part.rate={10**400} is not a finite number: it must be in [0, 1]."),
        ({"rate": [0.1]}, "part.rate=[0.1] is not a number."),
        ({"least": 0}, "part.least=0 is out of range: it must be at least 1."),
        ({"shares": [1, -2]}, "part.shares=-2 is out of range: it must be at least 0."),
    ],
)
@pytest.mark.parametrize("kind", [Base, Derived])
def test_a_value_outside_its_limits_is_refused_with_another_default_too(kind, values, sentence):
    with pytest.raises(UserError) as error:
        kind(**{"rate": 0.5} | values)
    assert str(error.value) == sentence


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_checked_as_those_of_python():
    assert Base(rate=np.float32(0.5)).rate == 0.5
    for value in (np.float32("inf"), np.float16("nan")):
        with pytest.raises(UserError, match="not a finite number"):
            check_range("rate", value, low=0)


def test_a_derived_class_may_declare_other_limits():
    with pytest.raises(UserError, match=r"part\.word=one is not known"):
        Derived(word="one")


@pytest.mark.parametrize(
    "kind, values, sentence",
    [
        (DST, {"alpha0": 2}, "mask.alpha0=2 is out of range: it must be in [0, 1]."),
        (DST, {"alpha0": None}, "mask.alpha0=null is not a number."),
        (DST, {"alpha0": "high"}, "mask.alpha0=high is not a number."),
        (DST, {"regrow": None}, "mask.regrow=null is not known: valid are gradient, random."),
        (DST, {"regrow": "rolling"}, "mask.regrow=rolling is not known: valid are gradient, random."),
        (ChannelDST, {"alpha0": 2}, "mask.alpha0=2 is out of range: it must be in [0, 1]."),
        (GraNet, {"interval": 0}, "mask.interval=0 is out of range: it must be at least 1."),
        (MAPPER, {"shares": [0.5, 0]}, "method.shares=0 is out of range: it must be in (0, 1]."),
        (SubFedAvg, {"prune_rate": 2}, "method.prune_rate=2 is out of range: it must be in [0, 1]."),
    ],
)
def test_a_component_made_in_python_is_checked(kind, values, sentence):
    with pytest.raises(UserError) as error:
        kind(**values)
    assert str(error.value) == sentence
    assert ChannelDST(regrow="rolling").regrow == "rolling"
