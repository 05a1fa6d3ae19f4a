"""Decides by the roles of settings if two runs are the same experiment, and if one run may continue another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from fedspa.core.roles import Role, settings_that

ROUNDS = "federation.rounds"
CONFIG_HASH = "# config_hash: "
"""The beginning of a run's config.yaml."""


def config_hash(resolved: dict[str, Any]) -> str:
    """SHA-256 (16 hex digits) of all settings that decide a run's weights, or how they are tested."""
    content = settings_that(resolved, Role.TRAINS, Role.TESTS)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def following_rounds(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that equal the number of rounds in both configs, with federation.rounds itself."""
    one, other = (settings_that(config, Role.TRAINS) for config in (before, now))
    rounds = (one.get(ROUNDS), other.get(ROUNDS))
    return [key for key in one if key.endswith("rounds") and (one[key], other.get(key)) == rounds]


def what_differs(before: dict[str, Any], now: dict[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """The settings that keep a run with the config `now` from continuing one with `before`: "seed (0 there, 1 here)".

    They decide results, or the files that a run writes. `allowed`: settings that may differ.
    """
    one, other = (settings_that(config, Role.TRAINS, Role.TESTS, Role.KEEPS) for config in (before, now))
    if _sections(one) != _sections(other):
        return ["settings that another version of fedspa wrote"]
    keys = [key for key in one | other if one.get(key) != other.get(key) or (key in one) != (key in other)]
    return [f"{key} ({one.get(key)} there, {other.get(key)} here)" for key in keys if key not in allowed]


def _sections(values: dict[str, Any]) -> set[str]:
    return {key.partition(".")[0] for key in values}
