"""Runs in a grid: rows (methods, and what was varied of them), data settings, and the runs of each cell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedspa.core import names
from fedspa.core.errors import written
from fedspa.core.records import KINDS
from fedspa.core.roles import Role, role_of
from fedspa.core.tracker import MEAN_OVER
from fedspa.report import labels
from fedspa.report.runs import Found, Run

Key = TypeVar("Key")
Varied = tuple[tuple[str, Any], ...]
"""(setting, value) of the settings that differ."""
Place = tuple[str, str, Varied]
"""The key of a `Setting`: its data set, its partition, and its other settings that differ between runs."""

DATA_SECTIONS = ("dataset", "model", "partition", "federation")
"""Parts of the config that make a data setting; other settings that change results make a row."""
OF_METHODS = ("federation.wire", "dataset.public_fraction")
"""Settings in these sections that belong to a method: FedMD needs public rows, others have none."""


@dataclass(frozen=True)
class Row:
    """A method, with its settings that differ between runs."""

    method: str
    mask: str
    varied: Varied
    """The settings in which this method's runs on the same data differ."""
    name: str = field(compare=False)
    """The method and its mask in print."""

    @property
    def label(self) -> str:
        return _with_values(self.name, self.varied)


@dataclass(frozen=True, eq=False)
class Setting:
    """The data, the clients' shares of it, and the runs on it."""

    dataset: str
    """The data set's name in configs."""
    partition: str
    varied: Varied
    cells: dict[Row, list[Run]]
    """The runs of each row that has any, in the rows' order; one run a seed, by seed."""

    def runs_of(self, row: Row) -> list[Run]:
        return self.cells.get(row, [])

    @property
    def rows(self) -> list[Row]:
        return list(self.cells)

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.cells.values() for run in runs]

    @property
    def kinds(self) -> list[str]:
        """The kinds of model that some run tested."""
        return [kind for kind in KINDS if any(kind in run.kinds for run in self.runs)]

    @property
    def metric(self) -> str:
        """The metric that the runs are about."""
        return self.runs[0].metrics[0]

    @property
    def unit(self) -> str:
        """The unit of the scores with a space before it: percent, or nothing in a regression."""
        return names.unit(self.runs[0].summary)

    @property
    def targets(self) -> list[float]:
        """The targets of the runs' own configs in the main metric, ascending."""
        configs = [run.config.get("eval", {}) for run in self.runs]
        return sorted({float(target) for config in configs for target in config.get("targets", [])})

    @property
    def data(self) -> str:
        """The data set's name in print."""
        return labels.DATASETS.get(self.dataset, self.dataset)

    @property
    def split(self) -> str:
        """The partition, with the other settings of the data that differ between runs."""
        return _with_values(self.partition, self.varied)

    @property
    def label(self) -> str:
        return f"{self.data}, {self.split}"


@dataclass(frozen=True)
class Study:
    """Runs in a grid of rows and settings. A cell without runs is missing, and shown so."""

    name: str
    rows: list[Row]
    settings: list[Setting]
    runs: list[Run]
    left_out: list[tuple[str, str]]

    @property
    def mean_over(self) -> str:
        """The weights of its runs' means over clients, in words."""
        weightings = {run.settings.get("eval.weighting", "clients") for run in self.runs}
        return " or ".join(sorted(MEAN_OVER[weighting] for weighting in weightings))

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})


def make_study(name: str, found: Found) -> Study:
    """Arrange runs by the settings in which they differ.

    Of several runs with the same row, data and seed the last found stays.
    """
    places: dict[Run, Place] = {}
    rows: dict[Run, Row] = {}
    for (dataset, partition), runs in _grouped(found.runs, _data).items():
        several = len({run.metrics[0] for run in runs}) > 1  # scores of two metrics cannot be compared
        for run, values in _differences([runs], of_data=True).items():
            metric = (("metric", run.metrics[0]),) * several
            places[run] = dataset, partition, (*values, *metric)
    for (method, mask), runs in _grouped(found.runs, _method).items():
        for run, values in _differences(_grouped(runs, places.__getitem__).values(), of_data=False).items():
            rows[run] = Row(method, mask, values, _name(run))
    cells: dict[Place, dict[Row, list[Run]]] = {}
    left_out = list(found.left_out)
    for (row, place), runs in _grouped(found.runs, lambda run: (rows[run], places[run])).items():
        by_seed = _grouped(runs, lambda run: run.seed)
        cells.setdefault(place, {})[row] = [same[-1] for _, same in sorted(by_seed.items())]
        for *older, newest in by_seed.values():
            left_out += [(run.name, f"{newest.name} repeats its settings and seed") for run in older]
    ordered = sorted(dict.fromkeys(rows.values()), key=_row_order)
    settings = [
        Setting(*place, {row: here[row] for row in ordered if row in here}) for place, here in cells.items()
    ]
    settings.sort(key=_data_order)
    return Study(name, ordered, settings, [run for setting in settings for run in setting.runs], left_out)


def _grouped(runs: Iterable[Run], key: Callable[[Run], Key]) -> dict[Key, list[Run]]:
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _data(run: Run) -> tuple[str, str]:
    name = run.summary["partition"]
    return run.summary["dataset"], labels.partition(name, run.config.get("partition", {}))


def _method(run: Run) -> tuple[str, str]:
    return run.summary["method"], run.summary["mask"]


def _name(run: Run) -> str:
    method, mask = (
        labels.component(group, {"name": run.summary[group], **(run.config.get(group) or {})})
        for group in ("method", "mask")
    )
    return method if run.summary["mask"] == "none" else f"{method} ({mask})"


def _differences(groups: Collection[list[Run]], of_data: bool) -> dict[Run, Varied]:
    """For each run the settings with several values in any group; of those that always agree, the shortest name.

    (`method.sparsity`, say, follows `sparsity`.)
    """
    runs = [run for group in groups for run in group]
    decisive = {
        name
        for run in runs
        for name in run.settings
        if name != "seed" and role_of(name) in (Role.TRAINS, Role.TESTS) and _is_data(name) is of_data
    }
    several = [
        name
        for name in decisive
        if any(len({run.settings.get(name) for run in group}) > 1 for group in groups)
    ]
    by_values: dict[tuple[Any, ...], str] = {}
    for name in sorted(several, key=lambda name: (len(name), name)):
        by_values.setdefault(tuple(run.settings.get(name) for run in runs), name)
    keys = sorted(by_values.values())
    return {run: tuple((key, run.settings[key]) for key in keys if key in run.settings) for run in runs}


def _is_data(name: str) -> bool:
    return name.partition(".")[0] in DATA_SECTIONS and name not in OF_METHODS


def _with_values(text: str, varied: Varied) -> str:
    """A name with the varied settings as one types them: layer_sparsity=erk sparsity=0.2."""
    return " ".join([text, *(f"{key}={written(value)}" for key, value in varied)])


def _row_order(row: Row) -> Any:
    """FedSpa first, then by name and by the varied values."""
    return row.method != "fedspa", row.name.lower(), [in_order(value) for _, value in row.varied]


def _data_order(setting: Setting) -> Any:
    """Sorts by data set, the paper's first; then, as the paper does, from even partitions to uneven ones."""
    known = list(labels.DATASETS)
    place = known.index(setting.dataset) if setting.dataset in known else len(known)
    amount, _ = in_order(setting.partition.split()[-1])
    return place, setting.data, setting.partition != "IID", -amount, setting.split


def in_order(value: object) -> tuple[float, str]:
    """A key that sorts settings: numbers by value, then texts."""
    try:
        return float(value), ""  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0, str(value)
