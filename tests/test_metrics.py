"""Metrics of many clients at once equal those computed for each client on its own, without padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score

from fedspa.metrics.accuracy import Accuracy
from fedspa.metrics.macro_f1 import MacroF1

ACCURACY = Accuracy(name="accuracy")
MACRO_F1 = MacroF1(name="macro_f1")


def test_accuracy_by_hand():
    target = torch.tensor([[0, 1, 2, 2], [1, 1, -1, -1]])
    predicted = torch.tensor([[0, 1, 2, 0], [1, 0, 2, 1]])
    assert ACCURACY(predicted, target, classes=3).tolist() == [75, 50]


def test_macro_f1_by_hand():
    # Class 0: precision 1/2, recall 1; class 1: precision 1, recall 1/2; class 2 does not occur.
    target = torch.tensor([[0, 1, 1, -1]])
    predicted = torch.tensor([[0, 0, 1, 2]])
    assert MACRO_F1(predicted, target, classes=3).item() == pytest.approx(100 * 2 / 3)


@st.composite
def federations(draw):
    classes = draw(st.integers(2, 6))
    label = st.integers(0, classes - 1)
    clients = draw(
        st.lists(st.lists(st.tuples(label, label), min_size=1, max_size=9), min_size=1, max_size=5)
    )
    return classes, clients


@settings(deadline=None)
@given(federations(), st.integers(0, 5))
def test_a_batch_of_clients_scores_as_each_client_alone(federation, padding):
    classes, clients = federation
    longest = max(map(len, clients))
    predicted = torch.full((len(clients), longest), padding % classes)
    target = torch.full((len(clients), longest), -1)
    for k, pairs in enumerate(clients):
        predicted[k, : len(pairs)], target[k, : len(pairs)] = torch.tensor(pairs).T
    inputs = predicted.clone(), target.clone()
    accuracy, macro_f1 = (metric(predicted, target, classes) for metric in (ACCURACY, MACRO_F1))
    assert accuracy.dtype == macro_f1.dtype == torch.float64
    assert accuracy.shape == macro_f1.shape == (len(clients),)
    for k, pairs in enumerate(clients):
        p, t = zip(*pairs, strict=True)
        assert accuracy[k].item() == pytest.approx(100 * accuracy_score(t, p), abs=1e-12)
        assert macro_f1[k].item() == pytest.approx(
            100 * f1_score(t, p, average="macro", zero_division=0), abs=1e-12
        )
    assert torch.equal(predicted, inputs[0]) and torch.equal(target, inputs[1])
