"""Several processes for one run: the same bytes, however many they are, and one end for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import small
from test_resume import TINY, saved_round

from fedspa.core import transfers
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.launch import ALONE, Launch, launched
from fedspa.core.packed_mask import PackedMask
from fedspa.federated.executor import InProcess
from fedspa.masks.dst import DST
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedspa import FedSpa
from fedspa.runs import pickling, rank_group, ranks
from fedspa.runs.experiment import run
from fedspa.runs.pickling import pack, unpack
from fedspa.runs.rank_group import RankGroup, RankLost, on_every_rank
from fedspa.runs.ranks import Ranks, share_out

ROOT = Path(__file__).resolve().parents[1]


def hear(link: Any) -> Any:
    """What a rank says, None where it says nothing."""
    try:
        return link.recv() if link.poll(60) else None
    except EOFError:
        return None


@pytest.fixture
def in_ranks(tmp_path):
    """`in_ranks(2, work)`: what `work(group)` gives in each of two ranks, an exception where it raised one."""

    def start(size: int, work: Callable[[RankGroup], Any]) -> list[Any]:
        context = multiprocessing.get_context("fork")
        store = f"file://{tmp_path}/store-{len(list(tmp_path.iterdir()))}"

        def live(rank: int, link: Any) -> None:
            torch.distributed.init_process_group("gloo", store, world_size=size, rank=rank)
            try:
                link.send(work(RankGroup(rank, size)))
            except Exception as error:
                link.send(error)

        links, processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=live, args=(rank, there))
            process.start()
            there.close()
            links.append(here)
            processes.append(process)
        answers = [hear(link) for link in links]
        for process in processes:
            process.join()
        return answers

    return start


def plain(value: Any) -> Any:
    """A state as values that compare, tensors by their bytes."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, ClientState):
        return {name: plain(item) for name, item in value.items()}
    return value.bits.numpy().tobytes() if isinstance(value, PackedMask) else value


METHODS = {
    "fedspa": lambda: (FedSpa(name="fedspa"), DST(name="dst")),
    "ditto": lambda: (Ditto(name="ditto"), None),
}


@pytest.fixture(params=["cuda", "cpu"])
def apart(request, monkeypatch) -> None:
    """Tensors on this kind of device travel beside all else, as those on GPUs do: "cpu" tries that here."""
    monkeypatch.setattr(pickling, "APART", request.param)


@pytest.mark.parametrize("method", METHODS)
def test_one_two_and_four_ranks_give_the_same_bytes(in_ranks, apart, method):
    def work(group: RankGroup) -> Any:
        def executor(runner):
            own = InProcess(runner)
            return Ranks(own, group, runner.work)

        federation = small(*METHODS[method](), executor=executor)
        records = federation.run()
        tuned = federation.loop.tests.finetune(federation.loop.state, 1)["accuracy"]
        state = federation.loop.state
        scores = [[records[-1].loss, records[-1].scores, records[-1].total_costs], tuned.values.tobytes()]
        return plain(state.weights), {k: plain(v) for k, v in state.clients.items()}, scores

    alone = work(RankGroup())
    for size in (2, 4):
        assert in_ranks(size, work) == [alone] * size


