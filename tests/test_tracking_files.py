"""What a run leaves as files, what it shows on a terminal, and how several trackers act as one."""

from __future__ import annotations

import csv
import io
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from omegaconf import OmegaConf
from tracking_runs import COSTS, faulty_records, run_info, run_record, run_result, times

from fedspa.core import names
from fedspa.core.errors import UserError
from fedspa.core.paths import project_root
from fedspa.core.records import RoundRecord, TheoryRow
from fedspa.core.tracker import RunInfo, RunResult
from fedspa.costs.units import show_bytes, show_flops, show_time
from fedspa.tracking.console import ConsoleView
from fedspa.tracking.drawing import spread_out
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.pictures import Pictures, partition_picture, score_picture, theory_picture
from fedspa.tracking.run_folder import RoundReader, RunFolder


def whole_run(folder: Path) -> Path:
    tracker = RunFolder()
    tracker.start(run_info(folder))
    for round in range(1, 5):
        tracker.round(run_record(round, evaluated=round % 2 == 0))
    tracker.finish(run_result())
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The run's folder


def test_rounds_read_back_as_the_same_floats(tmp_path: Path) -> None:
    rows = rows_of(whole_run(tmp_path) / "rounds.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
    third = rows[2]
    assert float(third["train/loss"]) == 1 / 3
    assert float(third["train/learning_rate"]) == 0.1 * 0.998**2
    assert float(third["round_cost/flops_train"]) == COSTS.train_flops
    assert float(third["cost/flops"]) == times(COSTS, 3).flops
    assert int(third["cost/traffic_bytes"]) == 3 * 6125
    assert int(third["round_cost/traffic_down_bytes"]) == 4000
    assert int(third["cost/traffic_dense_bytes"]) == 3 * 12000
    assert [third[f"train/{name}"] for name in ("participants", "samples", "prune_rate")] == [
        "2",
        "500",
        "0.5",
    ]
    assert float(third["accuracy/local"]) == 51.0
    assert third["accuracy/local/clients"] == "2"


def test_tensors_are_listed_in_the_order_of_the_flat_weights(tmp_path: Path) -> None:
    assert (whole_run(tmp_path) / "tensors.csv").read_text().splitlines() == [
        "tensor,shape,parameters",
        "fc.weight,2x2,4",
        "fc.bias,2,2",
    ]


def test_a_kind_that_was_not_tested_is_blank(tmp_path: Path) -> None:
    rows = rows_of(whole_run(tmp_path) / "rounds.csv")
    assert [row["accuracy/global"] for row in rows] == ["", "32", "", "34"]


def test_every_round_is_on_disk_at_once(tmp_path: Path) -> None:
    tracker = RunFolder()
    tracker.start(run_info(tmp_path))
    for round in range(1, 4):
        tracker.round(run_record(round))
        assert len(rows_of(tmp_path / "rounds.csv")) == len(rows_of(tmp_path / "timing.csv")) == round
    tracker.abort("KILLED", "interrupted")
    assert not (tmp_path / "summary.json").exists()


def test_events_have_a_row_each_and_a_round_without_training_no_loss(tmp_path: Path) -> None:
    tracker = RunFolder()
    tracker.start(run_info(tmp_path))
    assert (tmp_path / "events.csv").read_text() == "round,client,kind,action,detail\n"
    for record in faulty_records():
        tracker.round(record)
    assert (tmp_path / "events.csv").read_text().splitlines()[1:] == [
        "1,0,dropout,skipped,Client 0 in round 1: dropout.",
        "1,2,dropout,skipped,Client 2 in round 1: dropout.",
        "2,0,late,skipped,Client 0 in round 2: late.",
        "2,2,dropout,skipped,Client 2 in round 2: dropout.",
        "3,,empty_round,skipped,Client None in round 3: empty_round.",
    ]
    assert [row["train/loss"] for row in rows_of(tmp_path / "rounds.csv")] == ["1.0", "0.5", ""]


def test_wall_clock_is_in_timing_alone_and_the_rest_has_the_same_bytes(tmp_path: Path) -> None:
    first, second = whole_run(tmp_path / "a"), whole_run(tmp_path / "b")
    assert rows_of(first / "timing.csv")[0] == {
        "round": "1", "time/train_s": "0.4", "time/search_s": "", "time/evaluate_s": "", "time/aggregate_s": "",
        "time/total_s": "0.5",
    }  # fmt: skip
    assert not [name for name in rows_of(first / "rounds.csv")[0] if name.endswith("_s")]
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_clients_have_a_row_each(tmp_path: Path) -> None:
    rows = rows_of(whole_run(tmp_path) / "clients.csv")
    assert rows[0] == {
        "client": "0", "train_size": "3", "val_size": "0", "test_size": "2", "client_updates": "4", "density": "0.5",
        "accuracy/global": repr(1 / 3), "accuracy/personal": "50.0", "accuracy/local": "75.0",
        "label_0": "2", "label_1": "1",
    }  # fmt: skip
    assert rows[1]["accuracy/local"] == ""


def test_config_partition_and_summary(tmp_path: Path) -> None:
    whole_run(tmp_path)
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == run_info(tmp_path).config
    partition = json.loads((tmp_path / "partition.json").read_text())
    assert partition["train_rows"] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert (partition["hash"], partition["seed"], partition["settings"]["name"]) == ("beef", 0, "iid")
    assert json.loads((tmp_path / "summary.json").read_text()) == run_result().summary


def test_tensors_read_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole_run(tmp_path)
    weights, masks = load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "masks.safetensors")
    assert torch.equal(weights["fc.weight"], torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert torch.equal(weights["fc.bias"], torch.tensor([4.0, 5.0]))
    assert masks["client_0"].dtype == torch.uint8 and masks["client_0"].tolist() == [0b10110000]
    assert not (tmp_path / "local_weights.safetensors").exists()


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    whole_run(tmp_path)
    before = (tmp_path / "rounds.csv").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        RunFolder().start(run_info(tmp_path))
    assert (tmp_path / "rounds.csv").read_bytes() == before


# The console


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def console_lines(rounds: int, seconds_a_round: float, folder: Path) -> list[str]:
    output, clock = io.StringIO(), Clock()
    view = ConsoleView(output, clock)
    view.start(run_info(folder, rounds=rounds))
    for round in range(1, rounds + 1):
        clock.now += seconds_a_round
        view.round(run_record(round))
    return [line for line in output.getvalue().splitlines() if f"/{rounds} " in line]


def test_plain_lines_are_few(tmp_path: Path) -> None:
    fast = console_lines(1000, 0.01, tmp_path)
    assert len(fast) == 20 and fast[-1].split()[0] == "1000/1000"
    assert len(console_lines(1000, 2.0, tmp_path)) == 200  # one each 10 s
    assert len(console_lines(3, 60.0, tmp_path)) == 3


def test_a_plain_line_says_how_it_stands(tmp_path: Path) -> None:
    line = console_lines(4, 1.0, tmp_path)[1]
    assert line.split() == ["2/4", "32.0", "42.0", "50.7", "1.0k", "12.2", "kB", "1.0", "s"]


def test_a_line_is_blank_where_no_client_has_a_score(tmp_path: Path) -> None:
    output, record = io.StringIO(), run_record(1)
    view = ConsoleView(output)
    view.start(run_info(tmp_path, rounds=1))
    view.round(replace(record, scores={kind: {} for kind in record.scores}))
    assert next(line for line in output.getvalue().splitlines() if "1/1 " in line).split()[1:4] == ["-"] * 3


def test_the_end_names_every_kind_and_the_saving_in_80_columns(tmp_path: Path) -> None:
    output = io.StringIO()
    view = ConsoleView(output)
    view.start(run_info(tmp_path))
    view.round(run_record(1))
    view.finish(run_result())
    text = output.getvalue()
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["global"] == ["34.00", "±", "1.50", "31.00", "3"]
    assert rows["local"] == ["51.25", "±", "1.50", "48.25", "2"]
    assert rows["finetuned"][0] == "60.00"
    assert rows["traffic"] == ["24.5", "kB", "48.0", "kB", "49.0", "%"]
    assert rows["FLOPs"] == ["1.373e12", "2.000e12", "31.3", "%"]
    assert "Took 2.0 s at 1.0k samples/s." in text
    assert all(len(line) <= 80 for line in text.splitlines() if "Everything lies in" not in line)


def test_a_method_without_a_kind_has_no_row_for_it(tmp_path: Path) -> None:
    output = io.StringIO()
    view = ConsoleView(output)
    view.start(run_info(tmp_path))
    view.finish(run_result(finetuned=False))
    assert "finetuned" not in output.getvalue()
    assert "Density: 0.5 asked, 0.4 to 0.5 measured." in output.getvalue()


def test_of_each_kind_of_event_the_first_is_said_and_all_are_counted(tmp_path: Path) -> None:
    view, shown = ConsoleView(file := io.StringIO()), run_result()
    view.start(run_info(tmp_path, rounds=3))
    for record in faulty_records():
        view.round(record)
    shown.summary.update(names.faults(faulty_records()[-1].total_events))
    view.finish(shown)
    text = file.getvalue()
    assert text.count("Client 0 in round 1: dropout.") == text.count("Client 0 in round 2: late.") == 1
    assert text.count("dropout.") == 1
    assert "Events: 3 dropout, 1 late, 1 empty_round" in text


def test_an_early_end_is_said_with_the_reason_and_the_folder(tmp_path: Path) -> None:
    output = io.StringIO()
    view = ConsoleView(output)
    view.start(run_info(tmp_path / "run [1]"))
    view.round(run_record(2))
    view.abort("KILLED", "interrupted")
    assert "Stopped after 2 of 4 rounds: interrupted" in output.getvalue()
    assert "run [1]" in output.getvalue()  # brackets are no markup


def test_a_terminal_gets_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    output = Terminal()
    view = ConsoleView(output)
    view.start(run_info(tmp_path))
    view.round(run_record(2))
    view.abort("FAILED", "the disk is full")
    text = output.getvalue()
    assert "2/4      32.0      42.0      50.7       1.0k   12.2 kB      1.0 s" in text
    assert "Failed after 2 of 4 rounds: the disk is full" in text


def test_units() -> None:
    assert [show_bytes(n) for n in (0, 999, 1500, 369.2e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "369.2 GB",
        "2.0 TB",
    ]
    assert [show_time(s) for s in (0, 2.52, 75.4, 750, 114_000, 4.464e6)] == [
        "0.0 s",
        "2.5 s",
        "75 s",
        "12.5 min",
        "31.7 h",
        "1,240 h",
    ]
    assert show_flops(172.9e14) == "1.729e16" and show_flops(0) == "0"


# Pictures


def test_pictures_are_drawn_however_the_run_ends(tmp_path: Path) -> None:
    for end in ("finish", "abort"):
        folder = tmp_path / end
        pictures = Trackers([RunFolder(), Pictures()])
        pictures.start(run_info(folder))
        pictures.round(run_record(1))
        pictures.finish(run_result()) if end == "finish" else pictures.abort("FAILED", "")
        for name in ("partition.png", "accuracy.png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_theory_is_drawn_where_there_is_some(tmp_path: Path) -> None:
    rows = [TheoryRow(0, 4.0, 0.5, 0.25, None), TheoryRow(1, 1.0, 0.0, 0.125, 3.0)]
    norm, masks, ratio = theory_picture(rows).axes
    lines = [line.get_xydata().tolist() for axes in (norm, masks, ratio) for line in axes.lines]
    assert lines == [
        [[0, 4], [1, 1]],
        [[0, 50], [1, 0]],
        [[0, 25], [1, 12.5]],
        [[1, 3]],
    ]  # p where it is known
    pictures = Trackers([RunFolder(), Pictures()])
    pictures.start(run_info(tmp_path))
    pictures.round(run_record(1))
    pictures.finish(replace(run_result(), theory=rows))
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")


def test_each_curve_is_named_at_its_end() -> None:
    figure = score_picture({"local": [(1, 20.0, 5.0), (9, 74.2, 5.0)], "global": [(9, 63.4, 5.0)]}, "a run")
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"local 74.2", "global 63.4"} <= texts


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (5, 10), (200, 100)])
def test_the_partition_shows_every_client_and_class(clients: int, classes: int) -> None:
    counts = np.arange(clients * classes).reshape(clients, classes)
    sizes, cells = partition_picture(counts).axes[:2]
    assert cells.images[0].get_size() == (classes, clients)
    assert [bar.get_height() for bar in sizes.patches if isinstance(bar, Rectangle)] == counts.sum(
        axis=1
    ).tolist()


