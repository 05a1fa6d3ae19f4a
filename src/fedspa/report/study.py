"""A set of runs to compare: rows (methods and their variants), data settings, and the runs of each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedspa.core.records import KINDS
from fedspa.core.roles import Role, role_of
from fedspa.report.runs import Found, Run

METHODS = {
    ("fedspa", "dst"): "FedSpa (DST)",
    ("fedspa", "rsm"): "FedSpa (RSM)",
    ("ditto", "none"): "Ditto",
    ("fedavg", "none"): "FedAvg",
    ("subfedavg", "none"): "Sub-FedAvg",
    ("local", "none"): "Local",
    ("subsampling", "none"): "Subsampling",
}
"""By (method, mask), in the paper's order; any other combination shows its own names."""
DATASETS = {
    "emnist_letters": "EMNIST-L",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "synthetic": "Synthetic",
}
PARTITIONS = {
    "iid": "IID",
    "dirichlet": "Dirichlet {gamma}",
    "dirichlet_balanced": "balanced Dirichlet {gamma}",
    "shards": "{classes_per_client} classes a client",
}
DATA_SECTIONS = ("dataset", "model", "partition", "federation")
"""Parts of the config that make a data setting; what else changes results makes a row."""


@dataclass(frozen=True)
class Row:
    """A method, with what was varied of it."""

    method: str
    mask: str
    varied: tuple[tuple[str, str], ...]
    """(setting, value) of the settings in which this method's runs on the same data differ."""

    @property
    def name(self) -> str:
        """The method and its mask in print."""
        return METHODS.get((self.method, self.mask)) or f"{self.method} ({self.mask})".removesuffix(" (none)")

    @property
    def label(self) -> str:
        return " ".join([self.name, *_assignments(self.varied)])

    @property
    def _order(self) -> tuple[int, str, list[tuple[float, str]]]:
        return (
            _index((self.method, self.mask), METHODS),
            self.method,
            [(_number(value), value) for _, value in self.varied],
        )


@dataclass(frozen=True)
class Setting:
    """The data, and how it is dealt to the clients."""

    dataset: str
    """The data set's name in configs."""
    partition: str
    varied: tuple[tuple[str, str], ...]

    @property
    def data(self) -> str:
        """The data set's name in print."""
        return DATASETS.get(self.dataset, self.dataset)

    @property
    def split(self) -> str:
        """The partition, with what else was varied of the setting."""
        return " ".join([self.partition, *_assignments(self.varied)])

    @property
    def label(self) -> str:
        return f"{self.data}, {self.split}"

    @property
    def _order(self) -> tuple[int, bool, float, str]:
        amount = _number(self.partition.split()[-1])
        return (
            _index(self.dataset, DATASETS),
            self.partition != "IID",
            -amount,
            self.split,
        )  # as the paper: even first


@dataclass(frozen=True)
class Study:
    """Runs in a grid. A cell without runs is missing, and shown so."""

    name: str
    rows: list[Row]
    settings: list[Setting]
    cells: dict[tuple[Row, Setting], list[Run]]
    """One run a seed, by seed."""
    left_out: list[tuple[str, str]]

    def runs(self, row: Row, setting: Setting) -> list[Run]:
        return self.cells.get((row, setting), [])

    def runs_of(self, setting: Setting) -> list[Run]:
        """All runs on that data."""
        return [run for row in self.rows for run in self.runs(row, setting)]

    def rows_of(self, setting: Setting) -> list[Row]:
        """The rows that have a run on that data."""
        return [row for row in self.rows if self.runs(row, setting)]

    def kinds_of(self, setting: Setting) -> list[str]:
        """The kinds of model that some run on that data tested."""
        return [kind for kind in KINDS if any(kind in self.kinds_in(row, setting) for row in self.rows)]

    def kinds_in(self, row: Row, setting: Setting) -> set[str]:
        """The kinds of model that some run of a row on that data tested."""
        return {kind for run in self.runs(row, setting) for kind in run.kinds}

    def main_metric(self, setting: Setting) -> str:
        """The metric that the runs on that data are about."""
        return self.runs_of(setting)[0].metrics[0]

    @property
    def all_runs(self) -> list[Run]:
        return [run for runs in self.cells.values() for run in runs]

    @property
    def mean_over(self) -> str:
        """The weights of the means over clients, in words."""
        return " or ".join(sorted({run.mean_over for run in self.all_runs}))

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.all_runs})


