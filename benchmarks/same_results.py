"""Compare two commits by their results: `python benchmarks/same_results.py BASE [--only NAME ...] [--jobs N]`.

BASE is a git ref or the path of a checkout. src/train.py of BASE and of this working tree make the same runs, each once
as a whole and once with a stop by SIGTERM and a resume; src/costs.py reports the published experiments. Tensors must be
equal to the byte, and every value of tables and summaries too. Else the exit code is 1, and all files stay.

The runs are written in the words of BASE; the tables below translate them. The names of columns are regular expressions
that match the whole name. Keys of JSON are columns, as in flops/total, and so are the names of tensors.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from hashlib import sha256
from importlib import import_module
from itertools import zip_longest
from math import isclose
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

# {"old.key": "new.key"} or {"old.key=value": "new.key=value another.key=value"}
RENAMED_SETTINGS: dict[str, str] = {"model.batchnorm=local": "model.batchnorm=null personal_layers=norm"}
# {"old.csv": "new.csv"}; the tables below use the old names of files.
RENAMED_FILES: dict[str, str] = {}
_KINDS, _STATISTICS = "(global|personal|local|finetuned)", "(std|p10|worst_decile|min|max|clients)"
_TOTALS = {
    "traffic_bytes/(down|up|encoded)": r"cost/traffic_\1_bytes",
    "traffic_bytes/masks": "cost/traffic_mask_bytes",
    "traffic_bytes/total": "cost/traffic_bytes",
    "traffic_bytes/dense_total": "cost/traffic_dense_bytes",
}
# {"rounds.csv": {r"(\w+)_accuracy_(\w+)": r"accuracy/\1/\2"}}, one pattern after the other.
RENAMED_COLUMNS: dict[str, dict[str, str]] = {
    "rounds.csv": {
        "(participants|learning_rate|loss|samples|prune_rate)": r"train/\1",
        "(train|search)_flops": r"round_cost/flops_\1",
        "(down|up|mask|encoded)_bytes": r"round_cost/traffic_\1_bytes",
        "total_(flops|traffic_bytes)": r"cost/\1",
        rf"{_KINDS}_(\w+)_mean": r"\2/\1",
        rf"{_KINDS}_(\w+?)_{_STATISTICS}": r"\2/\1/\3",
    },
    "clients.csv": {"visits": "client_updates", rf"{_KINDS}_(\w+)": r"\2/\1"},
    "summary.json": {
        "density/asked": "density_asked",
        "density/mean": "final/density",
        "density/(min|max)": r"final/density/\1",
        r"(?:metrics/)?(\w*accuracy)/(\w+)/mean": r"final/\1/\2",
        rf"(?:metrics/)?(\w*accuracy)/(\w+)/{_STATISTICS}": r"final/\1/\2/\3",
        r"rounds_to_accuracy/(\w+)/(.*)": r"final/rounds_to_\2/\1",
        **_TOTALS,
        "flops/(train|search|finetune)": r"cost/flops_\1",
        "flops/total": "cost/flops",
        "flops/dense_total": "cost/flops_dense",
        r"events/(\w+)": r"faults/\1",
    },
    "costs.json": {
        "visits": "client_updates",
        "forward_flops/dense": "forward_flops_dense",
        "forward_flops/sparse": "forward_flops",
        "(train|search|finetune)_flops": r"cost/flops_\1",
        "total_flops": "cost/flops",
        "dense_total_flops": "cost/flops_dense",
        **_TOTALS,
    },
}
# {"events.csv": {"old column": {"old value": "new value"}}}
RENAMED_VALUES: dict[str, dict[str, dict[str, str]]] = {}
# {"rounds.csv": ["new_.*"]}: columns that only this working tree has.
ADDED_COLUMNS: dict[str, list[str]] = {
    "rounds.csv": ["cost/flops_.*", "cost/traffic_(down|up|mask|encoded|dense)_bytes", "train/explored.*"],
    "summary.json": [
        "metrics",
        "continued/.*",
        "in_percent",
        "lower_is_better",
        "final/explored.*",
        "clients_keep",
    ],
    "client_states.safetensors": [r"\d+\.explored.*"],
}
# {"rounds.csv": {".*_accuracy_.*": 1e-6}}: by how much columns may differ, as a share, where only rounding has changed.
ROUNDED: dict[str, dict[str, float]] = {
    name: {".*accuracy.*": 1e-6} for name in ("rounds.csv", "clients.csv", "summary.json")
}
# Columns that may differ, or that one side alone has, by their old names and by their new ones.
NOT_COMPARED = {
    "summary.json": [
        *(
            "seconds/.*",
            "samples_per_s",
            "time/.*",
            "final/samples_per_s",
            "config_hash",
            "data_files",
            "version",
        ),
        r"(metrics/)?\w*accuracy/\w+",  # a kind of model that the method does not have
    ]
}

COMMON = (
    *("dataset=digits", "dataset.val_fraction=0.1", "hardware=cpu", "engine=eager", "engine.kernels=torch"),
    *("logger=none", "save.personal=true", "federation.clients=16", "federation.clients_per_round=4"),
    *("federation.rounds=8", "training.epochs=2", "training.batch_size=32", "training.momentum=0.5"),
    *("eval.every=2", "finetune.epochs=1"),
)
STOP_AFTER = 3  # rounds; then a run that is to be resumed gets SIGTERM
METHODS: dict[str, tuple[str, ...]] = {
    **{f"fedspa-{mask}": ("method=fedspa", f"mask={mask}") for mask in ("dst", "rsm", "rigl", "snip")},
    **{name: (f"method={name}",) for name in ("fedavg", "local", "subsampling")},
    "ditto": ("method=ditto", "method.shared_epochs=1", "method.personal_epochs=1"),
    "subfedavg": ("method=subfedavg", "method.accuracy_threshold=0.05"),
}
WIRE = ("federation.wire=fp32", "hardware.workers=2")
FAULTS = (*WIRE, "faults.dropout=0.2", "faults.loss=0.2", "faults.corruption=0.2")
NETWORK = ("model=dotted", "model.path=same_results.batchnorm_network", "trusted_packages=[same_results]")
RUNS: dict[str, tuple[str, ...]] = {
    **{f"{name}-{n}w": (*METHODS[name], f"hardware.workers={n}") for name in METHODS for n in (1, 2)},
    **{f"{name}-wire": (*METHODS[name], *WIRE) for name in ("fedspa-snip", "ditto", "subsampling")},
    **{f"{name}-faults": (*METHODS[name], *FAULTS) for name in ("fedspa-dst", "fedavg", "subfedavg")},
    "fedspa-dst-batchnorm": (*METHODS["fedspa-dst"], *NETWORK, "model.batchnorm=local"),
    "fedspa-dst-theory": (*METHODS["fedspa-dst"], "theory.every=2"),
    "fedspa-dst-paper_costs": (*METHODS["fedspa-dst"], "costs.convention=paper"),
}
COSTS = [f"costs-{data}_{part}" for data in ("emnist", "cifar10", "cifar100") for part in ("iid", "a", "b")]
NEEDED = ("costs.json", "rounds.csv", "events.csv", "clients.csv", "summary.json", "weights.safetensors")
FILES = (*NEEDED[1:], "theory.csv", "masks.safetensors", "client_states.safetensors")
ROOT = Path(__file__).resolve().parents[1]
FORK = get_context("fork")


def batchnorm_network(channels: int, classes: int) -> nn.Module:
    """Make a small network with BatchNorm."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, 2)),
        *(nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes)),
    )


