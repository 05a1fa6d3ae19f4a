"""The sweepers of `python src/train.py -m ...`. Hydra finds sweepers in the namespace hydra_plugins only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from fedspa.core.components import build
from fedspa.core.errors import UserError
from fedspa.studies.jobs import study
from fedspa.studies.search import Search, Space
from fedspa.studies.sweep import Sweeps


class StudySweeper(Sweeper):
    """Runs the jobs of a study; conf/hydra/sweeper/study.yaml explains its options.

    `sweep` reports a mistake in the options, because Hydra would wrap an error of `__init__` in a text of its own.
    """

    refusal = "belongs to a search: add hydra/sweeper=search"

    def __init__(self, params: dict[str, str], rows: Sequence[dict[str, Any]] = (), **others: Any) -> None:
        self._params, self._rows, self._others = params, rows, others

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        loader = hydra_context.config_loader
        self._parser = OverridesParser.create(config_loader=loader)
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

        def compose(overrides: Sequence[str]) -> DictConfig:
            composed = loader.load_sweep_config(config, list(overrides))
            with open_dict(composed):
                del composed["hydra"]
            return composed

        self._sweeps = Sweeps(Path(config.hydra.sweep.dir), compose, launcher.launch, config.hydra.launcher)

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs of the command line. Ends the program with an exit code if a job failed."""
        if self._others:
            options = " and ".join(f"hydra.sweeper.{name}" for name in self._others)
            raise UserError(f"{options} {self.refusal}.")
        if code := self._run(arguments):
            raise SystemExit(code)

    def _run(self, arguments: list[str]) -> int:
        return self._sweeps.run(study(self._params, self._rows, arguments, self._parser))


class SearchSweeper(StudySweeper):
    """Searches for good settings; conf/hydra/sweeper/search.yaml explains its options."""

    refusal = "has no place in a search: leave out hydra/sweeper=search"

    def __init__(
        self, params: dict[str, str], trials: int, at_once: int, seed: int, kind: str | None, **others: Any
    ) -> None:
        super().__init__(params)
        self._options, self._others = dict(trials=trials, at_once=at_once, seed=seed, kind=kind), others

    def _run(self, arguments: list[str]) -> int:
        search, _ = build("hydra.sweeper", Search, self._options)
        return search.run(Space.of(self._params, arguments, self._parser), self._sweeps)
