"""The command line as a user meets it: sentences, exit codes, sweeps, and nothing heavy before a run."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from fedspa.__main__ import main as by_name
from fedspa.cli import main
from fedspa.config.schema import register
from fedspa.core.errors import UserError, nearest
from fedspa.core.paths import config_dir

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = sorted((ROOT / "src").glob("*.py"))
HEAVY = "{'torch._C', 'lightning', 'mlflow', 'torchmetrics', 'matplotlib', 'pandas'}"


def command(*words: str, folder: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """`python src/train.py <words>`, or python code, started in some other folder."""
    program = ["-c", code] if code else [str(ROOT / "src/train.py")]
    return subprocess.run([sys.executable, *program, *words], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def fedspa(tmp_path, monkeypatch):
    """`fedspa(task, "mask=rsm")`: the exit code of that command line, run in this process."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # `main` sets it; so pytest puts it back
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra's would outlive the run's folder

    def run(task, *words: str) -> int:
        folders = [f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep"]
        monkeypatch.setattr(sys, "argv", ["train.py", *words, *folders])
        return main(task)

    return run


# The commands by name


def test_each_command_has_a_name(monkeypatch, capsys):
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedspa", *words])
        return by_name(), *capsys.readouterr()

    files = {file.stem for file in COMMANDS}
    code, told, _ = call()
    assert code == 2 and {name for name in files if name in told} == files
    assert call("--help") == (0, told, "")
    assert call("trian")[0::2] == (2, f"Error: trian is no command: {nearest('trian', files)}.\n")
    with pytest.raises(SystemExit) as end:
        call("sync", "--help")
    assert end.value.code == 0 and "python src/sync.py <folder" in capsys.readouterr().out


@pytest.mark.parametrize("program", [["-m", "fedspa"], *([f"{ROOT}/src/{file.name}"] for file in COMMANDS)])
def test_a_python_without_the_packages_is_told_in_one_sentence(program, tmp_path):
    bare = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-S", *program]  # without site-packages, as outside the environment
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "the package hydra: activate the environment" in done.stderr


def test_a_program_may_catch_that_packages_are_missing(tmp_path):
    bare = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    program = "try: import fedspa\nexcept ModuleNotFoundError as error: print(error)"
    done = subprocess.run([sys.executable, "-S", "-c", program], env=bare, capture_output=True, text=True)
    assert "the package hydra: activate the environment" in done.stdout and not done.stderr


# A user's mistakes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("mask=dts", "mask=dts is not known: did you mean dst or dsr?"),
        ("metric=[acuracy]", "metric=acuracy is not known: did you mean accuracy?"),
        ("experiment=cifar10_smal", "experiment=cifar10_smal is not known: did you mean cifar10_small"),
        ("sparsity=1.2", "sparsity=1.2 is out of range: it must be in [0, 1)."),
        ("sparsity=lots", "sparsity=lots is not a number."),
        ("dataset=cifar10 dataset.path=/nowhere", "dataset.path=/nowhere does not exist"),
        ("federation.clients=20 federation.clients_per_round=200", "it must be at most 20."),
        ("partition.gama=1", "partition.gama is not a setting: did you mean gamma"),
        ("foo=1", "foo is not a setting: valid are checkpoint, costs, dataset, "),
        ("loger=none", "loger is not a setting: did you mean logger or loggers?"),
        ("method=fedavg mask=dst", "method=fedavg trains dense, so mask=dst has no meaning"),
        ("model=lenet5 dataset=digits logger=none", "model=lenet5 cannot take images of 8 x 8 pixels"),
        ("~mask", "mask cannot be left out: remove ~mask."),
        ("sparsity=0.1,0.2", "sparsity=0.1,0.2 is several values: add -m to run each."),
        ("sparsity=0,95", "sparsity=0,95 is two values: did you mean 0.95? (or add -m to run each)"),
        ("partition.gamma=0,3", "did you mean 0.3?"),
        ("seed=0,1", "seed=0,1 is several values: add -m to run each."),
        ("eval.targets=70,80", "add -m to run each, or write a list as [a,b]."),
        (
            "-m sparsity=[0.5,0.9]",
            "is not a number: a run takes one value, a sweep (-m sparsity=a,b) runs each.",
        ),
        ("precision=bf16", "precision is not a setting: did you mean hardware.precision?"),
        ("threads=2", "did you mean hardware.threads?"),
        ("training.lr=null", "training.lr=null is not a number."),
        (f"training.lr={10**400}", "training.lr is out of range: a number is at most 1.8e+308."),
        (f"eval.targets=[{10**400}]", "eval.targets[0] is out of range: a number is at most 1.8e+308."),
        ("~training.lr", "training.lr cannot be left out: remove ~training.lr."),
        ("training=3", "training=3 is no section: set what is in it, as in training.epochs="),
        ("eval.targets=70", "eval.targets=70 is not a list"),
        ("save.local=maybe", "save.local=maybe is not true or false."),
        ("mask=DST", "mask=DST is not known: did you mean dst or dsr?"),
        ("mask=null", "mask=null is not known: valid are channels, deepr, dsr, dst, "),
        ("mask=[dst,rsm]", "mask=[dst,rsm] is a list: mask takes one option"),
        ("metric.foo=1", "metric holds no settings"),
        (
            "+sparsity=0.3",
            "Could not append to config. An item is already at 'sparsity'. Either remove + prefix: 'sparsity=0.3'",
        ),
        ("~foo", "Could not delete from config. 'foo' does not exist."),
        ("sparsity=${foo}", "sparsity=${foo} cannot be resolved: the setting foo does not exist or is null."),
        ("name=${name}", "name=${name} cannot be resolved: it refers to itself."),
        ("name=???", "name=??? has no value: write name=<value>."),
        ("mask=???", "mask=??? is not known: valid are "),
        ("logger=[csv,1]", "logger=1 is not known: valid are csv, "),
        ("=1", "=1 names no setting: it is written as key=value."),
        ("eval.targets.9=70", "eval.targets[9] is no item of the list: write the whole list"),
        ("eval.targets.a=70", "a is no item of the list: write the whole list"),
        ("--lr=0.1", "--lr=0.1 is not an option"),
        ("mask", "mask cannot be read: a setting is written as key=value."),
        ("name=~/a", "name=~/a cannot be read: write 'name=\"~/a\"'."),
        ("training.lr=[1,2", "write 'training.lr=\"[1,2\"', or a list as [a,b]."),
        ("name=", "name is empty: leave it out"),
        ("name=M\udcfcller", "name=M?ller is not text in UTF-8"),
        (
            "partition=iid partition.min_size=5",
            "partition.min_size is not a setting: partition=iid has no further",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, words, sentence):
    done = command(*words.split(), "hydra.run.dir=run", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "sparsity: ${times:1}",
            "sparsity=${times:1} cannot be resolved: the resolver does not take these arg",
        ),
        (
            "name: ${oc.env:NO_SUCH}",
            "name=${oc.env:NO_SUCH} cannot be resolved: there is no environment variable",
        ),
        (
            "mask: {regrow: '${nothing}'}",
            "mask.regrow=${nothing} cannot be resolved: the setting nothing does not",
        ),
        ("name: ${oops", "name has an interpolation that cannot be read"),
        ("seed: [1", "{folder}/experiment/own.yaml cannot be read as YAML, line 3: "),
        ("\tseed: 1", "{folder}/experiment/own.yaml cannot be read as YAML, line 2: "),
        ("seed: 1\nseed: 2", "{folder}/experiment/own.yaml cannot be read as YAML, line 3: "),
        ("name: a\x07", "{folder}/experiment/own.yaml cannot be read as YAML: "),
    ],
)
def test_a_mistake_in_a_file_of_the_user_is_one_sentence_too(
    fedspa, tmp_path, monkeypatch, capsys, line, sentence
):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(f"# @package _global_\n{line}\n")
    for more in ([], ["-m"]):
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        assert fedspa(print, *more, "-cd", str(tmp_path), "experiment=own", "logger=none") == 2
        told = capsys.readouterr().err
        assert f"Error: {sentence.replace('{folder}', str(tmp_path))}" in told and "Traceback" not in told


