"""The jobs of a study: those of a file of sweeps/, or of a command line with -m.

A study varies some settings: its axes (`params`), in every combination, and its `rows`, each a few settings that
belong together. The command line wins: it replaces an axis, or all the rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import product
from math import ceil
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from omegaconf import OmegaConf

from fedspa.core.errors import UserError, brief
from fedspa.core.file_names import file_name
from fedspa.core.paths import config_dir
from fedspa.core.roles import SINGLE, Role, role_of

LONGEST_STUDY = 80
"""The longest name of a study in bytes. A longer one is cut, and ends with a hash."""


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    settings: tuple[str, ...]
    """The sorted settings in which it differs from the study's other jobs: mask=dst, seed=0."""
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return file_name(self.settings or [SINGLE])

    @property
    def title(self) -> str:
        """A name for MLflow's narrow column: dst s0.95 seed0. A number has its setting before it."""
        words = []
        last_words = [text.partition("=")[0].rpartition(".")[2] for text in self.settings]
        for text in sorted(self.settings, key=lambda text: text.startswith("seed=")):  # the seed comes last
            key, _, value = text.partition("=")
            alone = value[:1].isalpha() and value.lower() not in ("true", "false", "none", "null")
            last = key.rpartition(".")[2]
            name = key if last_words.count(last) > 1 else last  # training.lr beside server_optimizer.lr
            setting = "" if alone else "s" if key == "sparsity" else name
            words.append(file_name([setting + value]))
        return " ".join(words) or SINGLE


@dataclass(frozen=True)
class Study:
    """Jobs in the order in which they run. Its name is the name of its folder."""

    name: str
    jobs: tuple[Job, ...]

    @cached_property
    def _shared(self) -> set[str]:
        return set.intersection(*(set(job.settings) for job in self.jobs))

    def label(self, job: Job) -> str:
        """The settings that differ between jobs, but for the seed: alike for the repetitions of a job."""
        own = [text for text in job.settings if text not in self._shared and not text.startswith("seed=")]
        return ", ".join(own) or "all"


def register_studies() -> None:
    """Make each file of sweeps/ an option of Hydra's group `sweep`."""
    for file in sorted((config_dir().parent / "sweeps").glob("*.yaml")):
        ConfigStore.instance().store(
            group="sweep", name=file.stem, node=OmegaConf.load(file), package="_global_"
        )


def study(
    params: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    arguments: Sequence[str],
    parser: OverridesParser,
) -> Study:
    """The study of a command line.

    Its name is that of its file, or else the settings that vary. A job is named by the settings that the study
    varies. Any other setting on the command line makes a variant of the study, with another name. So all jobs of a
    folder differ only in their names' settings.

    Args:
        params: the axes, each a list of values as on the command line: "0.2,0.4".
        rows: settings that go together.
        arguments: the command line.
    """
    given = by_key(parser.parse_overrides(list(arguments)))
    axes = by_key(parser.parse_overrides([f"{key}={values}" for key, values in params.items()]))
    row_overrides = [parser.parse_overrides([f"{key}={value}" for key, value in row.items()]) for row in rows]
    row_keys = {override.get_key_element() for row in row_overrides for override in row}
    if row_keys & given.keys():
        row_overrides = []
    varied = axes.keys() | row_keys | {key for key, override in given.items() if override.is_sweep_override()}
    if "sweep" in varied:
        raise UserError("sweep takes one study at a time: start them one after another.")

    singles = product(*map(_choices, (axes | given).values()))
    together = [[text for override in row for text in _choices(override)] for row in row_overrides] or [[]]
    combinations = [(*single, *row) for single, row in product(singles, together)]
    variant = [
        text
        for key, override in given.items()
        if key not in varied and not is_neutral(key)
        for text in _choices(override)
    ]
    base = given["sweep"].value() if "sweep" in given else "+".join(sorted(varied)) or SINGLE
    jobs = dict.fromkeys(  # seed=0,0 is one job: two would share a folder
        Job(tuple(sorted(text for text in texts if text.partition("=")[0] in varied)), texts)
        for texts in combinations
    )
    return Study(file_name([str(base), *sorted(variant)], LONGEST_STUDY), tuple(jobs))


def is_neutral(key: str) -> bool:
    """True for a setting that changes neither a run's results nor the files that it leaves."""
    return role_of(key) is Role.NEITHER


def by_key(overrides: Iterable[Override]) -> dict[str, Override]:
    """The last override of each key."""
    return {override.get_key_element(): override for override in overrides}


def _choices(override: Override) -> list[str]:
    """The values of an override, each as an override."""
    key, value = override.get_key_element(), override.value()
    if override.is_delete():
        return [override.input_line or ""]
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise UserError(
            f"{override.input_line} is no list of values: write {key}=a,b, or search it by hydra/sweeper=search."
        )
    if not isinstance(value, RangeSweep):
        return [f"{key}={each}" for each in override.sweep_string_iterator()]
    try:
        numbers = numbers_of(value)
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"{override.input_line} is no list of values: {brief(error)}.") from error
    if value.shuffle:
        random.shuffle(numbers)  # only the order in which jobs run
    return [f"{key}={number}" for number in numbers]


def numbers_of(given: RangeSweep) -> list[int] | list[float]:
    """The numbers of Hydra's range(start,stop,step), in its order. Like Python's it ends before its stop.

    They are counted in decimals. Hydra adds up binary fractions: range(0.1,0.5,0.1) gives it 0.30000000000000004.
    Raises `ValueError` or `ArithmeticError` for a range without values, or without an end.
    """
    parts = (given.start or 0, given.stop or 0, given.step)
    first, stop, step = (Decimal(f"{part:.15g}") for part in parts)
    numbers = [first + place * step for place in range(ceil((stop - first) / step))]
    if not numbers:
        raise ValueError("it has no values")
    whole = all(isinstance(part, int) for part in parts)
    return [int(number) for number in numbers] if whole else [float(number) for number in numbers]
