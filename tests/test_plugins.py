"""Plug-ins: the template installed beside the wheel and run from anywhere; what goes wrong is told in a sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from fedspa.core.paths import project_root

ROOT = project_root()
TEMPLATE = ROOT / "examples" / "plugin"
SHORT = ("federation.rounds=1", "federation.clients=4", "federation.clients_per_round=2", "training.epochs=1")


def pip(*arguments: str, python: str = sys.executable) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """The wheels of fedspa and of the template."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheels")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT), str(TEMPLATE))
    return folder


@pytest.fixture(scope="module")
def site(wheels, tmp_path_factory) -> Path:
    """Both installed into a folder of their own, beside what this environment has."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), *map(str, wheels.glob("*.whl")))
    return folder


def fedspa(where: Path, *arguments: str, path: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    """`fedspa ...` in the folder `where`, which is outside the clone, with installed packages alone."""
    command = [sys.executable, "-m", "fedspa", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300)


def plugin(
    folder: Path, name: str, option: str = "mask/odd", target: str = "", code: str = "", text: str = ""
) -> Path:
    """A plug-in as pip leaves it: a package with one option, and its entry point.

    `text`: the option's YAML; by default its name and its class.
    """
    yaml = folder / name / "conf" / f"{option}.yaml"
    yaml.parent.mkdir(parents=True)
    yaml.write_text(text or f"name: odd\n_target_: {target or name + '.Odd'}\n")
    (folder / name / "__init__.py").write_text(code)
    facts = folder / f"{name}-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(f"[fedspa.plugins]\n{name} = {name}\n")
    return folder


def refusal(ended: subprocess.CompletedProcess[str]) -> str:
    """The one sentence that a command ended with."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    return line


def test_the_wheel_carries_configs_sweeps_and_every_command(wheels):
    (wheel,) = wheels.glob("fedspa-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "sweeps"):
        assert {f"fedspa/{file.relative_to(ROOT)}" for file in (ROOT / folder).rglob("*.yaml")} <= held
    assert {f"fedspa/commands/{file.name}" for file in (ROOT / "src").glob("*.py")} <= held


def test_the_template_is_installed_and_trained_outside_the_clone(site, tmp_path):
    ended = fedspa(
        tmp_path, "train", "mask=lottery", "mask.share=0.2", "model=one_layer", *SHORT, "logger=none",
        "hydra.run.dir=run", path=(site,),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["mask"], summary["model"]) == ("lottery", "one_layer")
    assert summary["cost/flops_search"] == 0 and summary["cost/traffic_mask_bytes"] > 0
    assert "mask.share=3.0 is out of range" in refusal(
        fedspa(tmp_path, "train", "mask=lottery", "mask.share=3", path=(site,))
    )
    assert {file.name for file in tmp_path.iterdir()} <= {
        "run",
        "outputs",
    }  # below the current directory alone


def test_two_plugins_with_one_option_are_refused_by_name(site, tmp_path):
    both = plugin(plugin(tmp_path / "both", "first"), "second")
    sentence = "Error: Both first and the plug-in second have an option mask/odd: rename one of them"
    assert refusal(fedspa(tmp_path, "train", path=(both, site))).startswith(sentence)
    other = plugin(tmp_path / "other", "third", option="mask/rsm")
    assert "Both fedspa and the plug-in third have an option mask/rsm" in refusal(
        fedspa(tmp_path, "costs", path=(other, site))
    )


@pytest.mark.parametrize(
    ("code", "target", "told"),
    [
        ("raise RuntimeError('no licence')", "", "the module broken fails when it is imported (RuntimeError: no"),
        ("import not_there_at_all", "", "No module named 'not_there_at_all'"),
        ("x = (", "", "the module broken fails when it is imported (SyntaxError:"),
        ("", "", "has no attribute 'Odd'"),
        ("", "elsewhere.Odd", "a package of your own must be named in trusted_packages"),
    ],
)  # fmt: skip
def test_a_broken_plugin_is_told_of_where_it_is_used_and_nowhere_else(site, tmp_path, code, target, told):
    path = (plugin(tmp_path / "site", "broken", target=target, code=code), site)
    line = refusal(fedspa(tmp_path, "costs", "mask=odd", path=path))
    assert told in line and "broken" in line
    if "licence" in code:
        assert fedspa(tmp_path, "costs", *SHORT, path=path).returncode == 0


RSM, FEDAVG = "fedspa.masks.rsm.RSM", "fedspa.methods.fedavg.FedAvg"


@pytest.mark.parametrize(
    ("option", "text", "told"),
    [
        ("mask/odd", f"_target_: {RSM}", "mask.name is missing: it must be the name of the option"),
        ("method/odd", f"# @package _global_\nmethod: {{_target_: {FEDAVG}}}", "method.name is missing: "),
        ("mask/odd", f"name: odd\n_target: {RSM}", "mask._target_ is missing: it must name a class"),
        (
            "method/odd",
            f"defaults: [override /mask: none]\nmethod: {{name: odd, _target_: {FEDAVG}}}",
            "conf/method/odd.yaml lacks the first line '# @package _global_'.",
        ),
        ("metric/odd", "name: odd", "conf/metric/odd.yaml lacks the first line '# @package metrics.odd'."),
        ("logger/odd", "a: {name: a}", "conf/logger/odd.yaml lacks the first line '# @package loggers'."),
    ],
)
def test_a_mistake_in_a_yaml_of_ones_own_is_told_in_one_sentence(tmp_path, option, text, told):
    path = (plugin(tmp_path / "site", "own", option=option, text=text), ROOT / "src")
    group, _, name = option.partition("/")
    word = f"{group}=[{name}]" if group in ("metric", "logger") else f"{group}={name}"
    assert told in refusal(fedspa(tmp_path, "train", word, path=path))


@pytest.mark.parametrize(
    ("above", "field", "told"),
    [
        ("@dataclass(kw_only=True)", "share = limited(0.1)", "the module own fails when it is imported (TypeError: "),
        ("", "share: float = limited(0.1)", "write @dataclass(kw_only=True) above the class Odd."),
    ],
)  # fmt: skip
def test_a_mistake_in_a_class_of_ones_own_is_told_in_one_sentence(tmp_path, above, field, told):
    code = (
        "from dataclasses import dataclass\nfrom fedspa.core.limits import limited\n"
        f"from fedspa.masks.rsm import RSM\n{above}\nclass Odd(RSM):\n    {field}\n"
    )
    path = (plugin(tmp_path / "site", "own", code=code), ROOT / "src")
    assert told in refusal(fedspa(tmp_path, "train", "mask=odd", "+mask.share=0.2", path=path))


def test_a_plugin_whose_package_is_gone_is_left_out_with_a_word(site, tmp_path):
    path = plugin(tmp_path / "site", "gone")
    shutil.rmtree(path / "gone")
    ended = fedspa(tmp_path, "costs", *SHORT, path=(path, site))
    assert ended.returncode == 0
    assert "The plug-in gone is left out: there is no package of that name." in ended.stderr


@pytest.mark.slow
def test_a_fresh_environment(wheels, tmp_path):
    """From the registry, with everything that fedspa asks for."""
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    pip("install", "-c", str(ROOT / "constraints.txt"), *map(str, wheels.glob("*.whl")), python=python)
    command = [str(tmp_path / "env" / "bin" / "fedspa"), "train", "mask=lottery", *SHORT, "hydra.run.dir=run"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "summary.json").exists() and (tmp_path / "mlflow.db").exists()