@pytest.mark.parametrize("text", ["results/epoch=9,a[b]", '模型 ä "q"', "it's", 'a"b\\', "name,", "a{b}(c)"])
def test_the_quotes_that_a_mistake_is_answered_with_work(fedspa, capsys, text):
    assert fedspa(lambda plan, folder: None, f"name={text}", "logger=none") in (0, 2)
    told = capsys.readouterr().err
    suggested = told.split("cannot be read: write ")[1].rstrip(".\n") if told else f"name={text}"
    seen = []
    assert (
        fedspa(lambda plan, folder: seen.append(plan.settings.name), shlex.split(suggested)[0].rstrip(","))
        == 0
    )
    assert seen == [text]


def test_the_traceback_is_there_for_who_asks(fedspa, monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert fedspa(print, "mask=dts") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    done = command("hydra.run.dir=file/run", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert "file/run cannot be written (Not a directory)" in done.stderr


def test_a_full_disk_in_a_run_is_a_sentence(fedspa, capsys):
    def run(plan, folder):
        raise OSError(errno.ENOSPC, "No space left on device", "rounds.csv")

    assert fedspa(run) == 2
    told = capsys.readouterr().err
    assert told.startswith("Error: rounds.csv cannot be written (No space left on device)")
    assert "Traceback" not in told


# Nothing heavy before a run


@pytest.mark.parametrize("words", ["--help", "--cfg job", "mask=dts", "sparsty=1", "partition.gamma=0"])
def test_answers_come_before_heavy_imports(tmp_path, words):
    code = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "src")!r})
