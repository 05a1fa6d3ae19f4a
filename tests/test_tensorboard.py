"""A run as TensorBoard reads it from its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tracking_runs import run_info, run_record, run_result

from fedspa.core.errors import UserError
from fedspa.tracking import tensorboard
from fedspa.tracking.fanout import Trackers
from fedspa.tracking.run_folder import RunFolder
from fedspa.tracking.tensorboard import TensorBoard


def shown(folder: Path, name: str) -> list[tuple[int, float]]:
    """The points (step, value) of a curve, of all files together, and none of them purged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False)
    read.Reload()
    return [(point.step, point.value) for point in read.Scalars(name)]


def begun(folder: Path, rounds: range) -> Trackers:
    trackers = Trackers([RunFolder(replace=True), TensorBoard()])
    trackers.start(run_info(folder, completed=rounds.start - 1))
    for round in rounds:
        trackers.round(run_record(round))
    return trackers


def test_a_finished_run_reads_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.fromarray(np.full((2, 3, 3), 128, dtype=np.uint8)).save(tmp_path / "accuracy.png")
    begun(tmp_path, range(1, 5)).finish(run_result())
    assert shown(tmp_path, "accuracy/global") == [(1, 31), (2, 32), (3, 33), (4, 34)]
    assert shown(tmp_path, "final/accuracy/finetuned") == [(4, 60)]
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(image.width, image.height) for image in read.Images("pictures/accuracy")] == [(3, 2)]
    (config,) = read.Tensors("config/text_summary")
    assert b"name: fedspa-dst-s0.5-digits-seed0" in config.tensor_proto.string_val[0]


def test_a_resumed_run_has_every_round_once(tmp_path: Path) -> None:
    """Broken off after round 3, gone on with from the checkpoint of round 1; broken off again, gone on with again."""
    begun(tmp_path, range(1, 4)).abort("KILLED", "the power failed")
    begun(tmp_path, range(2, 5)).abort("KILLED", "again")
    begun(tmp_path, range(4, 5)).finish(run_result())
    assert shown(tmp_path, "accuracy/global") == [(1, 31), (2, 32), (3, 33), (4, 34)]


def test_a_run_that_begins_anew_leaves_nothing_of_its_first_start(tmp_path: Path) -> None:
    begun(tmp_path, range(1, 4)).abort("KILLED", "before its first checkpoint")
    begun(tmp_path, range(1, 2)).abort("KILLED", "")
    assert shown(tmp_path, "accuracy/global") == [(1, 31)]


def test_an_abort_before_the_start_does_nothing() -> None:
    TensorBoard().abort("FAILED", "no data")


def test_without_tensorboard_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"loggers.tensorboard needs TensorBoard: pip install 'fedspa\[tensorboard\]'"
    ):
        TensorBoard()


def test_mlflow_and_tensorboard_go_together(plan) -> None:
    assert list(plan("logger=[mlflow,tensorboard]").loggers) == ["pictures", "mlflow", "tensorboard"]