class Answering:
    """An executor whose answers are given, exceptions among them."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self._answers = answers

    def run(self, jobs, weights):
        for job in jobs:
            answer = self._answers.get(job, job)
            if answer == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def close(self):
        pass


def jobs_in_ranks(answers: dict[int, Any]) -> Callable[[RankGroup], Any]:
    """Jobs 0 to 5, equally large: rank 0 of two has the even ones."""
    return lambda group: list(Ranks(Answering(answers), group, lambda job: 1).run(range(6), torch.empty(0)))


@pytest.mark.parametrize("together", [1, 64])
def test_every_rank_gets_every_answer_in_order(in_ranks, apart, monkeypatch, together):
    monkeypatch.setattr(ranks, "TOGETHER", together)
    given = {
        3: ("three", torch.arange(3.0), torch.empty(0), torch.tensor(True), torch.arange(6).view(2, 3).T)
    }
    expected = [str([0, 1, 2, given[3], 4, 5])] * 2
    assert in_ranks(2, lambda group: str(jobs_in_ranks(given)(group))) == expected


def test_all_ranks_raise_what_the_first_job_to_fail_raised(in_ranks):
    mistakes = {index: UserError(f"job {index} cannot be done") for index in (2, 3)}
    for told in in_ranks(2, jobs_in_ranks(mistakes)):
        assert isinstance(told, UserError) and str(told) == "job 2 cannot be done"


def test_a_bug_says_in_which_rank_it_is(in_ranks):
    for told in in_ranks(2, jobs_in_ranks({5: ZeroDivisionError("what")})):
        assert isinstance(told, ZeroDivisionError)
        assert told.__notes__[0].startswith("In rank 1:\n") and "in run" in told.__notes__[0]


def test_a_rank_that_dies_ends_the_others(in_ranks):
    def work(group: RankGroup) -> Any:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return jobs_in_ranks({})(group)

    told, silent = in_ranks(2, work)
    assert isinstance(told, RankLost) and silent is None


@pytest.mark.parametrize(("step", "others"), [("joined", torch.OutOfMemoryError), ("parted", RankLost)])
def test_a_rank_without_memory_for_tensors_says_so(in_ranks, monkeypatch, step, others):
    """It tells all ranks if it cannot send; if it cannot receive, the others notice that it is gone."""
    monkeypatch.setattr(pickling, "APART", "cpu")

    def fail(*tensors: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def work(group: RankGroup) -> Any:
        if group.rank == 1:
            monkeypatch.setattr(transfers, step, fail)
        with group.synchronised():
            group.gather(torch.arange(3.0))

    first, second = in_ranks(2, work)
    assert isinstance(second, torch.OutOfMemoryError) and isinstance(first, others)


def test_what_one_rank_raises_all_raise(in_ranks):
    def work(group: RankGroup) -> Any:
        with group.synchronised():
            if group.rank == 1:
                raise UserError("rank 1 has no data")
        return "went on"

    assert [str(told) for told in in_ranks(3, work)] == ["rank 1 has no data"] * 3


def test_the_first_rank_is_asked_for_all(in_ranks):
    def work(group: RankGroup) -> Any:
        with suppress(UserError):
            group.from_first(refuse)
            return "went on"
        return group.from_first(lambda: f"of {group.rank}")

    def refuse() -> None:
        raise UserError("other settings")

    assert in_ranks(2, work) == ["of 0"] * 2
    assert work(RankGroup()) == "of 0"


def test_a_file_of_the_first_rank_reaches_all(in_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("fedspa.runs.rank_group.PIECE", 1000)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 10)

    def work(group: RankGroup) -> Any:
        read = []
        for path in (file, None):
            with on_every_rank(path if group.main else None, group) as there:
                read.append(there and there.read_bytes())
        return read

    assert in_ranks(2, work) == [[file.read_bytes(), None]] * 2


def test_small_talk(in_ranks):
    def work(group: RankGroup) -> Any:
        return group.broadcast(f"of {group.rank}"), group.gather(group.rank)

    assert in_ranks(2, work) == [("of 0", [0, 1])] * 2
    assert work(RankGroup()) == ("of 0", [0])


def test_jobs_go_to_whoever_has_least_to_do():
    assert share_out([1, 5, 2, 4], ranks=2) == [0, 0, 1, 1]
    assert share_out([3, 3, 3], ranks=4) == [0, 1, 2]
    assert share_out([7, 7, 1], ranks=1) == [0, 0, 0]


def test_a_tensor_travels_once_and_a_view_without_the_rest():
    large = torch.arange(100_000.0)
    packed = pack({"one": large, "two": [large, large[:3]], "three": PackedMask.pack(large > 5)})
    assert len(packed) < 420_000
    again = unpack(packed)
    assert torch.equal(again["one"], large) and again["two"][0] is again["one"]
    assert torch.equal(again["two"][1], large[:3]) and again["three"] == PackedMask.pack(large > 5)


def test_tensors_that_travel_apart_are_no_part_of_the_bytes(monkeypatch):
    monkeypatch.setattr(pickling, "APART", "cpu")
    large, apart = torch.arange(100_000.0), []
    packed = pack({"one": large, "two": [large, "text"]}, apart)
    assert len(packed) < 200 and len(apart) == 1 and apart[0] is large
    again = unpack(packed, [2 * large])
    assert torch.equal(again["one"], 2 * large) and again["two"][0] is again["one"]


@pytest.mark.parametrize(("gpus", "backends"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_tensors_of_gpus_travel_by_nccl(monkeypatch, gpus, backends):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert rank_group._backends() == backends


# How the process was started

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ALONE),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, ALONE),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ALONE),  # a batch script, before any srun
        (TORCHRUN, Launch("torchrun", 3, 4, 2, None)),
        (SRUN, Launch("slurm", 3, 4, 2, 1)),
        ({**SRUN, "SLURM_CPUS_PER_TASK": "8"}, Launch("slurm", 3, 4, 2, 8)),
    ],
)
def test_the_launcher_tells_the_place_of_a_rank(environment, expected):
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({k: v for k, v in SRUN.items() if k != "SLURM_NTASKS_PER_NODE"}, "add --ntasks-per-node"),
        ({**TORCHRUN, "WORLD_SIZE": "5"}, "every machine of a run must have equally many"),
    ],
)
def test_a_launch_of_unequal_machines_is_refused(environment, sentence):
    with pytest.raises(UserError, match=sentence):
        launched(environment)


def test_cores_are_shared_by_the_ranks_of_a_machine():
    assert ALONE.share_of(8) == 8
    assert launched(TORCHRUN).share_of(8) == 4
    assert launched(TORCHRUN).share_of(1) == 1
    assert launched({**SRUN, "SLURM_CPUS_PER_TASK": "3"}).share_of(8) == 3


# Whole commands

SHORT = (*TINY, "federation.rounds=40", "checkpoint.every=5", "save.local=true")


def train(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    if environment:
        program = [sys.executable]
    return subprocess.run(
        [*program, str(ROOT / "src/train.py"), *words],
        cwd=folder, capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.slow
def test_torchrun_gives_one_folder_with_the_bytes_of_one_process(plan, tmp_path):
    """Also where torchrun was asked to end, and the same command goes on."""
    words = (*SHORT, f"hydra.run.dir={tmp_path}/two/${{oc.env:RANK}}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    with subprocess.Popen(
        [*command, str(ROOT / "src/train.py"), *words], cwd=tmp_path, stderr=subprocess.PIPE
    ) as begun:
        rounds = tmp_path / "two/0/rounds.csv"
        while begun.poll() is None and not (rounds.exists() and len(rounds.read_text().splitlines()) > 1):
            time.sleep(0.01)
        begun.terminate()
        begun.communicate()
        assert begun.returncode
    assert saved_round(tmp_path / "two/0") > 0
    done = train(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Goes on after") == done.stdout.count("Everything lies in") == 1
    run(plan(*SHORT, "hardware.workers=1"), tmp_path / "one")
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["0"]
    same = ("rounds.csv", "clients.csv", "partition.json", "weights", "masks", "local_weights")
    for name in (name if "." in name else f"{name}.safetensors" for name in same):
        assert (tmp_path / "two/0" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_speaks_for_all(tmp_path, rank):
    done = train("mask=dts", folder=tmp_path, **TORCHRUN | {"RANK": rank})
    assert done.returncode == 2
    assert done.stderr.count("\n") == (rank == "0")


def test_a_dry_run_is_told_by_the_first_rank_alone(tmp_path):
    done = train("dry_run=true", folder=tmp_path, **TORCHRUN | {"RANK": "1"})
    assert (done.returncode, done.stdout) == (0, "")


def test_several_runs_in_several_ranks_are_refused(tmp_path):
    done = train("-m", "seed=0,1", folder=tmp_path, **TORCHRUN | {"RANK": "0"})
    assert done.returncode == 2
    assert done.stderr.startswith("Error: -m starts runs one after another, but here are 4 ranks")
