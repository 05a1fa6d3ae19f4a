"""MLflow's page of a run or a sweep, beside params and curves: tags, and a description with results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from fedspa.core.paths import git
from fedspa.core.roles import flat
from fedspa.core.tracker import RunInfo
from fedspa.costs.units import result_tables, show_count, show_density, show_measured_density

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
        f"{parts.get('dataset')} / {parts.get('model')}: "
        f"{show_count(info.rounds, 'round')}, {show_count(info.clients, 'client')} "
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


def described(run_id: str, note: str, summary: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a finished run: its measured density, and its description, which begins with the results."""
    tables = [markdown_table(rows) for rows in result_tables(summary)]
    parts = [*tables, f"Density: {show_density(summary)}.", picture(run_id, "accuracy.png"), note]
    return {NOTE: "\n\n".join(parts), "density": show_measured_density(summary)}


def markdown_table(rows: Sequence[Sequence[object]], room: int = NOTE_LENGTH) -> str:
    """A head and rows of cells in Markdown: as many rows as fit into so many characters."""
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    fit = [end for end in accumulate(len(line) + 1 for line in lines) if end <= room]
    left_out = len(lines) - len(fit)
    return "\n".join(lines[: len(fit)]) + (f"\n\nAnd {left_out} more." if left_out else "")


def picture(run_id: str, file: str) -> str:
    """A picture among a run's artifacts, for its description; the address is that of MLflow's own pages."""
    return f"![{file}](get-artifact?path={file}&run_uuid={run_id})"


def source_tags() -> dict[str, str]:
    """The user and the program that started the run, and the commit of the clone if there is one."""
    from mlflow.tracking.context.registry import resolve_tags

    tags: dict[str, str] = resolve_tags()
    if commit := git("rev-parse", "HEAD"):
        changes = git("status", "--porcelain", "--untracked-files=no")
        tags |= {"mlflow.source.git.commit": commit, "uncommitted_changes": "true" if changes else "false"}
    return tags


def flat_params(config: Mapping[str, Any]) -> dict[str, str]:
    """The config as MLflow params: dotted keys, values as one would type them.

    Left out: `_target_` (the name says it) and the loggers (they change nothing in a run).
    """
    kept = {key: value for key, value in flat(config).items() if "_target_" not in key.split(".")}
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in kept.items()
        if not key.startswith("loggers.")
    }
