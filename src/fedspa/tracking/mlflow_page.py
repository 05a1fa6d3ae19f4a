"""What MLflow's pages show of a run beside its params and curves: tags, the data set, and the description.

Tags are what the table of runs can be filtered and grouped by; the description, which the run's page begins with, ends
up as a table of results.
"""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from fedspa.core.paths import project_root
from fedspa.core.records import KINDS, RunInfo
from fedspa.costs.units import show_bytes, show_flops, show_saved
from fedspa.tracking.measures import density_text, final_scores

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

PARENT = "mlflow.parentRunId"
"""The tag that nests a run below another."""
NOTE = "mlflow.note.content"
"""The tag that holds a run's description, in Markdown."""
NOTE_LENGTH = 4500
"""Under MLflow's limits on the value of a tag, which were 5,000 characters once."""
EXPERIMENT = {"mlflow.experimentKind": "custom_model_development"}
"""Tags of the experiment: its pages are those of training, not of language models."""


def tags(info: RunInfo) -> dict[str, str]:
    """What is known of a run before its first round."""
    facts = {
        **info.names,
        "engine": info.engine,  # the one that computes
        "seed": info.seed,
        "sparsity": info.sparsity,
        "config_hash": info.config_hash,
        "partition_hash": info.partition_hash,
        "version": info.version,
    }
    if info.engine_reason:
        facts["engine_reason"] = info.engine_reason
    return {key: str(value) for key, value in facts.items()} | source_tags() | {NOTE: note(info)}


def final_tags(info: RunInfo, summary: Mapping[str, Any]) -> dict[str, str]:
    """What is known of a run at its end: its description with results, and its measured density."""
    return {NOTE: note(info, summary), "density": density_text(summary["density"])}


@cache
def source_tags() -> dict[str, str]:
    """Who started what, and the commit of the clone, where there is one."""
    found = {"mlflow.source.name": sys.argv[0] or "fedspa", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError):  # a container whose user has no name
        found["mlflow.user"] = getpass.getuser()
    if commit := _git("rev-parse", "HEAD"):
        found["mlflow.source.git.commit"] = commit
        found["uncommitted_changes"] = (
            "true" if _git("status", "--porcelain", "--untracked-files=no") else "false"
        )
    return found


def _git(*words: str) -> str:
    """What git says of the clone; empty where there is no git, or no clone."""
    try:
        done = subprocess.run(["git", *words], cwd=project_root(), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def dataset_input(info: RunInfo) -> DatasetInput:
    """The data set of a run: its name, and the partition as its digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = info.config.get("dataset", {})
    name, place = info.names.get("dataset", ""), source.get("path") or source.get("hub") or "fedspa"
    dataset = Dataset(name, info.partition_hash[:36], "fedspa", str(place))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def note(info: RunInfo, summary: Mapping[str, Any] | None = None) -> str:
    """A run's description: what it is, and with its summary what came of it."""
    names = info.names
    what = (
        f"{names.get('method')} with mask {names.get('mask')} at sparsity {info.sparsity} on "
        f"{names.get('dataset')} / {names.get('model')}: {info.rounds} rounds, {info.clients} clients "
        f"({names.get('partition')}) with {info.images} training images."
    )
    parts = [what, *([_results(summary)] if summary else []), f"Folder: `{info.folder}`"]
    return "\n\n".join(parts)


def _results(summary: Mapping[str, Any]) -> str:
    lines = []
    for metric, scores in final_scores(summary).items():
        lines += ["", f"| {metric} in % | mean | std | worst decile |", "|---|---|---|---|"]
        for kind in KINDS:
            if spread := scores.get(kind):
                lines.append(
                    f"| {kind} | {spread['mean']:.2f} | {spread['std']:.2f} | {spread['worst_decile']:.2f} |"
                )
    density = (
        f"Density: {summary['density']['asked']:.4g} asked, {density_text(summary['density'])} measured."
    )
    costs = ["| cost | this run | dense | saved |", "|---|---|---|---|"]
    for title, key, show in (("traffic", "traffic_bytes", show_bytes), ("FLOPs", "flops", show_flops)):
        total, dense = summary[key]["total"], summary[key]["dense_total"]
        costs.append(f"| {title} | {show(total)} | {show(dense)} | {show_saved(total, dense)} |")
    return "\n".join([*lines[1:], "", *costs, "", density])


def sweep_note(outcomes: Mapping[str, str]) -> str:
    """A sweep's description: what became of each of its jobs, of as many as MLflow takes."""
    text = "| job | |\n|---|---|"
    for count, (name, outcome) in enumerate(outcomes.items()):
        row = f"\n| `{name}` | {outcome[:200].replace('|', '/')} |"
        if len(text) + len(row) > NOTE_LENGTH:
            return f"{text}\n\nAnd {len(outcomes) - count} more."
        text += row
    return text
