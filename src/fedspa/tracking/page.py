"""MLflow's page of a run or a sweep, beside params and curves: tags, and a description with results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedspa.core.paths import git
from fedspa.core.records import RunInfo
from fedspa.costs.units import result_tables, show_density, show_measured_density

PARENT = "mlflow.parentRunId"
"""The tag that nests a run below another."""
NOTE = "mlflow.note.content"
"""The tag that holds a run's description, in Markdown."""
NOTE_LENGTH = 4500
"""MLflow's limit on the value of a tag (5,000 characters once)."""


def tags(info: RunInfo) -> dict[str, str]:
    """The description of a run before its first round."""
    parts = info.names
    what = (
        f"{parts.get('method')} with mask {parts.get('mask')} at sparsity {info.sparsity} on "
        f"{parts.get('dataset')} / {parts.get('model')}: {info.rounds} rounds, {info.clients} clients "
        f"({parts.get('partition')}) with {info.images} training examples.\n\nFolder: `{info.folder}`"
    )
    facts = {
        **parts,
        "engine": info.engine,  # the one that computes
        "seed": info.seed,
        "sparsity": info.sparsity,
        "config_hash": info.config_hash,
        "partition_hash": info.partition_hash,
        "version": info.version,
        **({"engine_reason": info.engine_reason} if info.engine_reason else {}),
    }
    return {key: str(value) for key, value in facts.items()} | source_tags() | {NOTE: what}


def described(note: str, summary: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a finished run: its description with results, and its measured density."""
    return {NOTE: f"{note}\n\n{_results(summary)}", "density": show_measured_density(summary)}


def _results(summary: Mapping[str, Any]) -> str:
    tables = [
        "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
        for head, *rows in result_tables(summary)
    ]
    return "\n\n".join([*tables, f"Density: {show_density(summary)}."])


def source_tags() -> dict[str, str]:
    """Who started what, and the commit of the clone, where there is one."""
    from mlflow.tracking.context.registry import resolve_tags

    tags: dict[str, str] = resolve_tags()
    if commit := git("rev-parse", "HEAD"):
        changes = git("status", "--porcelain", "--untracked-files=no")
        tags |= {"mlflow.source.git.commit": commit, "uncommitted_changes": "true" if changes else "false"}
    return tags


def flat_params(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The config as MLflow params: dotted keys, values as one would type them.

    Left out: `_target_` (the name says it) and the loggers (they change nothing in a run).
    """
    params: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            params |= {} if prefix + key == "loggers" else flat_params(value, f"{prefix}{key}.")
        elif key != "_target_":
            params[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return params