def test_labels_do_not_overlap() -> None:
    assert spread_out([10.0, 50.0], 5, top=100) == [10.0, 50.0]
    assert spread_out([50.0, 50.0], 5, top=100) == [47.5, 52.5]
    assert spread_out([98.0, 99.0, 100.0], 5, top=100) == [90.0, 95.0, 100.0]


def test_the_name_of_a_large_error_stands_at_the_end_of_its_line() -> None:
    figure = score_picture({"global": [(1, 500.0, 1.0), (2, 400.0, 1.0)]}, "a regression", "mse")
    assert [label.xyann for label in figure.axes[0].texts if label.get_text() == "global 400"] == [(10, 0)]
    assert [label.xy[1] for label in figure.axes[0].texts if label.get_text() == "global 400"] == [400.0]


# Several trackers as one


class Spy:
    def __init__(self, calls: list[str], name: str, fails_in: str = "") -> None:
        self.calls, self.name, self.fails_in = calls, name, fails_in

    def _called(self, what: str) -> None:
        self.calls.append(f"{self.name}.{what}")
        if what == self.fails_in:
            raise OSError(f"no {what}")

    def start(self, info: RunInfo) -> None:
        self._called("start")

    def round(self, record: RoundRecord) -> None:
        self._called("round")

    def finish(self, result: RunResult) -> None:
        self._called("finish")

    def abort(self, status: str, reason: str) -> None:
        self._called("abort")


