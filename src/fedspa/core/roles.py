"""The role of every setting: it decides the trained weights, only tests them, or does neither.

This one table serves all that depends on the role: the config's hash, the check of `resume`, the names and skipped
jobs of a sweep, and the runs that a report averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Role(Enum):
    """The effect of a setting on a run."""

    TRAINS = "decides the trained weights"
    TESTS = "repeats the run, or decides how its weights are tested and its costs counted"
    KEEPS = "changes no result, but what else the run leaves"
    NEITHER = "changes nothing that the run leaves, beyond rounding"


_NAMES = {
    Role.TRAINS: (
        *("sparsity", "personal_layers", "federation", "training", "faults", "hardware.precision"),
        *("dataset", "partition", "model", "layer_sparsity"),
        *("mask", "method", "server_optimizer", "experiment"),
    ),
    Role.TESTS: (
        *("seed", "eval", "finetune", "costs", "metrics", "metric"),
        *("dataset.test_rows", "dataset.client_test_images", "dataset.client_test_rounding"),
    ),
    Role.KEEPS: ("eval.targets", "save", "theory"),
    Role.NEITHER: (
        *("name", "dry_run", "resume", "trusted_packages", "sweep", "checkpoint", "loggers", "logger"),
        *("dataset.path", "dataset.least_test_share", "partition.path", "hardware", "engine"),
    ),
}
ROLES = {name: role for role, names in _NAMES.items() for name in names}
"""Roles by dotted name. The name of a section, or of a group of components, stands for all its options that are not
listed, for the choice of a component, and for those of plug-ins."""

SINGLE = "single"
"""The name of a job that varies nothing."""


def role_of(key: str) -> Role:
    """The role of a setting by its dotted name, or of a group by the word that chooses from it (metric, logger).

    A name that the table lacks, perhaps from another version of fedspa, counts as one that decides the weights.
    """
    while key:
        if key in ROLES:
            return ROLES[key]
        key = key.rpartition(".")[0]
    return Role.TRAINS


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's values by dotted name; an empty section has none."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def settings_that(config: Mapping[str, Any], *roles: Role) -> dict[str, Any]:
    """The values of a config, by dotted name, whose settings have one of these roles."""
    return {key: value for key, value in flat(config).items() if role_of(key) in roles}