try:
    runpy.run_path({str(ROOT / "src/train.py")!r}, run_name="__main__")
except SystemExit:
    print("loaded:", {HEAVY} & set(sys.modules))
"""
    done = command(*words.split(), "hydra.run.dir=run", folder=tmp_path, code=code)
    assert done.stdout.endswith("loaded: set()\n"), done.stderr


def test_deferred_torch_becomes_torch_when_it_is_used(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "src")!r})
from fedspa.core.lazy_torch import defer_torch
defer_torch()
from fedspa.core import randomness
assert "torch._C" not in sys.modules
draw = randomness.generator(0, "test")
import torch
from torch import nn
import torch.nn.functional
assert isinstance(draw, torch.Generator)
assert randomness.torch is torch is sys.modules["torch"]
assert "torch._C" in sys.modules
"""
    done = command(folder=tmp_path, code=code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("program", "height"), [("train", 60), ("costs", 60), ("report", 30), ("sync", 30)])
def test_help_fits_one_screen_or_two_with_the_groups(tmp_path, program, height):
    shown = command(
        "--help",
        folder=tmp_path,
        code=f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "src")!r})
runpy.run_path({str(ROOT / "src" / program)!r} + ".py", run_name="__main__")
""",
    ).stdout
    lines = shown.splitlines()
    assert 1 < len(lines) <= height
    assert f"python src/{program}.py" in shown


def test_help_lists_each_group_with_a_description_and_its_options(tmp_path):
    shown = command("--help", folder=tmp_path).stdout
    described = re.findall(r"^([a-z_/]+): \S+ .*\n((?:  .*\n)+)", shown, re.MULTILINE)
    options = {group: set(re.split(r",\s+", choices.strip())) for group, choices in described}
    files = [*config_dir().glob("*/*.yaml"), *config_dir().glob("hydra/*/*.yaml")]
    for file in files:
        assert file.stem in options[str(file.parent.relative_to(config_dir()))]
    assert {file.stem for file in (ROOT / "sweeps").glob("*.yaml")} == options["sweep"]
    assert "$" in shown and "$$" not in shown


# Completion, as a shell asks for it


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("mask=", " ".join(f"mask={file.stem}" for file in sorted((config_dir() / "mask").iterdir()))),
        ("-m sweep=ma", "sweep=main"),
        ("experiment=cifar10_s", "experiment=cifar10_small experiment=cifar10_study"),
        ("training.lr", "training.lr= training.lr_decay="),
    ],
)
def test_groups_and_values_complete(tmp_path, monkeypatch, line, choices):
    monkeypatch.setenv("COMP_LINE", f"python src/train.py {line}")
    assert command("-sc", "query=bash", folder=tmp_path).stdout.split() == choices.split()


def test_bash_itself_completes(tmp_path):
    """What the shell does with the function that --shell-completion prints, when Tab is pressed after mask=rs."""
    script = f"""
