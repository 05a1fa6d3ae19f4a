"""Every command in the documentation does what it is there for: it is run, on a toy, in the order of its page."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, code_blocks, copy_project
from toy_commands import run

COMMAND_PAGES = [page for page in PAGES if page.parent.name != "extending"]  # test_extending.py follows those
INTERPRETER = re.compile(r"(\.venv/bin/)?python3?$")
LAUNCHER = re.compile(r"hydra/launcher=|hydra\.launcher\.")
"""Left out: a toy's jobs run one after another; test_launchers.py tries the launchers."""
ASSIGNMENT = re.compile(r"[A-Z_]+=")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def commands(page: Path) -> list[str]:
    """The commands of a page, without their comments."""
    blocks = code_blocks(page, "", "sh", "bash")
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := re.split(r"(?:^|\s+)#\s?", line)[0])]


def last_run(root: Path) -> str:
    """The folder of the newest run in that root."""
    return str(max(root.glob("outputs/*/*/config.yaml"), key=lambda file: file.stat().st_mtime_ns).parent)


def filled(line: str, root: Path) -> str:
    """The line with something in place of what its reader is to fill in, `<a run's folder>`, and of a day."""
    line = re.sub(r"outputs/\d{4}-\d\d-\d\d", lambda _: str(Path(last_run(root)).parent), line)
    for blank in re.findall(r"<[^<>]*>", line):
        line = line.replace(blank, last_run(root) if "run" in blank or "its folder" in blank else str(root))
    return line


def tried(line: str, root: Path, log: Path) -> None:
    """Run one command."""
    words = [word for word in shlex.split(filled(line, root)) if not ASSIGNMENT.match(word)]
    program = words[0]
    if program in ("torchrun", "srun"):  # the run itself, in one process
        words = ["python", *words[[i for i, word in enumerate(words) if word.endswith("train.py")][0] :]]
    words = [word for word in words if not LAUNCHER.match(word)]
    if program == "make":
        target = [word for word in words[1:] if "=" not in word]
        subprocess.run(["make", "--dry-run", *target], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip" or words[1:3] == ["-m", "pip"]:
        named = re.findall(r"\[([\w,-]+)\]", line)
        assert {extra for extras in named for extra in extras.split(",")} <= EXTRAS.keys()
    elif INTERPRETER.match(words[0]) and words[1].startswith("src/"):
        assert run(words[1:], root, log) == 0, f"{line}\n{log.read_text()[-1000:]}"
    elif INTERPRETER.match(words[0]) and words[1].endswith(".py"):
        compile((ROOT / words[1]).read_text(), words[1], "exec")  # benchmarks take minutes
    else:
        assert line in OTHERS, f"Nothing here runs `{line}`."


OTHERS = {
    "python3 -m venv .venv": "made by .ci/run",
    ".venv/bin/python -m pytest --numprocesses=auto": "this is it",
    "source .venv/bin/activate": "of the shell",
    "mlflow ui": "a server, tried by test_tracking_mlflow.py",
    "tensorboard --logdir outputs": "a server; what it reads is read by test_tensorboard.py",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for the clone, to which runs and the tracking store go, with a run and a study."""
    root = tmp_path_factory.mktemp("clone")
    for before in ("python src/train.py", "python src/train.py -m sweep=main experiment=digits_study"):
        tried(before, root, root / "log")
    return root


@pytest.mark.parametrize(
    "page", [page for page in COMMAND_PAGES if commands(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_of_a_page(page: Path, root: Path, tmp_path: Path) -> None:
    for line in dict.fromkeys(commands(page)):
        tried(line, root, tmp_path / "log")


def test_the_first_study_is_run_as_it_is_written(tmp_path: Path) -> None:
    """Its commands, to the letter: real data, models and partitions; but one round of two clients in each run."""
    clone = copy_project(tmp_path)
    digits = clone / "conf" / "dataset" / "digits.yaml"
    small = digits.read_text().replace(
        "clients_per_round: 10\n  rounds: 30", "clients_per_round: 2\n  rounds: 1"
    )
    assert small != digits.read_text()
    digits.write_text(small)
    lines = [line for line in commands(ROOT / "docs" / "first_study.md") if line.startswith("python src/")]
    for line in ["python src/train.py mask=dst sparsity=0.5", *lines]:  # the first is what `make demo` runs
        command = [sys.executable, *shlex.split(line)[1:]]
        ended = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, f"{line}\n{ended.stdout[-1000:]}\n{ended.stderr[-1000:]}"
    with (clone / "outputs" / "reports" / "mask+seed+sparsity" / "results.csv").open(newline="") as file:
        seeds = {(row["mask"], row["sparsity"]): row["seeds"] for row in csv.DictReader(file)}
    assert seeds == {(mask, sparsity): "2" for mask in ("dst", "rsm") for sparsity in ("0.5", "0.95")}


def test_pages_hold_commands() -> None:
    assert len(commands(ROOT / "docs" / "first_study.md")) > 8
    assert sum(len(commands(page)) for page in COMMAND_PAGES) > 60