def test_calls_go_to_all_in_order(tmp_path: Path) -> None:
    calls: list[str] = []
    trackers = Trackers([Spy(calls, "a"), Spy(calls, "b")])
    trackers.start(run_info(tmp_path))
    trackers.round(run_record(1))
    trackers.finish(run_result())
    assert calls == ["a.start", "b.start", "a.round", "b.round", "a.finish", "b.finish"]


def broken_off(folder: Path) -> None:
    """A run of four rounds that broke off in its third, while a row was written."""
    trackers = Trackers([RunFolder(), Pictures()])
    trackers.start(run_info(folder))
    for round in (1, 2, 3):
        trackers.round(faulty_records()[round - 1])
    trackers.abort("KILLED", "interrupted")
    for name in ("rounds.csv", "timing.csv", "events.csv"):
        with (folder / name).open("a") as file:
            file.write('1,"torn')


def test_trackers_that_go_on_leave_what_uninterrupted_ones_leave(tmp_path: Path) -> None:
    def finish(trackers: Trackers, rounds: range) -> None:
        trackers.start(run_info(tmp_path / "run", completed=rounds.start - 1))
        for round in rounds:
            trackers.round(faulty_records()[round - 1])
        trackers.finish(run_result())

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}

    shown = io.StringIO()
    broken_off(tmp_path / "run")
    finish(Trackers([RunFolder(), Pictures(), ConsoleView(shown)]), range(3, 4))
    resumed = files()
    assert "Goes on after round 2" in shown.getvalue()
    (tmp_path / "run").rename(tmp_path / "resumed")
    finish(Trackers([RunFolder(), Pictures()]), range(1, 4))
    assert resumed == files()


