"""Configs for tests, composed as the command line composes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import hypothesis
import pytest
from omegaconf import DictConfig

from fedspa.config.plan import Plan, check
from fedspa.config.schema import register
from fedspa.core.paths import config_dir
from fedspa.kernels import building
from fedspa.studies.jobs import register_studies

THOROUGH = """
api batchnorm cli conv_pool cost_report docs_commands export extending files_page folder gpu_check
foreign_models hub interruption joining kernel_building launchers local_batchnorm malformed
many_clients memory method_presets mlflow_away more_searchers other_data own_objects pairs plugins
ranks ranks_end report_pages resources resume_commands roles search slurm streams sweeps tracking_mlflow
unused
""".split()  # noqa: SIM905 (a list of one name a line is long)
"""Files that `make test` leaves out: whole commands, rare failures, and what stands around a run."""

# The tests run on every core, a process each: one thread a process, in the commands that they start too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test is timed: a machine that is busy fails none.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in THOROUGH:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture
def compose() -> Callable[..., DictConfig]:
    """`compose("mask=rsm", "sparsity=0.2")`: the config of that command line, unchecked."""
    register()
    register_studies()

    def compose(*overrides: str) -> DictConfig:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            return hydra.compose("config", list(overrides))

    return compose


@pytest.fixture
def plan(compose: Callable[..., DictConfig]) -> Callable[..., Plan]:
    """`plan("mask=rsm", "sparsity=0.2")`: the checked plan of that command line."""
    return lambda *overrides: check(compose(*overrides))


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No code in C is built yet; the folder in which it will be kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    building.library.cache_clear()
    yield tmp_path / "fedspa"
    building.library.cache_clear()