PATH={Path(sys.executable).parent}:$PATH
cd {ROOT}
eval "$(python src/train.py -sc install=bash)"
COMP_LINE="python src/train.py mask=rs" COMP_POINT=26 COMP_WORDS=(python src/train.py mask=rs) COMP_CWORD=2
hydra_bash_completion
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True)
    assert done.stdout == "mask=rsm\n", done.stderr


@pytest.mark.parametrize(("method", "name"), [("fedspa", "fedspa-dst-s0.5"), ("fedavg", "fedavg-none-s0.0")])
def test_results_go_to_the_project_from_any_folder(tmp_path, monkeypatch, method, name):
    monkeypatch.chdir(tmp_path)
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("config", [f"method={method}"], return_hydra_config=True)
    assert re.fullmatch(rf"{ROOT}/outputs/[-0-9]+/[-0-9]+_{name}-digits-seed0", config.hydra.run.dir)
    assert config.hydra.sweep.dir == f"{ROOT}/outputs/sweeps"


# Runs


def test_a_run_gets_its_plan_and_its_folder_which_goes_away_if_left_empty(fedspa, tmp_path):
    seen = []
    assert (
        fedspa(lambda plan, folder: seen.append((plan.settings.seed, folder, folder.is_dir())), "seed=3") == 0
    )
    assert seen == [(3, tmp_path / "run", True)]
    assert not (tmp_path / "run").exists()


def test_methods_sweep_each_with_the_mask_it_needs(fedspa):
    seen = []
    task = lambda plan, folder: seen.append(plan.names["mask"])  # noqa: E731
    assert fedspa(task, "-m", "logger=none", "method=fedspa,fedavg") == 0
    assert seen == ["dst", "none"]


def test_a_mistake_that_only_the_run_can_see(fedspa, capsys):
    def task(plan, folder):
        raise UserError("dataset.path=x holds no images.")

    assert fedspa(task) == 2
    assert capsys.readouterr().err == "Error: dataset.path=x holds no images.\n"


def test_a_bug_shows_its_traceback(fedspa, capsys):
    assert fedspa(lambda plan, folder: 1 / 0) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_ctrl_c_ends_a_whole_sweep(fedspa, capsys):
    seen = []

    def task(plan, folder):
        seen.append(plan.settings.seed)
        raise KeyboardInterrupt

    assert fedspa(task, "-m", "logger=none", "seed=0,1") == 130
    assert seen == [0]
    assert capsys.readouterr().err.endswith("Stopped: the same command goes on.\n")


# A reader that goes away, as `head` does


@pytest.mark.parametrize(
    "words",
    [
        "train.py --help",
        "report.py --help",
        "costs.py format=json",
        "train.py hydra.run.dir=run logger=none federation.rounds=2",
    ],
)
def test_no_traceback_where_nobody_reads(tmp_path, words):
    reader, writer = os.pipe()
    os.close(reader)
    program, *settings = words.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "src" / program), *settings],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert not (tmp_path / "run" / "summary.json").exists()