def test_tables_that_cannot_go_on_are_refused(tmp_path: Path) -> None:
    broken_off(tmp_path)
    whole = (tmp_path / "rounds.csv").read_bytes()
    for content, sentence in [
        (whole[: whole.index(b"\n2,")], "rounds.csv is shorter than when"),
        (whole.replace(b"learning_rate", b"learningXrate"), "rounds.csv has other columns"),
    ]:
        (tmp_path / "rounds.csv").write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            RunFolder().start(run_info(tmp_path, completed=2))
        assert (tmp_path / "rounds.csv").read_bytes() == content


def test_rounds_are_read_as_they_are_written(tmp_path: Path) -> None:
    tracker, reader = RunFolder(), RoundReader(tmp_path)
    assert list(reader.new()) == []
    tracker.start(run_info(tmp_path))
    first, second, third = faulty_records()
    tracker.round(first)
    [(round, seconds, values)] = reader.new()
    assert (round, seconds) == (1, 0.5) and values["accuracy/global"] == 31 and values["faults/dropout"] == 2
    assert values["cost/traffic_MB"] == 0.006125 and values["time/total_s"] == 0.5
    tracker.round(second)
    tracker.round(third)
    with (tmp_path / "rounds.csv").open("a") as file:
        file.write("4,1.5,")  # a row that is being written
    found = list(reader.new())
    assert [(round, values["faults/dropout"]) for round, _, values in found] == [(2, 3), (3, 3)]
    assert "train/loss" not in found[-1][2] and found[-1][1] == 1.5


def test_a_round_waits_for_its_seconds(tmp_path: Path) -> None:
    """As in a copy of the folder that was made during the run."""
    tracker, timing = RunFolder(), tmp_path / "timing.csv"
    tracker.start(run_info(tmp_path))
    for record in faulty_records():
        tracker.round(record)
    whole = timing.read_bytes()
    timing.write_bytes(whole[: whole[:-1].rfind(b"\n") + 1])
    reader = RoundReader(tmp_path)
    assert [round for round, *_ in reader.new()] == [1, 2]
    timing.write_bytes(whole)
    assert [round for round, *_ in reader.new()] == [3]


def test_only_started_trackers_are_aborted_and_all_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    trackers = Trackers([Spy(calls, "a", "abort"), Spy(calls, "b", "start"), Spy(calls, "c")])
    with pytest.raises(OSError, match="no start"):
        trackers.start(run_info(tmp_path))
    with caplog.at_level(logging.WARNING):
        trackers.abort("FAILED", "no start")
    assert calls == ["a.start", "b.start", "a.abort", "b.abort"]
    assert "no abort" in caplog.text


def test_the_project_root_is_the_clone_or_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedspa.core.paths

    (tmp_path / "conf").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(fedspa.core.paths, "__file__", str(tmp_path / "src" / "fedspa" / "paths.py"))
    assert project_root() == tmp_path.resolve()
    (tmp_path / "pyproject.toml").unlink()
    monkeypatch.chdir(tmp_path / "conf")
    assert project_root() == Path.cwd()
