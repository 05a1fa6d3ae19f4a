"""Which settings decide a run's results: when two runs are the same experiment, and when one may go on as another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from fedspa.settings import Config


def config_hash(resolved: dict[str, Any]) -> str:
    """SHA-256 (16 hex digits) of everything that decides a run's results.

    Left out: the run's name, where data lies and what it holds, what computes, and what is logged or kept.
    Of what computes only the type of its numbers counts.
    """
    content = _decisive(resolved)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _decisive(resolved: dict[str, Any]) -> dict[str, Any]:
    left_out = ("name", "hardware", "engine", "loggers", "save", "theory", "dry_run", "checkpoint", "resume")
    content = {f.name: resolved[f.name] for f in fields(Config) if f.name not in left_out}
    for group in ("dataset", "partition"):
        content[group] = {key: value for key, value in resolved[group].items() if key != "path"}
    content["hardware"] = {"precision": resolved["hardware"]["precision"]}
    return content


def what_differs(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why a run with the resolved config `now` cannot go on where one with `before` stopped: "seed (0 there, 1 here)".

    Beside what decides results: what a run gathers from its first round on.
    """

    def flat(node: Any, name: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {name: node}
        return {
            k: v
            for key, part in node.items()
            for k, v in flat(part, f"{name}.{key}" if name else key).items()
        }

    def compared(config: dict[str, Any]) -> dict[str, Any]:
        gathered = {"save": {"local": config["save"]["local"]}, "theory": config["theory"]}
        return flat({**_decisive(config), **gathered}, "")

    try:
        one, other = compared(before), compared(now)
    except (KeyError, TypeError):  # a config of another version
        return ["settings that another version of fedspa wrote"]
    keys = [key for key in one | other if one.get(key) != other.get(key) or (key in one) != (key in other)]
    return [f"{key} ({one.get(key)} there, {other.get(key)} here)" for key in keys]
