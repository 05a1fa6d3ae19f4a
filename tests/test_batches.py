"""Batches: exact pixels, exact augmentation, every row once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.data.pixels import Augmentation, Pixels
from fedspa.data.sets import ArraySet

N, SIDE = 23, 7
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def image_set(channels: int = 3, seed: int = 0) -> ArraySet:
    source = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (N, channels, SIDE, SIDE), generator=source, dtype=torch.uint8)
    return ArraySet(images, torch.arange(N) % 5)


def pixels(
    augmentation: Augmentation | None = None, channels: int = 3, dtype: torch.dtype = torch.float64
) -> Pixels:
    mean, std = MEAN[:channels], STD[:channels]
    return Pixels(image_set(channels), mean, std, augmentation or Augmentation(), "cpu", dtype)


def by_hand(image: np.ndarray, draw: list[int], augmentation: Augmentation) -> np.ndarray:
    """One image [C, H, W] through pad, crop, flip, normalise and cutout, one step after the other."""
    dy, dx, flip, cy, cx = draw
    pad, hole = augmentation.crop_padding, augmentation.cutout
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
    cropped = padded[:, dy : dy + SIDE, dx : dx + SIDE]
    flipped = cropped[:, :, ::-1] if flip else cropped
    channels = len(image)
    centre, spread = (np.array(values[:channels])[:, None, None] for values in (MEAN, STD))
    result = (flipped / 255 - centre) / spread
    top, left = cy - hole // 2, cx - hole // 2
    result[:, max(top, 0) : max(top + hole, 0), max(left, 0) : max(left + hole, 0)] = 0
    return result


@pytest.mark.parametrize("channels", [1, 3])
@given(st.integers(0, SIDE - 1), st.booleans(), st.integers(0, SIDE), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_augmentation_equals_the_steps_by_hand(
    channels: int, padding: int, flip: bool, cutout: int, seed: int
) -> None:
    augmentation = Augmentation(crop_padding=padding, flip=flip, cutout=cutout)
    ours = pixels(augmentation, channels)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(N, (6,), generator=generator)
    draws = ours.draw(6, generator)
    batch = ours.batch(rows, draws)
    assert (draws is None) == (not augmentation.active)
    plain = torch.tensor([[padding, padding, 0, 0, 0]] * 6) if draws is None else draws
    for image, row, draw in zip(batch.inputs, rows, plain.tolist(), strict=True):
        expected = by_hand(image_set(channels).inputs[row].numpy(), draw, augmentation)
        np.testing.assert_allclose(image.numpy(), expected, atol=1e-12)


def test_batches_are_normalised_channels_last_and_labelled() -> None:
    ours = pixels(dtype=torch.float32)
    batch = ours.batch(torch.tensor([4, 0, 11]), None)
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert batch.targets.tolist() == [4, 0, 1]
    centre, spread = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    expected = (image_set().inputs[[4, 0, 11]] / 255 - centre) / spread
    torch.testing.assert_close(batch.inputs, expected, atol=1e-6, rtol=1e-5)
    assert pixels(dtype=torch.bfloat16).batch(torch.tensor([0]), None).inputs.dtype == torch.bfloat16


def test_one_mean_serves_all_channels() -> None:
    one = Pixels(image_set(), [0.5], [0.2], Augmentation(), "cpu", torch.float64)
    three = Pixels(image_set(), [0.5] * 3, [0.2] * 3, Augmentation(), "cpu", torch.float64)
    rows = torch.arange(N)
    assert torch.equal(one.batch(rows, None).inputs, three.batch(rows, None).inputs)


def test_draws_cover_their_ranges() -> None:
    ours = pixels(Augmentation(crop_padding=2, flip=True, cutout=3))
    draws = ours.draw(2000, torch.Generator().manual_seed(0))
    assert draws is not None and draws.min(0).values.tolist() == [0] * 5
    assert draws.max(0).values.tolist() == [4, 4, 1, SIDE - 1, SIDE - 1]


@pytest.mark.parametrize("drop_last, sizes", [(False, [4, 4, 2]), (True, [4, 4])])
def test_an_epoch_gives_every_row_once(drop_last: bool, sizes: list[int]) -> None:
    rows = torch.tensor([3, 20, 7, 1, 9, 14, 2, 22, 5, 11])
    ours = pixels()
    batches = list(ours.epoch(rows, 4, torch.Generator().manual_seed(1), drop_last))
    assert [len(batch.targets) for batch in batches] == sizes
    seen = torch.cat([batch.inputs for batch in batches]).flatten(1)
    whole = ours.batch(rows, None).inputs.flatten(1)
    matches = (seen[:, None] == whole[None]).all(2)
    assert (matches.sum(1) == 1).all() and matches.sum(0).max() == 1
    assert not torch.equal(seen, whole[: len(seen)])  # shuffled


def test_an_epoch_is_a_function_of_its_generator() -> None:
    ours = pixels(Augmentation(crop_padding=2, flip=True))
    rows = torch.arange(N)

    def images(seed: int) -> torch.Tensor:
        return torch.cat([b.inputs for b in ours.epoch(rows, 8, torch.Generator().manual_seed(seed))])

    assert torch.equal(images(5), images(5))
    assert not torch.equal(images(5), images(6))


def test_the_batch_size_changes_no_image() -> None:
    ours = pixels(Augmentation(crop_padding=2, flip=True))
    small, large = (
        torch.cat([b.inputs for b in ours.epoch(torch.arange(N), size, torch.Generator().manual_seed(0))])
        for size in (3, 16)
    )
    assert torch.equal(small, large)


def test_evaluation_goes_in_order_and_unaugmented() -> None:
    ours = pixels(Augmentation(crop_padding=3, flip=True, cutout=4))
    rows = torch.tensor([5, 2, 2, 19, 0])
    batches = list(ours.in_order(rows, 2))
    assert torch.cat([batch.targets for batch in batches]).tolist() == [0, 2, 2, 4, 0]
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), pixels().batch(rows, None).inputs)
