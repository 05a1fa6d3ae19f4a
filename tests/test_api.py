"""The Python API: runs that are started and read back, many as one table, models, and mistakes."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedspa
from fedspa.api import process
from fedspa.checkpoints.resuming import config_hash_in
from fedspa.export.command import MODELS, Options, export
from fedspa.report.masks import overlap
from fedspa.report.runs import read_runs

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()
TOY: dict[str, Any] = {
    "dataset": {"train_size": 160, "test_size": 80, "image_size": 8, "client_test_images": 10},
    "federation": {"rounds": 2, "clients": 4, "clients_per_round": 2},
    "training": {"epochs": 1},
    "hardware": {"workers": 1},
    "quiet": True,
}


def toy(folder: Path | None, *words: str, **settings: Any) -> fedspa.Run:
    """A small run on synthetic images."""
    return fedspa.run("dataset=synthetic", *words, folder=folder, **TOY | settings)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> fedspa.Run:
    folder = tmp_path_factory.mktemp("runs") / "small"
    return toy(
        folder, "method=fedspa", "metric=[accuracy,macro_f1]", eval={"every": 2}, save={"local": True},
        federation=TOY["federation"] | {"rounds": 3}, finetune={"epochs": 1},
    )  # fmt: skip


def cells(file: Path) -> list[dict[str, float]]:
    with file.open(newline="") as rows:
        return [{key: float(value or "nan") for key, value in row.items()} for row in csv.DictReader(rows)]


# Reading back


@pytest.mark.parametrize("name", ["rounds", "clients", "timing"])
def test_tables_are_the_files_to_the_last_digit(small: fedspa.Run, name: str) -> None:
    table, rows = getattr(small, name), cells(small.folder / f"{name}.csv")
    assert len(table) == len(rows) > 0
    assert list(table.columns) == list(rows[0])
    np.testing.assert_array_equal(table.to_numpy(float), [list(row.values()) for row in rows])


def test_bytes_and_flops_are_whole_numbers_and_scores_floats(small: fedspa.Run) -> None:
    whole = [name for name in small.rounds if "cost/" in name] + ["round", "train/samples"]
    assert len(whole) == 18
    assert all(small.rounds[name].dtype == np.int64 for name in whole)
    assert small.rounds["accuracy/personal"].dtype == np.float64


def test_summary_and_config_are_the_files(small: fedspa.Run) -> None:
    assert small.summary == json.loads((small.folder / "summary.json").read_text())
    assert small.rounds["cost/flops"].iloc[-1] == small.summary["cost/flops"]
    assert small.rounds["accuracy/personal"].iloc[-1] == small.summary["final/accuracy/personal"]
    assert small.config["federation"]["rounds"] == 3
    assert small.config["training"]["epochs"] == 1
    assert small.config["loggers"] == {}
    assert str(small.folder) in repr(small)


def test_load_gives_the_run_that_run_gave(small: fedspa.Run) -> None:
    loaded = fedspa.load(str(small.folder))
    assert isinstance(loaded, fedspa.Run)
    pd.testing.assert_frame_equal(loaded.rounds, small.rounds)
    assert (loaded.summary, loaded.config) == (small.summary, small.config)


def test_keywords_and_words_make_the_same_run(tmp_path: Path) -> None:
    words = (
        "dataset.train_size=160",
        "dataset.test_size=80",
        "dataset.client_test_images=10",
        "federation.rounds=1",
        "federation.clients=4",
        "federation.clients_per_round=2",
        "mask.initial=different",
    )
    told = fedspa.run(
        "dataset=synthetic", "method=fedspa", *words, "sparsity=0.8", "training.optimizer=adamw", "engine=eager",
        "training.optimizer_options={betas:[0.9,0.95]}", "metric=[accuracy,macro_f1]", "hardware.workers=1",
        folder=tmp_path / "words", quiet=True,
    )  # fmt: skip
    named = fedspa.run(
        "dataset=synthetic",
        dataset={"train_size": 160, "test_size": 80, "client_test_images": 10},
        method="fedspa",
        federation={"rounds": np.int64(1), "clients": 4, "clients_per_round": 2},
        mask={"initial": "different"},
        sparsity=np.float64(0.8),
        training={"optimizer": "adamw", "optimizer_options": {"betas": (0.9, 0.95)}},
        metric=("accuracy", "macro_f1"),
        engine="eager",
        hardware={"workers": 1},
        folder=tmp_path / "keywords",
        quiet=True,
    )
    assert named.config == told.config
    assert config_hash_in(named.folder) == config_hash_in(told.folder)
    assert (named.folder / "rounds.csv").read_bytes() == (told.folder / "rounds.csv").read_bytes()


def test_a_run_without_a_folder_gets_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspa.config.schema.project_root", lambda: tmp_path)
    folders = {toy(None, name="mine").folder for _ in range(2)}
    assert len(folders) == 2
    for folder in folders:
        assert folder.parents[1] == tmp_path / "outputs"
        assert "_mine" in folder.name


def test_a_finished_run_is_returned_and_one_that_was_broken_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedspa.tracking.run_folder import RunFolder

    whole = toy(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", _stopped)
        with pytest.raises(KeyboardInterrupt):
            toy(tmp_path / "broken")
    gone_on = toy(tmp_path / "broken", resume="auto")
    assert (gone_on.folder / "rounds.csv").read_bytes() == (whole.folder / "rounds.csv").read_bytes()
    weights = gone_on.folder / "weights.safetensors"
    before = weights.stat().st_mtime_ns
    again = toy(tmp_path / "broken", resume="auto")
    assert weights.stat().st_mtime_ns == before
    assert again.summary == gone_on.summary


def _stopped(*args: object) -> None:
    raise KeyboardInterrupt


def test_quiet_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    toy(tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    toy(tmp_path / "loud", quiet=False)
    assert "2/2" in capfd.readouterr().out


# Models


def test_a_model_predicts_as_the_exported_one(small: fedspa.Run, tmp_path: Path) -> None:
    run = small
    shape = (run.config["dataset"]["channels"], *2 * (run.config["dataset"]["image_size"],))
    pixels = torch.rand(6, *shape, generator=torch.Generator().manual_seed(0))
    trained = int(run.clients["client_updates"].to_numpy().argmax())
    first = run.model(client=trained)
    before = first(pixels)
    for kind in MODELS:
        client = None if kind == "global" else trained
        out = tmp_path / f"{kind}.pt2"
        export(Options(str(run.folder), client, "torch", kind, out))
        exported = torch.export.load(out).module()
        torch.testing.assert_close(run.model(client=client, kind=kind)(pixels), exported(pixels))
    assert torch.equal(first(pixels), before)  # a later model leaves an earlier one as it was
    assert not torch.equal(run.model(client=trained, kind="local")(pixels), before)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, ("a personal model", "client=<number")),
        ({"client": -1}, ("client=-1",)),
        ({"client": 1.5}, ("client=1.5",)),
        ({"client": "0"}, ("client='0'",)),
        ({"client": 4}, ("client=4", "0 to 3")),
        ({"client": 0, "kind": "personel"}, ("kind=personel", "did you mean personal")),
        ({"client": 0, "kind": "finetuned"}, ("kind=finetuned",)),
    ],
)
def test_a_model_that_is_not_there_is_one_sentence(
    small: fedspa.Run, arguments: dict[str, Any], told: tuple[str, ...]
) -> None:
    with pytest.raises(fedspa.UserError) as mistake:
        small.model(**arguments)
    assert all(part in str(mistake.value) for part in told)


def test_a_kind_that_the_method_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    run = toy(tmp_path / "run", method="fedavg")
    with pytest.raises(fedspa.UserError, match="fedavg has no personal model: .* global and local"):
        run.model(client=0)


# Many runs


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of two seeds and two sparsities, and one that has not finished."""
    root = tmp_path_factory.mktemp("study")
    for sparsity, seed in ((0.5, 0), (0.5, 1), (0.8, 0)):
        toy(root / f"s{sparsity}" / str(seed), sparsity=sparsity, seed=seed)
    return root


