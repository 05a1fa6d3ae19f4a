"""Whole runs, from a plan to its summary."""

from __future__ import annotations

import pytest

from fedspa.running.experiment import run

SHORT = ("federation.rounds=1", "federation.clients_per_round=2", "logger=none", "hardware.workers=1")


@pytest.mark.parametrize(("method", "has_global"), [("fedavg", True), ("local", False)])
def test_only_a_global_model_is_finetuned(plan, tmp_path, method, has_global):
    summary = run(plan(f"method={method}", "finetune.epochs=1", *SHORT), tmp_path / "run")
    assert (summary["accuracy"]["global"] is not None) is has_global
    assert (summary["accuracy"]["finetuned"] is not None) is has_global