class Side(NamedTuple):
    """One of the two commits: its checkout, the folder of its results, and whether it has the new names."""

    name: str
    root: Path
    results: Path
    renamed: bool

    def file(self, folder: str, file: str) -> Path:
        """Find a file, given by its old name, in a folder of the results."""
        return self.results / folder / (RENAMED_FILES.get(file, file) if self.renamed else file)

    def make(self, name: str) -> None:
        """Make the results of one name. Raises `RuntimeError` where a program ends as it should not."""
        folder = self.results / name
        (folder / "whole").mkdir(parents=True)
        if name in COSTS:
            settings: tuple[str, ...] = (f"experiment={name.removeprefix('costs-')}", "format=json")
            return self._run("costs.py", settings, folder / "whole/costs.json")
        settings = (*COMMON, *RUNS[name])
        self._run("train.py", (*settings, f"hydra.run.dir={folder}/whole"), folder / "whole.txt")
        settings = (*settings, f"hydra.run.dir={folder}/resumed", "resume=auto")
        rounds = self.file(f"{name}/resumed", "rounds.csv")
        self._run("train.py", settings, folder / "stopped.txt", stop_by=rounds)
        self._run("train.py", settings, folder / "resumed.txt")

    def _run(self, program: str, settings: Sequence[str], output: Path, stop_by: Path | None = None) -> None:
        """Run a program of src/ in a fork. `stop_by`: the table whose rows tell when to send SIGTERM."""
        renamed, words = RENAMED_SETTINGS if self.renamed else {}, []
        for setting in settings:
            key, _, value = setting.partition("=")
            words += renamed.get(setting, f"{renamed.get(key, key)}={value}").split()
        process = FORK.Process(target=_run_here, args=(self.root / "src", program, words, output))
        process.start()
        while stop_by and process.is_alive():
            if stop_by.exists() and stop_by.read_text().count("\n") > STOP_AFTER:
                process.terminate()
                break
            time.sleep(0.002)
        process.join()
        if process.exitcode != (expected := 75 if stop_by else 0):
            errors = output.with_suffix(".err")
            said = " ".join(errors.read_text().splitlines()[-3:])
            raise RuntimeError(
                f"{program}, {errors}: exit code {process.exitcode} instead of {expected}: {said}"
            )


