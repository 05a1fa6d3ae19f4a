"""docs/files.md against what runs, reports and commands really leave: names and types."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run
from safetensors.torch import load_file
from tracking_runs import faulty_records, run_info

import fedspa
from fedspa.config.plan import Plan
from fedspa.planning.cost_report import CostReport
from fedspa.report.page import results
from fedspa.report.runs import folders_under, read_runs
from fedspa.report.study import make_study
from fedspa.report.tables import all_tables
from fedspa.tracking.run_folder import RoundReader, RunFolder

PAGE = Path(__file__).parents[1].joinpath("docs/files.md").read_text()
PLACES = {
    "<kind>": "(global|personal|local|finetuned)", "<metric>": "(val_)?(accuracy|macro_f1)", "<class>": r"\d+",
    "<client>": r"\d+", "<fault>": "[a-z_]+", "<target>": r"[\d.]+", "<tensor>": r"[\w.]+", "<item>": r"\w+",
}  # fmt: skip
NUMBERS = {"int": int, "float": float}
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "bool": (bool,), "float": (float, int), "text": (str,), "list": (list,), "dict": (dict,),
}  # fmt: skip
SMALL = (
    *(
        "dataset.train_rows=300",
        "federation.clients=4",
        "federation.clients_per_round=3",
        "federation.rounds=2",
    ),
    *("hardware.workers=1", "engine.kernels=torch"),
)
FULL = (
    *("dataset.val_fraction=0.2", "metric=[accuracy,macro_f1]", "finetune.epochs=1", "theory.every=1"),
    *(
        "federation.wire=fp32",
        "faults.dropout=0.4",
        "training.epochs=1",
        "save.local=true",
        "eval.targets=[5]",
    ),
)
RUNS = {
    "full": ("method=fedspa", "mask=dst", *FULL, "logger=csv"),
    "dense": (
        "method=ditto",
        "method.shared_epochs=1",
        "method.personal_epochs=1",
        "training.epochs=2",
        "save.personal=true",
        "logger=tensorboard",
    ),
    "many": ("method=fedspa", "mask=granet", "save.client_files=2", "training.epochs=1", "logger=none"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, words in RUNS.items():
        fedspa.run(*SMALL, *words, folder=folder / name, quiet=True)
    return folder


def documented(heading: str) -> dict[str, str]:
    """The regular expressions of a section's names, and their types."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| (`.*)$", section, re.MULTILINE):
        cells, kind = row.split(" | ")[:2]
        for name in re.findall("`([^`]+)`", cells):
            form = re.escape(name)
            for place, pattern in PLACES.items():
                form = form.replace(place, pattern)
            found[form] = kind
    return found


def check(heading: str, tables: list[dict[str, list[Any]]]) -> None:
    """Compare a section with tables: lists of values by name. Every name is documented, and every one occurs."""
    forms, seen = documented(heading), set()
    for table in tables:
        for name, values in table.items():
            [form] = [form for form in forms if re.fullmatch(form, name)] or [f"{name} is not documented"]
            assert form in forms, form
            seen.add(form)
            for value in values:
                assert value is None or isinstance(value, TYPES.get(forms[form], str)), (name, value)
    assert seen == set(forms)


def read(path: Path) -> dict[str, list[Any]]:
    if path.suffix == ".json":
        return {name: [value] for name, value in json.loads(path.read_text()).items()}
    if path.suffix == ".safetensors":
        return {name: [str(tensor.dtype)] for name, tensor in load_file(path).items()}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
        file.seek(0)
        titles = next(csv.reader(file))
    kinds = documented(path.name)
    columns = {}
    for title in titles:
        kind = next((kind for form, kind in kinds.items() if re.fullmatch(form, title)), "")
        columns[title] = [NUMBERS.get(kind, str)(row[title]) if row[title] else None for row in rows]
    return columns


def test_every_file_of_a_run_is_on_the_page(root: Path) -> None:
    told = re.findall(
        "`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE.split("## A run's folder")[1], re.M))
    )
    for folder in root.iterdir():
        left = {path.name + "/" * path.is_dir() for path in folder.iterdir()}
        assert left <= set(told), folder


@pytest.mark.parametrize(
    "file",
    [
        *(
            "rounds.csv",
            "timing.csv",
            "events.csv",
            "clients.csv",
            "tensors.csv",
            "theory.csv",
            "summary.json",
        ),
        *("clients.safetensors", "partition.safetensors", "weights.safetensors", "masks.safetensors"),
        *("local_weights.safetensors", "client_states.safetensors"),
    ],
)
def test_a_files_names_and_types_are_those_of_the_page(root: Path, file: str) -> None:
    tables = [read(path) for path in root.glob(f"*/{file}")]
    if file.endswith(".safetensors"):
        forms = documented(file)
        for name, [dtype] in (item for table in tables for item in table.items()):
            [kind] = [kind for form, kind in forms.items() if re.fullmatch(form, name)]
            assert dtype == f"torch.{kind}", name
    check(file, tables)


def test_the_partition_is_that_of_the_page(root: Path) -> None:
    tables = [read(path) for path in root.glob("*/partition.json")]
    check("partition.json", [*tables, {"classes": [["a"]], "names": [["b"]]}])


def test_the_tidy_table_is_that_of_the_page(root: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"local": [1, 2]})
    table = fedspa.load(tmp_path)
    assert set(documented("The tidy table")) == {re.escape(name) for name in table}


def test_results_are_those_of_the_page(root: Path, tmp_path: Path) -> None:
    study = make_study("study", read_runs(folders_under(root / "full")))
    results(study, all_tables(study)).to_csv(tmp_path / "results.csv", index=False)
    check("results.csv", [read(tmp_path / "results.csv")])


def test_costs_are_those_of_the_page(plan: Callable[..., Plan]) -> None:
    told = CostReport.of(plan("federation.wire=fp32")).as_dict()
    check("Costs as JSON", [{name: [value] for name, value in told.items()}])


def test_tracking_stores_have_the_names_of_the_files(tmp_path: Path) -> None:
    folder = RunFolder()
    folder.start(run_info(tmp_path))
    for record in faulty_records():
        folder.round(record)
    shown = {name: [value] for *_, values in RoundReader(tmp_path).new() for name, value in values.items()}
    of_files = {**documented("rounds.csv"), **documented("timing.csv"), **documented("summary.json")}
    check(
        "In MLflow and TensorBoard",
        [{name: value for name, value in shown.items() if not any(re.fullmatch(f, name) for f in of_files)}],
    )
