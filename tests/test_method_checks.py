"""A method is looked at: what its class declares before a run, what it asks and answers in one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from federations import pack, small

from fedspa.core.client import Proximal
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.server import ServerState
from fedspa.core.settings import FaultSettings
from fedspa.methods.base import Method
from fedspa.methods.checking import check_declaration
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.training.eager import EagerEngine


@dataclass(kw_only=True)
class Spoilt(FedAvg):
    """FedAvg, whose updates are spoilt at their end."""

    spoil: Callable = lambda update: update

    def client_update(self, client, server):
        return self.spoil(super().client_update(client, server))


class Writing(Ditto):
    """Ditto with a tensor on the server. A function of the method writes into one tensor that it gets."""

    where, what = "", ""

    def _write(self, where, **given):
        if where == self.where:
            eval(self.what, given).mul_(2)

    def client_init(self, client, initial):
        self._write("client_init", initial=initial)
        return ClientState(weights=initial.weights.clone())

    def client_start(self, client, server):
        self._write("client_start", client=client, server=server)
        return super().client_start(client, server)

    def client_update(self, client, server):
        self._write("client_update", client=client, server=server)
        return super().client_update(client, server)

    def server_init(self, initial):
        weights, sent, kept = (initial.weights.clone() for _ in range(3))
        return ServerState(weights, {"sent": sent}, {"kept": kept})

    def server_update(self, server, aggregate):
        self._write("server_update", server=server)
        return replace(server, weights=server.weights - aggregate.update)

    def message(self, server, client, peers):
        self._write("message", server=server)
        return server

    def personal(self, weights, state):
        self._write("personal", weights=weights, state=state)
        return super().personal(weights, state)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("client_init", "initial.weights"),
        ("client_start", "client.weights"),
        ("client_update", "client.weights"),
        ("client_update", "client.initial"),
        ("client_update", "client.state['weights']"),
        ("client_update", "server['sent']"),
        ("message", "server.weights"),
        ("server_update", "server.tensors['sent']"),
        ("server_update", "server.kept['kept']"),
        ("personal", "weights"),
        ("personal", "state['weights']"),
    ],
)
def test_a_method_must_not_write_into_its_input(where, what):
    method = Writing(name="writing", personal_epochs=1, shared_epochs=1)
    method.where, method.what = where, what
    with pytest.raises(UserError) as caught:
        small(method).run()
    told = f"method=writing (test_method_checks.Writing) wrote into {what}, which is read only"
    assert str(caught.value).startswith(told)


ANSWERS = [
    (lambda v: None, "client_update() returns None instead of a ClientUpdate"),
    (lambda v: v.update, "client_update() returns a tensor of shape ["),
    (
        lambda v: replace(v, update=v.update[:1]),
        "ClientUpdate.update has shape [1]: it must have [",
    ),
    (lambda v: replace(v, update=v.update[:5]), "ClientUpdate.update has shape [5]"),
    (lambda v: replace(v, update=v.update[None]), "ClientUpdate.update has shape [1, "),
    (lambda v: replace(v, update=v.update.double()), "ClientUpdate.update has dtype float64"),
    (lambda v: replace(v, update=v.update.to("meta")), "ClientUpdate.update has device meta"),
    (lambda v: replace(v, update=v.update.tolist()), "ClientUpdate.update is list instead of a tensor"),
    (lambda v: replace(v, mask=torch.ones(1)), "ClientUpdate.mask has shape [1]"),
    (lambda v: replace(v, local=v.local[:5]), "ClientUpdate.local has shape [5]"),
    (lambda v: replace(v, local=None), "ClientUpdate.local is None"),
    (lambda v: replace(v, tensors={"own": 1.0}), "ClientUpdate.tensors is no mapping of names to tensors"),
    (lambda v: replace(v, tensors=[v.update]), "ClientUpdate.tensors is no mapping of names to tensors"),
    (lambda v: replace(v, state=ClientState(mask=pack([1, 0, 1]))), "has 3 coordinates instead of "),
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


WRONG = torch.ones(1)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda client: client.train(client.weights[:1]), r"client.train\(weights=\) has shape \[1\]"),
        (lambda client: client.train(client.weights, mask=WRONG), r"client.train\(mask=\) has shape \[1\]"),
        (
            lambda client: client.train(client.weights, proximal=Proximal(WRONG, 1.0)),
            r"client.train\(anchor=\) has shape \[1\]",
        ),
        (
            lambda client: client.train(client.weights, correction=client.weights.double()),
            r"client.train\(correction=\) has dtype float64",
        ),
        (lambda client: client.gradient(WRONG, "own"), r"client.gradient\(weights=\) has shape \[1\]"),
        (lambda client: client.accuracy(WRONG), r"client.accuracy\(weights=\) has shape \[1\]"),
        (lambda client: client.accuracy(client.weights, WRONG), r"client.accuracy\(mask=\) has shape \[1\]"),
    ],
)
def test_a_wrong_argument_is_refused(ask, told):
    class Asks(FedAvg):
        def client_update(self, client, server):
            ask(client)

    with pytest.raises(UserError, match=f"method=asks .* {told}"):
        small(Asks(name="asks")).run()


def test_a_wrong_personal_model_is_refused():
    class Broadcast(Ditto):
        def personal(self, weights, state):
            return weights[:1]

    with pytest.raises(UserError, match=r"method=broadcast .* personal\(\) has shape \[1\]"):
        small(Broadcast(name="broadcast", shared_epochs=1, personal_epochs=1)).run()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: replace(v, local=v.local * math.nan),
        lambda v: replace(v, tensors={"own": torch.tensor([math.inf])}),
        lambda v: replace(v, state=ClientState(own=torch.tensor([math.nan]))),
    ],
    ids=["local", "tensors", "state"],
)
def test_whatever_is_not_finite_is_an_update_that_diverged(spoil):
    run = small(Spoilt(name="spoilt", spoil=spoil), faults=FaultSettings(policy="skip"))
    (record, *_) = run.run()
    assert {event.kind for event in record.events} == {"diverged", "empty_round"}
    assert torch.equal(run.weights, run.initial) and not run.loop.state.clients


def test_a_loss_that_is_not_finite_is_an_update_that_diverged(monkeypatch):
    """Though its weights are."""
    train = EagerEngine.train

    def spoilt(self, task):
        trained = train(self, task)
        return replace(trained, loss=trained.loss * math.nan)

    monkeypatch.setattr(EagerEngine, "train", spoilt)
    (record, *_) = small(FedAvg(name="fedavg"), faults=FaultSettings(policy="skip")).run()
    assert {event.kind for event in record.events} == {"diverged", "empty_round"}


def doubled_lengths(server):
    return {name: torch.cat([tensor, tensor]) for name, tensor in server.tensors.items()}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda server: None, r"server_update\(\) returns None instead of a ServerState"),
        (lambda server: server.weights, r"server_update\(\) returns a tensor of shape \["),
        (lambda server: replace(server, weights=server.weights[:5]), r"ServerState.weights has shape \[5\]"),
        (lambda server: replace(server, tensors={}), r"ServerState.tensors holds \[\] instead of \['own'\]"),
        (
            lambda server: replace(server, tensors=doubled_lengths(server)),
            r"ServerState.tensors\['own'\] has shape \[4\]: it must have \[2\]",
        ),
    ],
)
def test_a_wrong_answer_of_the_server_is_refused(answer, told):
    class Serves(FedAvg):
        def server_init(self, initial):
            return ServerState(initial.weights, {"own": torch.zeros(2)})

        def server_update(self, server, aggregate):
            return answer(server)

    with pytest.raises(UserError, match=f"method=serves .* {told}"):
        small(Serves(name="serves")).run()


def declared(**attributes) -> Method:
    parts = {"client_update": FedAvg.client_update, **attributes}
    return type("Mine", (Method,), parts)(name="mine", weighting="uniform")


@pytest.mark.parametrize(
    ("method", "told"),
    [
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


def test_kinds_follow_from_what_a_class_has():
    assert declared().kinds == ("global", "local")
    assert declared(personal=FedSpa.personal).kinds == ("global", "personal", "local")
    assert declared(sends=False).kinds == declared(sends_weights=False).kinds == ("local",)


def test_it_is_told_before_data_and_network(plan, tmp_path, monkeypatch):
    """The data set's folder is not there: to look for it would be another error."""
    (tmp_path / "half_method.py").write_text(
        "from dataclasses import dataclass\nfrom fedspa.methods.base import Method\n\n"
        "@dataclass(kw_only=True)\nclass Half(Method):\n    kinds = ('global', 'personal')\n\n"
        "    def client_update(self, client, server):\n        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "half_method", raising=False)
    words = ("method=fedavg", "method._target_=half_method.Half", "trusted_packages=[half_method]")
    with pytest.raises(UserError, match="half_method.Half") as caught:
        plan(*words, "dataset=mnist", f"dataset.path={tmp_path}/nowhere")
    assert "no personal()" in str(caught.value)


def test_a_class_without_its_methods_is_told_which(plan, tmp_path, monkeypatch):
    (tmp_path / "no_update.py").write_text(
        "from fedspa.methods.base import Method\n\nclass Half(Method):\n    sends = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("method=fedavg", "method._target_=no_update.Half", "trusted_packages=[no_update]")
    with pytest.raises(UserError, match=r"no_update.Half lacks client_update"):
        plan(*words)


@pytest.mark.parametrize("setting", ["save.local=true", "theory.every=1"])
def test_settings_that_need_local_models_refuse_a_method_without_them(plan, tmp_path, monkeypatch, setting):
    (tmp_path / "no_local.py").write_text(
        "from fedspa.methods.fedspa import FedSpa\n\nclass NoLocal(FedSpa):\n    kinds = ('global', 'personal')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("method=fedspa", "method._target_=no_local.NoLocal", "trusted_packages=[no_local]")
    plan(*words)
    with pytest.raises(UserError, match=setting):
        plan(*words, setting)
