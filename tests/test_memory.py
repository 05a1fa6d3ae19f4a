"""Freed memory: kept by the process when asked to, so that a step's pages are not mapped anew."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from fedspa.runs.memory import keep_freed_memory

if sys.platform == "linux":
    import resource

PAGES = 12_000
"""48 MB of 4 KiB pages: a block that glibc always maps for itself and unmaps when it is freed."""


def faults_of_another_use() -> int:
    """Pages that the system maps while a block, used and freed before, is used once more: the least of several."""

    def use() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(PAGES * 1024)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min([use() for _ in range(10)][1:])


def report(link: Connection) -> None:
    left_alone = faults_of_another_use()
    link.send((keep_freed_memory(), left_alone, faults_of_another_use()))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc has the knob")
def test_a_block_that_was_freed_is_used_again_without_new_pages():
    here, there = multiprocessing.Pipe()
    # Not a fork: a run that another test made may have turned the knob in this process already.
    process = multiprocessing.get_context("spawn").Process(target=report, args=(there,))
    process.start()
    kept, left_alone, tuned = here.recv()
    process.join()
    if not kept:
        pytest.skip("another C library than glibc")
    if left_alone < PAGES * 0.9:
        pytest.skip("the system maps larger pages, or keeps them by itself")
    assert tuned < PAGES * 0.01