def _run_here(source: Path, program: str, words: Sequence[str], output: Path) -> None:
    """Run a program in this process, which has loaded the packages that it needs."""
    for number, path in ((1, output), (2, output.with_suffix(".err"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    installed = [path for path in sys.path if not (Path(path) / "fedspa/__init__.py").is_file()]
    sys.path[:] = [str(source), *installed]
    sys.argv = [str(source / program), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def read(path: Path) -> dict[str, list[str]]:
    """Read the columns of a file. The items of a list in JSON are rows; so are the values of a tensor."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            titles, *rows = csv.reader(file)
        return {title: [row[index] for row in rows] for index, title in enumerate(titles)}
    columns: dict[str, list[str]] = {}
    if path.suffix == ".safetensors":
        for name, tensor in load_file(path).items():
            checksum = sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            last = f"{tensor.dtype}, shape {[*tensor.shape]}, SHA-256 {checksum}"
            columns[name] = [*map(str, tensor.flatten().tolist()), last]
        return columns

    def flatten(key: str, value: Any) -> None:
        if isinstance(value, dict | list):
            for part, item in value.items() if isinstance(value, dict) else [("", item) for item in value]:
                flatten(f"{key}/{part}".strip("/"), item)
        else:
            columns.setdefault(key, []).append("" if value is None else str(value))

    flatten("", json.loads(path.read_text()))
    return columns


def translated(file: str, columns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Give the columns of a file of BASE their new names and values."""
    new = {}
    for column, cells in columns.items():
        words = RENAMED_VALUES.get(file, {}).get(column, {})
        for pattern, name in RENAMED_COLUMNS.get(file, {}).items():
            column = re.sub(f"^(?:{pattern})$", name, column)
        new[column] = [words.get(cell, cell) for cell in cells]
    return new


def compare(name: str, pair: Sequence[tuple[Side, str]], file: str) -> Iterator[str]:
    """Say in one sentence for each column where a file of two results differs; `pair`: their sides and folders."""
    paths = [side.file(f"{name}/{folder}", file) for side, folder in pair]
    if missing := [str(path) for path in paths if not path.exists()]:
        if len(missing) == 1 or file in NEEDED:
            yield f"{file}, missing: {', '.join(missing)}"
        return
    old, new = map(read, paths)
    left_out = list(NOT_COMPARED.get(file, []))
    if pair[1][0].renamed and not pair[0][0].renamed:
        old = translated(file, old)
        left_out += ADDED_COLUMNS.get(file, [])
    one, other = (f"in the {folder} run of {side.name}" for side, folder in pair)
    for column in dict.fromkeys([*old, *new]):
        if any(re.fullmatch(pattern, column) for pattern in left_out):
            continue
        if column not in old or column not in new:
            yield f"{file}, {column}: only {one if column in old else other}"
            continue
        tolerances = [
            share for pattern, share in ROUNDED.get(file, {}).items() if re.fullmatch(pattern, column)
        ]
        rows = enumerate(zip_longest(old[column], new[column], fillvalue="(no row)"), start=1)
        if unequal := [(row, a, b) for row, (a, b) in rows if not same(a, b, *tolerances)]:
            row, a, b = unequal[0]
            yield f"{file}, {column}: {len(unequal)} rows differ, first row {row}: {a} {one}, {b} {other}"


def same(a: str, b: str, tolerance: float = 0) -> bool:
    """Whether two values are the same, as 1000 and 1000.0 are, or numbers that differ by rounding only."""
    if a.removesuffix(".0") == b.removesuffix(".0"):
        return True
    try:
        return tolerance > 0 and isclose(float(a), float(b), rel_tol=tolerance)
    except ValueError:
        return False


def verdict(base: Side, here: Side, name: str) -> list[str]:
    """Compare the two sides, and on each side the whole run with the resumed one."""
    pairs = [((base, "whole"), (here, "whole"))]
    if name in RUNS:
        pairs += [((side, "whole"), (side, "resumed")) for side in (base, here)]
    files = FILES if name in RUNS else ("costs.json",)
    return [text for pair in pairs for file in files for text in compare(name, pair, file)]


@contextmanager
def checkout(base: str) -> Iterator[Path]:
    """Give the checkout at a path; or make a git worktree of a ref, and remove it in the end."""
    if (Path(base) / "src/train.py").is_file():
        yield Path(base).resolve()
        return
    worktree = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="same_results_") as folder:
        subprocess.run([*worktree, "add", "--quiet", "--detach", f"{folder}/base", base], check=True)
        try:
            yield Path(folder, "base")
        finally:
            subprocess.run([*worktree, "remove", "--force", f"{folder}/base"], check=True)


def main() -> int:
    """Make all results with both commits, and compare them."""
    parser = argparse.ArgumentParser(description="Compare two commits by their results.")
    parser.add_argument("base", metavar="BASE", help="a git ref, or the path of a checkout")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="such as 'costs-*'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="results that are made at a time")
    parser.add_argument("--renamed", action="store_true", help="BASE has the new names already")
    args = parser.parse_args()
    names = [name for name in (*RUNS, *COSTS) if any(fnmatch(name, pattern) for pattern in args.only)]
    if not names:
        parser.error("--only names no run")
    torch.set_num_threads(1)  # this process will be forked
    for package in ("lightning", "torchmetrics", "sklearn.datasets", "hydra", "rich.console"):
        import_module(package)
    results = Path(tempfile.mkdtemp(prefix="same_results_of_"))
    unequal = 0
    with checkout(args.base) as root, ProcessPoolExecutor(args.jobs, FORK) as pool:
        base = Side("BASE", root, results / "base", args.renamed)
        here = Side("here", ROOT, results / "here", True)
        made = {name: [pool.submit(side.make, name) for side in (base, here)] for name in names}
        for name, sides in made.items():
            errors = [str(error) for side in sides if (error := side.exception())]
            found = errors or verdict(base, here, name)
            unequal += bool(found)
            first = {text.partition(",")[0]: text for text in reversed(found)}  # of each file
            text = f"{len(found)} differences" if found else "equal"
            print(f"{name}: {text}", *first.values(), sep="\n    ", flush=True)
    if not unequal:
        shutil.rmtree(results)
    print(f"{unequal} of {len(names)} differ: see {results}." if unequal else f"All {len(names)} are equal.")
    return min(unequal, 1)


if __name__ == "__main__":
    sys.exit(main())
