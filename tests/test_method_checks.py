"""A method is looked at: what its class declares before a run, what it asks and answers in one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from federations import small

from fedspa.errors import UserError
from fedspa.methods.base import Method, Visit
from fedspa.methods.checking import check_declaration
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.settings import FaultSettings


@dataclass(kw_only=True)
class Spoilt(FedAvg):
    """FedAvg, whose visits are spoilt at their end."""

    spoil: Callable = lambda visit: visit

    def visit(self, task):
        return self.spoil((yield from super().visit(task)))


ANSWERS = [
    (lambda v: None, "visit() returns None instead of a Visit"),
    (lambda v: v.update, "visit() returns a tensor of shape ["),
    (
        lambda v: replace(v, update=v.update[:1]),
        "Visit.update has shape [1]: as the global weights, it must have [",
    ),
    (lambda v: replace(v, update=v.update[:5]), "Visit.update has shape [5]"),
    (lambda v: replace(v, update=v.update[None]), "Visit.update has shape [1, "),
    (lambda v: replace(v, update=v.update.double()), "Visit.update has dtype float64"),
    (lambda v: replace(v, update=v.update.to("meta")), "Visit.update has device meta"),
    (lambda v: replace(v, update=v.update.tolist()), "Visit.update is list instead of a tensor"),
    (lambda v: replace(v, holds=torch.ones(1)), "Visit.holds has shape [1]"),
    (lambda v: replace(v, local=v.local[:5]), "Visit.local has shape [5]"),
    (lambda v: replace(v, local=None), "Visit.local is None"),
    (lambda v: replace(v, loss=0.5), "Visit.loss is float"),
    (lambda v: replace(v, loss=v.loss[None]), "Visit.loss is a tensor of shape [1]"),
    (lambda v: replace(v, samples=2.5), "Visit.samples is 2.5"),
    (lambda v: replace(v, costs=None), "Visit.costs is None"),
    (lambda v: replace(v, state={}), "a client's state is dict"),
]


@pytest.mark.parametrize("wire", [None, "fp32"])
@pytest.mark.parametrize(("spoil", "told"), ANSWERS)
def test_a_wrong_answer_ends_the_run_in_a_sentence_that_names_the_method(spoil, told, wire):
    run = small(Spoilt(name="spoilt", spoil=spoil), wire=wire)
    with pytest.raises(UserError) as caught:
        run.run()
    assert str(caught.value).startswith("method=spoilt (test_method_checks.Spoilt) ")
    assert told in str(caught.value)
    assert torch.equal(run.weights, run.initial)


def test_a_visit_that_returns_instead_of_yielding_is_refused():
    class Returns(FedAvg):
        def visit(self, task):
            return Visit(update=None, local=None, loss=torch.zeros(()), samples=0, costs=None)

    with pytest.raises(UserError, match=r"method=returns .* visit\(\) gives Visit instead of yielding"):
        small(Returns(name="returns")).run()


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda task: None, "asks for None"),
        (lambda task: task.train(task.weights[:1], 1), r"Train.weights has shape \[1\]"),
        (lambda task: task.train(task.weights, 1, mask=torch.ones(1)), r"Train.mask has shape \[1\]"),
    ],
)
def test_a_wrong_request_is_refused(ask, told):
    class Asks(FedAvg):
        def visit(self, task):
            yield ask(task)

    with pytest.raises(UserError, match=f"method=asks .* {told}"):
        small(Asks(name="asks")).run()


def test_a_wrong_personal_model_is_refused():
    class Broadcast(Ditto):
        def personal(self, weights, state, searcher):
            return weights[:1]

    with pytest.raises(UserError, match=r"method=broadcast .* personal\(\) has shape \[1\]"):
        small(Broadcast(name="broadcast", shared_epochs=1, personal_epochs=1)).run()


def test_a_loss_that_is_not_finite_is_a_visit_that_diverged():
    spoilt = Spoilt(name="spoilt", spoil=lambda v: replace(v, loss=v.loss * math.nan))
    (record, *_) = small(spoilt, faults=FaultSettings(policy="skip")).run()
    assert {event.kind for event in record.events} == {"diverged", "empty_round"}


def declared(**attributes) -> Method:
    parts = {"visit": FedAvg.visit, "visit_costs": FedAvg.visit_costs, **attributes}
    return type("Mine", (Method,), parts)(name="mine", weighting="uniform")


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (declared(), "has no kinds"),
        (declared(kinds="global"), "kinds='global'"),
        (declared(kinds=("global", "own")), "'own'"),
        (declared(kinds=()), "a tuple of some of global, personal, local"),
        (declared(kinds=("personal",)), "no personal()"),
    ],
)
def test_what_a_class_lacks_is_told(method, told):
    with pytest.raises(UserError) as caught:
        check_declaration(method)
    assert "method=mine (" in str(caught.value) and told in str(caught.value)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("", "has no kinds"),
        ("    kinds = ('global', 'personal')\n", "no personal()"),
    ],
)
def test_it_is_told_before_data_and_network(plan, tmp_path, monkeypatch, body, told):
    """The data set's folder is not there: to look for it would be another error."""
    (tmp_path / "half_method.py").write_text(
        "from dataclasses import dataclass\nfrom fedspa.methods.base import Method\n\n"
        f"@dataclass(kw_only=True)\nclass Half(Method):\n    weighting: str = 'uniform'\n{body}\n"
        "    def visit(self, task):\n        yield\n\n    def visit_costs(self, size, searcher):\n        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "half_method", raising=False)
    words = ("method=fedavg", "method._target_=half_method.Half", "trusted_packages=[half_method]")
    with pytest.raises(UserError, match="half_method.Half") as caught:
        plan(*words, "dataset=mnist", f"dataset.path={tmp_path}/nowhere")
    assert told in str(caught.value)


def test_a_class_without_its_methods_is_told_which(plan, tmp_path, monkeypatch):
    (tmp_path / "no_visit.py").write_text(
        "from fedspa.methods.base import Method\n\nclass Half(Method):\n    kinds = ('global',)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("method=fedavg", "method._target_=no_visit.Half", "trusted_packages=[no_visit]")
    with pytest.raises(UserError, match=r"no_visit.Half lacks visit, visit_costs"):
        plan(*words)
