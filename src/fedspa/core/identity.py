"""When two runs are the same experiment, and when one may go on as another: by the roles of their settings."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fedspa.core.roles import Role, settings_that

CONFIG_HASH = "# config_hash: "
"""How a run's config.yaml begins."""


def config_hash(resolved: dict[str, Any]) -> str:
    """SHA-256 (16 hex digits) of every setting that decides a run's weights, or how they are tested."""
    content = settings_that(resolved, Role.TRAINS, Role.TESTS)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def what_differs(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why a run with the resolved config `now` cannot go on where one with `before` stopped: "seed (0 there, 1 here)".

    Beside what decides results: what else the run leaves.
    """
    one, other = (settings_that(config, Role.TRAINS, Role.TESTS, Role.KEEPS) for config in (before, now))
    if _sections(one) != _sections(other):
        return ["settings that another version of fedspa wrote"]
    keys = [key for key in one | other if one.get(key) != other.get(key) or (key in one) != (key in other)]
    return [f"{key} ({one.get(key)} there, {other.get(key)} here)" for key in keys]


def _sections(values: dict[str, Any]) -> set[str]:
    return {key.partition(".")[0] for key in values}
