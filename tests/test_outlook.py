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
    # 1,797 images of 64 pixels; 26,090 weights, 4 vectors of 4 bytes each; 20 masks of a bit a weight
    assert lines["memory"].startswith("115.0 kB images; 417.4 kB vectors of weights in each process")
    assert "at most 65.2 kB of clients' states" in lines["memory"]
    assert max(map(len, told.splitlines())) <= 160


def test_sizes_that_only_a_run_knows_are_means(plan):
    assert "about 69 to 70 training images each" in outlook(plan("experiment=digits_study"))


def test_memory_of_states_is_that_of_the_method(plan):
    assert "at most 0 B of clients' states" in outlook(plan("method=fedavg"))
    assert f"at most {20 * 26_090 * 4 / 1e6:.1f} MB of clients' states" in outlook(plan("method=local"))
    capped = outlook(plan("method=local", "hardware.state_memory_gb=0.001"))
    assert "at most 1.0 MB of clients' states" in capped