def make_study(name: str, found: Found) -> Study:
    """Arrange runs by what differs between their configs.

    Of several runs with the same row, data and seed the last found stays.
    """
    settings = _settings(found.runs)
    rows = _rows(found.runs, settings)
    by_seed: dict[tuple[Row, Setting], dict[int, Run]] = {}
    left_out = list(found.left_out)
    for run in found.runs:
        cell = by_seed.setdefault((rows[run], settings[run]), {})
        if run.seed in cell:
            left_out.append((cell[run.seed].name, f"{run.name} repeats its settings and seed"))
        cell[run.seed] = run
    return Study(
        name,
        rows=sorted(set(rows.values()), key=lambda row: row._order),
        settings=sorted(set(settings.values()), key=lambda setting: setting._order),
        cells={place: [cell[seed] for seed in sorted(cell)] for place, cell in by_seed.items()},
        left_out=left_out,
    )


def varied_settings(runs: list[Run]) -> dict[str, list[str]]:
    """The settings that differ between the runs, with their values.

    It leaves out options that only some runs have, and settings that do not change results.
    """
    shared = set.intersection(*(set(run.settings) for run in runs))
    shared = {key for key in shared if role_of(key) is not Role.NEITHER}
    values = {key: {run.settings[key] for run in runs} for key in sorted(shared)}
    return {
        key: sorted(several, key=lambda v: (_number(v), v))
        for key, several in values.items()
        if len(several) > 1
    }


def _settings(runs: list[Run]) -> dict[Run, Setting]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.summary["dataset"], _partition(run)), []).append(run)
    found = {}
    for (dataset, partition), group in groups.items():
        keys = _varied([group], _of_data)
        for run in group:
            found[run] = Setting(dataset, partition, _values(run, keys))
    return found


def _rows(runs: list[Run], settings: dict[Run, Setting]) -> dict[Run, Row]:
    methods: dict[tuple[str, str], dict[Setting, list[Run]]] = {}
    for run in runs:
        places = methods.setdefault((run.summary["method"], run.summary["mask"]), {})
        places.setdefault(settings[run], []).append(run)
    found = {}
    for (method, mask), places in methods.items():
        keys = _varied(places.values(), lambda key: not _of_data(key))
        for run in (run for group in places.values() for run in group):
            found[run] = Row(method, mask, _values(run, keys))
    return found


def _varied(groups: Iterable[list[Run]], belongs: Callable[[str], bool]) -> list[str]:
    """The settings with several values in any of the groups; of those that always agree, the shortest name.

    (`method.sparsity`, say, follows `sparsity`.)
    """
    groups = list(groups)
    names = {key for group in groups for run in group for key in run.settings}
    deciding = [key for key in names if belongs(key) and key != "seed" and _changes_results(key)]
    varied = [
        key for key in deciding if any(len({run.settings.get(key) for run in group}) > 1 for group in groups)
    ]
    by_values: dict[tuple[str | None, ...], str] = {}
    for key in sorted(varied, key=lambda key: (len(key), key)):
        by_values.setdefault(tuple(run.settings.get(key) for group in groups for run in group), key)
    return sorted(by_values.values())


def _values(run: Run, keys: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple((key, run.settings[key]) for key in keys if key in run.settings)


def _assignments(varied: tuple[tuple[str, str], ...]) -> list[str]:
    """The settings as typed on the command line: layer_sparsity=erk, sparsity=0.2."""
    return [f"{key.removesuffix('.name')}={value}" for key, value in varied]


def _partition(run: Run) -> str:
    name = run.summary["partition"]
    options = {
        key.removeprefix("partition."): value
        for key, value in run.settings.items()
        if _in(key, ["partition"])
    }
    try:
        return PARTITIONS.get(name, name).format(**options)
    except KeyError:
        return name


def _changes_results(key: str) -> bool:
    return role_of(key) in (Role.TRAINS, Role.TESTS)


def _of_data(key: str) -> bool:
    return _in(key, DATA_SECTIONS) and key != "federation.wire"  # how clients are served, not who they are


def _in(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _index(item: object, known: Iterable[object]) -> int:
    """Its place among the known ones; after them all if it is not known."""
    order = list(known)
    return order.index(item) if item in order else len(order)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
