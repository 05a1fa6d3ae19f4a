"""Search settings for each row of sweeps/methods.yaml: `python benchmarks/tune_methods.py`. Needs the extra `optuna`.

Each method has the same number of trials: half the rounds, seed 0, judged by validation rows. The space is
benchmarks/tune_methods.yaml. The rows with the best settings go to sweeps/methods_tuned.yaml. Started again, it skips
finished trials.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "sweeps" / "methods.yaml"
SPACE = ROOT / "benchmarks" / "tune_methods.yaml"
TUNED = ROOT / "sweeps" / "methods_tuned.yaml"
FIXED = (
    *("dataset.val_fraction=0.2", "federation.rounds=30", "eval.every=5", "eval.final_rounds=3"),
    *("logger=none", "hardware.workers=1"),
)
HEAD = """\
# @package _global_
# python src/train.py -m sweep=methods_tuned
# sweep=methods with the settings that six trials of each method found (benchmarks/tune_methods.py wrote this file).
"""


def best(words: list[str], space: dict[str, str], trials: int) -> dict[str, str]:
    """The best values of the space, for the method of these words."""
    command = [sys.executable, str(ROOT / "src/train.py"), "-m", "hydra/sweeper=search", *words, *FIXED]
    command += [f"hydra.sweeper.trials={trials}", *(f"{key}={values}" for key, values in space.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    last = done.stdout.rstrip().splitlines()[-1]
    print(f"{words[-1]}: {last.strip()}", flush=True)
    found = dict(word.split("=", 1) for word in shlex.split(last) if "=" in word)
    return {key: found[key] for key in space}


def main() -> None:
    study = yaml.safe_load(STUDY.read_text())
    search = yaml.safe_load(SPACE.read_text())
    sweeper, rows = study["hydra"]["sweeper"], []
    same = [f"experiment={sweeper['params']['experiment']}", f"training.epochs={study['training']['epochs']}"]
    for row in sweeper["rows"]:
        words = [word for word in same if word.split("=")[0] not in row]
        words += [f"{key}={value}" for key, value in row.items()]
        name = " ".join(row[key] for key in ("method", "mask") if key in row)
        space = search["all"] | search["own"].get(name, {})
        rows.append(row | best(words, space, search["trials"]))
    sweeper["rows"] = rows
    TUNED.write_text(HEAD + yaml.safe_dump(study, sort_keys=False, width=200))


if __name__ == "__main__":
    main()