def test_runs_below_a_folder_are_one_tidy_table(study: Path) -> None:
    table = fedspa.load(study)
    assert list(table.columns) == [
        *("run", "seed", "sparsity", "round", "kind", "metric", "value", "cost/traffic_bytes", "cost/flops")
    ]
    assert table.notna().all(axis=None)
    assert table["sparsity"].dtype == np.float64
    assert all(
        table[name].dtype == np.int64 for name in ("seed", "round", "cost/traffic_bytes", "cost/flops")
    )
    expected = []
    for sparsity, seed in ((0.5, 0), (0.5, 1), (0.8, 0)):
        name = f"s{sparsity}/{seed}"
        for row in cells(study / name / "rounds.csv"):
            for kind in ("global", "personal", "local"):
                head = (name, seed, sparsity, row["round"], kind, "accuracy", row[f"accuracy/{kind}"])
                expected.append((*head, row["cost/traffic_bytes"], row["cost/flops"]))
    assert list(table.itertuples(index=False, name=None)) == expected
    assert len(expected) == 3 * 2 * 3


def test_a_run_that_has_not_finished_is_left_out_with_a_warning(study: Path, tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "study"
    shutil.copytree(study, root)
    (root / "s0.5" / "1" / "summary.json").unlink()
    with pytest.warns(UserWarning, match=r"1 of 3 runs.*s0\.5/1.*has not finished"):
        table = fedspa.load(root)
    assert set(table["run"]) == {"s0.5/0", "s0.8/0"}
    assert "seed" not in table  # it varies no more
    with pytest.raises(fedspa.UserError, match="s0.5/1.*has not finished"):
        fedspa.load(root / "s0.5" / "1")
    for path in (root / "s0.5" / "1", root / "s0.5" / "0", root / "s0.8" / "0"):
        (path / "summary.json").unlink(missing_ok=True)
    with pytest.raises(fedspa.UserError, match="3 runs.*has not finished"):
        fedspa.load(root)


@pytest.mark.parametrize("path", [3, None, b"x", ["a"], object(), Path, "a\0b"])
def test_a_path_of_a_wrong_type_is_one_sentence(path: Any) -> None:
    with pytest.raises(fedspa.UserError, match=r"^path=.* is no path: give a text or a pathlib\.Path\.$"):
        fedspa.load(path)


def test_a_folder_without_runs_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(fedspa.UserError, match=f"{tmp_path} holds no run"):
        fedspa.load(tmp_path)
    with pytest.raises(fedspa.UserError, match="nowhere holds no run"):
        fedspa.load(tmp_path / "nowhere")


def test_methods_with_options_of_their_own_stand_in_one_table(tmp_path: Path) -> None:
    for name, method in (("a", {"proximal": 1.0}), ("b", {"proximal": 0.25}), ("c", None)):
        words = ["method=fedavg"] if method is None else ["method=ditto"]
        options = {"method": method} if method else {}
        toy(tmp_path / name, *words, training={"epochs": 5}, **options)
    table = fedspa.load(tmp_path)
    by_run = table.drop_duplicates("run").set_index("run")
    assert by_run["method"].to_dict() == {"a": "ditto", "b": "ditto", "c": "fedavg"}
    assert by_run["method.proximal"].dropna().to_dict() == {"a": 1.0, "b": 0.25}


def test_every_metric_and_the_finetuned_models_have_their_rows(small: fedspa.Run) -> None:
    table = fedspa.load(small.folder.parent)
    assert set(table["metric"]) == {"accuracy", "macro_f1"}
    assert table[table["kind"] == "global"]["round"].tolist() == [2, 2, 3, 3]
    finetuned = table[table["kind"] == "finetuned"].set_index("metric")
    assert finetuned["round"].tolist() == [3, 3]
    assert finetuned["value"].to_dict() == {
        "accuracy": small.summary["final/accuracy/finetuned"],
        "macro_f1": small.summary["final/macro_f1/finetuned"],
    }
    flops = small.summary["cost/flops_finetune"]
    assert set(finetuned["cost/flops"]) == {small.summary["cost/flops"] + flops} and flops > 0


def test_a_run_of_very_many_clients_reads_back(tmp_path: Path) -> None:
    few = toy(tmp_path / "few")
    many = toy(tmp_path / "many", save={"client_files": 2})
    assert not (many.folder / "clients.csv").exists()
    columns = [name for name in few.clients if not name.startswith("label_")]
    pd.testing.assert_frame_equal(many.clients[columns], few.clients[columns])
    [run] = read_runs({"many": many.folder}).runs
    assert run.label_counts is None
    assert overlap(run) is None


# Mistakes


@pytest.mark.parametrize(
    ("words", "settings", "told"),
    [
        ((), {"sparsty": 0.8}, ("sparsty", "did you mean sparsity")),
        ((), {"sparsity": 1.8}, ("sparsity=1.8",)),
        ((), {"sparsity": "much"}, ("sparsity=much",)),
        ((), {"training": {"lrr": 0.05}}, ("training.lrr", "did you mean lr")),
        ((), {"training": 0.5}, ("training=0.5",)),
        ((), {"training": {"lr": None}}, ("training.lr",)),
        ((), {"mask": {"prune_rte": 0.1}}, ("mask.prune_rte",)),
        ((), {"dataset": "digitz"}, ("dataset=digitz", "did you mean digits")),
        ((), {"dataset": 3}, ("dataset=3",)),
        ((), {"dataset": "digits,mnist"}, ("dataset=digits,mnist",)),
        ((), {"metric": ["accuracy", "macro"]}, ("metric=macro", "did you mean macro_f1")),
        ((), {"seed": object()}, ("seed=", "object")),
        ((), {"dry_run": True}, ("dry_run",)),
        ((), {"sweep": "main"}, ("sweep",)),
        ((), {"precision": "bf16"}, ("did you mean hardware.precision",)),
        (("digits",), {}, ("digits", "key=value")),
        (("dataset=3",), {}, ("dataset=3",)),
        (("seed=0,1",), {}, ("seed=0,1", "several values", "call fedspa.run once for each")),
        ((), {"hydra": {}}, ("hydra={}", "folder=")),
        (("sparsity=0.5",), {"sparsity": 0.8}, ("sparsity", "twice")),
        (("mask=dst",), {"mask": "rsm"}, ("mask", "twice")),
        (("-m",), {}, ("-m",)),
        (("hydra.run.dir=x",), {}, ("hydra.run.dir=x", "folder=")),
        (("~seed",), {}, ("seed",)),
        (({"seed": 1},), {}, ("{'seed': 1}",)),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_setting(
    tmp_path: Path, words: tuple[Any, ...], settings: dict[str, Any], told: tuple[str, ...]
) -> None:
    with pytest.raises(fedspa.UserError) as mistake:
        fedspa.run(*words, folder=tmp_path / "run", **settings)
    text = str(mistake.value)
    assert all(part in text for part in told), text
    assert "\n" not in text
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_called_folder(small: fedspa.Run, tmp_path: Path) -> None:
    with pytest.raises(fedspa.UserError, match=f"^folder={small.folder} holds a run already") as mistake:
        toy(small.folder)
    assert "hydra" not in str(mistake.value)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(fedspa.UserError, match=f"{folder} cannot be written.*folder=<folder>"):
            toy(folder)


def test_an_empty_folder_of_the_users_stays(tmp_path: Path) -> None:
    with pytest.raises(fedspa.UserError, match="resume=nowhere"):
        toy(tmp_path, resume="nowhere")
    assert tmp_path.is_dir()


# The process


def test_importing_fedspa_loads_nothing_that_takes_time() -> None:
    script = (
        "import sys, fedspa\nheavy = {'torch', 'pandas', 'hydra', 'mlflow', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy; assert {'run', 'load', 'Run', 'UserError'} <= set(dir(fedspa)); "
        "fedspa.run; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=_environment(), timeout=120)
    with pytest.raises(AttributeError, match="runn"):
        fedspa.runn  # noqa: B018


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT / "src")}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch computes on two threads of four cores."""
    before = torch.get_num_threads()
    monkeypatch.setattr(process, "usable_cores", lambda: 4)
    process._say_once.cache_clear()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    process._say_once.cache_clear()


def test_where_torch_has_several_threads_a_run_stays_in_one_process_and_says_so_once(
    threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_workers(*args: object) -> None:
        raise AssertionError("forked")

    monkeypatch.setattr("fedspa.runs.assembly.Workers", no_workers)
    with pytest.warns(UserWarning, match="2 threads.*one process.*set_num_threads") as told:
        run = toy(tmp_path / "a", hardware={})
        toy(tmp_path / "b", hardware={})
    assert len([warning for warning in told if "threads" in str(warning.message)]) == 1
    assert Path(told[0].filename) == Path(__file__)
    assert torch.get_num_threads() == 2
    assert run.config["hardware"]["workers"] == 1
    with pytest.raises(fedspa.UserError, match="hardware.workers=3 .*one thread"):
        toy(tmp_path / "c", hardware={"workers": 3})


def test_with_one_thread_workers_do_the_work_without_a_word(tmp_path: Path) -> None:
    alone = toy(tmp_path / "alone")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            shared = toy(tmp_path / "shared", hardware={"workers": 2})
    finally:
        torch.set_num_threads(before)
    assert (shared.folder / "rounds.csv").read_bytes() == (alone.folder / "rounds.csv").read_bytes()


def test_a_caller_who_uses_hydra_keeps_it(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir

    (tmp_path / "own.yaml").write_text("answer: 42")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        with pytest.raises(fedspa.UserError, match="sparsity=2"):
            fedspa.run(sparsity=2)
        assert compose("own").answer == 42


def test_several_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "0",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fedspa.UserError, match="2 ranks"):
        toy(tmp_path / "run")


# The page


def test_the_snippets_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 4
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets:
        exec(compile(snippet, "docs/api.md", "exec"), names)
    assert len(names["table"]["run"].unique()) == 4
    assert names["classes"].shape == (5,)
    assert names["own"].config["method"]["mu"] == 0.5
