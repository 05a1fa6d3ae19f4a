"""What `dry_run=true` says of a single run before its costs."""

from __future__ import annotations

from fedspa.costing.outlook import outlook


def test_a_run_is_told_in_a_screen(plan):
    told = outlook(plan("partition=iid", "logger=csv", "hardware.cores=3"))
    lines = dict(line.split(maxsplit=1) for line in told.splitlines())
    assert lines["data"] == "digits: 1,397 training images of 1 x 8 x 8 in 10 classes, 89.4 kB"
    assert lines["clients"] == "20 by partition=iid, 69 to 70 training images each"
    assert " of which 20 are a client's first" in lines["rounds"]
    assert "mask=dst; tested: global, personal, local models" in lines["method"]
    assert lines["computes"] == "engine=auto, hardware=auto with 3 CPU cores"
    assert lines["results"] == "pictures"
    assert max(map(len, told.splitlines())) <= 120


def test_sizes_that_only_a_run_knows_are_means(plan):
    assert "about 69 to 70 training images each" in outlook(plan("experiment=digits_study"))
