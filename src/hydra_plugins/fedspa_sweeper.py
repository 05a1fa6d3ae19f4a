"""The sweepers of `python src/train.py -m ...`. Hydra finds sweepers in the namespace hydra_plugins only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from fedspa.config.plan import check
from fedspa.core.errors import UserError
from fedspa.studies.search import Search, Space
from fedspa.studies.studies import study
from fedspa.studies.sweep import run_sweep


class StudySweeper(Sweeper):
    """Hands what Hydra knows to `fedspa.studies.sweep`; conf/hydra/sweeper/study.yaml explains its options."""

    def __init__(self, params: dict[str, str], rows: list[dict[str, Any]], **others: Any) -> None:
        # A mistake in them is told by `sweep`: what is raised here Hydra would wrap in words of its own.
        self._params, self._rows, self._others = params, rows, others

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._config = hydra_context.config_loader, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run what the command line asks for; ends the program with an exit code where a job failed."""
        if self._others:
            raise UserError(f"{_listed(self._others)} belongs to a search: add hydra/sweeper=search.")
        parser = OverridesParser.create(config_loader=self._loader)
        code = run_sweep(
            study(self._params, self._rows, arguments, parser),
            root=Path(self._config.hydra.sweep.dir),
            compose=self._compose,
            launch=self._launcher.launch,
            launcher=self._config.hydra.launcher,
        )
        if code:
            raise SystemExit(code)

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        config = self._loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            del config["hydra"]
        return config


class SearchSweeper(StudySweeper):
    """Hands what Hydra knows to `fedspa.studies.search`; conf/hydra/sweeper/search.yaml explains its options."""

    def __init__(
        self, params: dict[str, str], trials: int, at_once: int, seed: int, kind: str | None, **others: Any
    ) -> None:
        super().__init__(params, [])
        self._options, self._others = (trials, at_once, seed, kind), others

    def sweep(self, arguments: list[str]) -> None:
        """Search; ends the program with an exit code where a trial failed."""
        if self._others:
            raise UserError(
                f"{_listed(self._others)} has no place in a search: leave out hydra/sweeper=search."
            )
        search = Search(*self._options)
        root, launcher = Path(self._config.hydra.sweep.dir), self._config.hydra.launcher
        space = Space.of(self._params, arguments, OverridesParser.create(config_loader=self._loader))
        code = search.run(
            space,
            root,
            lambda overrides: check(self._compose(overrides)),
            lambda study, parent: run_sweep(
                study, root, self._compose, self._launcher.launch, launcher, parent
            ),
        )
        if code:
            raise SystemExit(code)


def _listed(options: Mapping[str, Any]) -> str:
    return " and ".join(f"hydra.sweeper.{name}" for name in options)
