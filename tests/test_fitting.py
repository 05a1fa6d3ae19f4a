"""A data set that does not fit into memory is refused before it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedspa.core.errors import UserError
from fedspa.runs import fitting
from fedspa.runs.fitting import check_fits, free_memory

CPU = torch.device("cpu")


def test_a_data_set_that_is_too_large_is_refused(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = "classes=2 channels=3 image_size=224 train_size=900000 test_size=100000 mean=[0.5] std=[0.5]"
    facts += " test_split=test fingerprint=beef"
    source = plan(
        "dataset=folder", "dataset.name=big", *(f"dataset.{fact}" for fact in facts.split(" "))
    ).dataset
    monkeypatch.setattr(fitting, "free_memory", lambda: 20 * 10**9)
    with pytest.raises(
        UserError,
        match=r"dataset=big: 1,000,000 images of 3 x 224 x 224 take 150.* GB in memory, but this machine has 20.* GB "
        r"left: use a smaller dataset.image_size, or 12.0% of the images by dataset.train_rows and ",
    ):
        check_fits(source, CPU)
    monkeypatch.setattr(fitting, "free_memory", lambda: 168 * 10**9)
    check_fits(source, CPU)
    with pytest.raises(UserError, match=r"take 301\.1 GB in memory"):
        check_fits(source, CPU, processes=2)
    source.augmentation.crop_padding = 4  # takes a copy of the training images
    with pytest.raises(UserError, match=r"take 286\.0 GB in memory"):
        check_fits(source, CPU)
    monkeypatch.setattr(fitting, "free_memory", lambda: None)
    check_fits(source, CPU)


def test_clients_that_are_made_on_demand_always_fit(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "free_memory", lambda: 1)
    check_fits(plan("dataset=synthetic_clients", "federation.clients=1000000").dataset, CPU)
    with pytest.raises(UserError, match=r"has 1.* left: use 0.0% of the images"):
        check_fits(plan().dataset, CPU)


def test_free_memory_is_that_of_the_machine_within_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "CGROUP", tmp_path)
    monkeypatch.setattr(fitting, "MEMINFO", tmp_path / "meminfo")
    assert free_memory() is None
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   50 kB\n")
    assert free_memory() == 50 * 1024
    for name, text in (("max", "max"), ("current", "9000"), ("stat", "anon 1\ninactive_file 2000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory() == 50 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert free_memory() == 3000


def test_without_crops_the_images_are_not_copied(plan: Any) -> None:
    from fedspa.data.pixels import Augmentation, Pixels

    images = plan().dataset.load().train
    pixels = Pixels(images, [0.5], [0.5], Augmentation(flip=True), CPU, torch.float32)
    assert pixels._images.data_ptr() == images.inputs.data_ptr()
