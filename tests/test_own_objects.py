"""`fedspa.Federation`: a user's own arrays, model, method and searcher, from the first round to a resumed run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedspa
from fedspa.api.objects import describe, source_hash
from fedspa.checkpoints.resuming import config_hash_in
from fedspa.core.client import Client, ClientUpdate
from fedspa.core.server import ServerState
from fedspa.masks.base import MaskSearcher
from fedspa.masks.search_input import SearchInput
from fedspa.methods.base import Method
from fedspa.methods.fedspa import FedSpa

ROOT = Path(__file__).resolve().parents[1]
NAMES = np.array(["ann", "bob", "eve", "joe"])
INPUTS = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
TARGETS = (INPUTS[:, 0] > INPUTS[:, 1]).astype(int)
CLIENTS = NAMES[np.arange(120) % 4]


@dataclass(kw_only=True)
class Slow(Method):
    """FedAvg that takes a share of each step."""

    share: float = 0.5

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights)
        return ClientUpdate(update=self.share * (client.weights - trained.weights), local=trained.weights)


class Shuffle(MaskSearcher):
    """Draws each tensor's mask anew."""

    needs_gradient = False

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def searching(self, round: int) -> bool:
        return round % self.every == 0

    def next_mask(self, search: SearchInput) -> torch.Tensor:
        if not self.searching(search.round):
            return search.mask
        pieces = search.space.split(search.mask)
        return torch.cat([piece[torch.randperm(len(piece), generator=search.generator)] for piece in pieces])


def mlp(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


TOY: dict[str, Any] = {
    "data": (INPUTS, TARGETS), "clients": CLIENTS, "model": mlp, "method": Slow(share=0.7), "rounds": 3,
    "clients_per_round": 2, "epochs": 1, "batch_size": 8, "hardware": {"workers": 1},
}  # fmt: skip


def toy(folder: Path | None = None, **arguments: Any) -> fedspa.Federation:
    return fedspa.Federation(folder=folder, **TOY | arguments)


def left(folder: Path) -> tuple[bytes, dict[str, bytes]]:
    weights = load_file(folder / "weights.safetensors")
    rounds = (folder / "rounds.csv").read_bytes()
    return rounds, {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fedspa.Run:
    return toy(tmp_path_factory.mktemp("own") / "whole").run()


def test_a_run_records_what_its_objects_are(whole: fedspa.Run) -> None:
    config = whole.config
    assert config["method"] == {
        "name": "Slow", "python_class": f"{__name__}.Slow", "weighting": "samples", "normaliser": "participants",
        "share": 0.7, "source_hash": source_hash(Slow),
    }  # fmt: skip
    assert config["model"]["python_class"] == f"{__name__}.mlp"
    assert "in_features=6" in config["model"]["layers"]
    assert whole.summary["method"] == "Slow"
    assert (config["sparsity"], config["mask"]["name"], config["federation"]["clients"]) == (0.0, "none", 4)
    assert config_hash_in(whole.folder) == whole.summary["config_hash"]


def test_each_difference_of_an_object_is_another_experiment(whole: fedspa.Run, tmp_path: Path) -> None:
    module = mlp()
    other = mlp()
    hashes = [whole.summary["config_hash"]]
    for arguments in (
        {"method": Slow(share=0.6)},
        {"method": FedSpa(), "mask": Shuffle(1), "sparsity": 0.5},
        {"method": FedSpa(), "mask": Shuffle(2), "sparsity": 0.5},
        {"method": "fedavg"},
        {"data": (INPUTS + 1, TARGETS)},
        {"clients": CLIENTS[::-1]},
        {"model": module},
        {"model": other},
        {"model": lambda: mlp()},
        {"lr": 0.2},
    ):
        hashes.append(toy(**arguments)._plan.config_hash)
    assert len(set(hashes)) == len(hashes)
    assert toy(model=module)._plan.config_hash == toy(model=module)._plan.config_hash


def test_the_source_of_a_class_is_part_of_its_hash() -> None:
    def made(body: str) -> Any:
        names: dict[str, Any] = {"__name__": "elsewhere"}
        exec(f"class Mine:\n    scale = 1\n    def go(self, x):\n        return {body}", names)
        return names["Mine"]

    assert source_hash(made("x + 1")) == source_hash(made("x + 1")) != source_hash(made("x + 2"))
    thing = made("x")()
    thing.table, thing.inner = np.arange(3), made("x")()
    node = describe(thing)
    assert node["table"].startswith("int64[3] ")
    assert node["inner"] == describe(made("x")())
    assert (node["name"], node["python_class"]) == ("Mine", "elsewhere.Mine")
    thing.table[0] = 5
    assert describe(thing)["table"] != node["table"]


def test_a_loop_that_is_left_goes_on_in_the_next(whole: fedspa.Run, tmp_path: Path) -> None:
    federation = toy(tmp_path / "run")
    seen = []
    for record in federation:
        seen.append(record["round"])
        if record["round"] == 2:
            break
    with pytest.raises(fedspa.UserError, match="accuracy/globl.*did you mean accuracy/global"):
        record["accuracy/globl"]
    assert not (tmp_path / "run" / "summary.json").exists()
    for record in federation:
        seen.append(record["round"])
    assert seen == [1, 2, 3]
    assert list(federation) == []
    finished = federation.run()
    assert left(finished.folder) == left(whole.folder)
    assert record["cost/traffic_bytes"] == finished.rounds["cost/traffic_bytes"].iloc[-1]


def test_a_second_loop_takes_over_from_one_that_is_open(whole: fedspa.Run, tmp_path: Path) -> None:
    """As in a notebook, where the traceback of a cell keeps its loop alive."""
    federation = toy(tmp_path / "run")
    first = iter(federation)
    assert next(first)["round"] == 1
    assert [record["round"] for record in federation] == [2, 3]
    assert next(first, None) is None
    assert left(tmp_path / "run") == left(whole.folder)


class Failing(Slow):
    fails = True

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        if client.round == 1 and Failing.fails:
            raise ZeroDivisionError("mine")
        return super().client_update(client, server)


def test_after_an_exception_the_same_object_goes_on(
    whole: fedspa.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = toy(tmp_path / "run", method=Failing(share=0.7))
    with pytest.raises(ZeroDivisionError, match="mine"):
        federation.run()
    monkeypatch.setattr(Failing, "fails", False)
    assert [record["round"] for record in federation] == [2, 3]
    assert left(tmp_path / "run") == left(whole.folder)


def test_another_process_goes_on_with_the_same_objects(whole: fedspa.Run, tmp_path: Path) -> None:
    for record in toy(tmp_path / "run"):
        if record["round"] == 1:
            break
    resumed = toy(resume=str(tmp_path / "run"))
    assert [record["round"] for record in resumed] == [2, 3]
    assert left(tmp_path / "run") == left(whole.folder)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"method": Slow(share=0.6)}, "method.share (0.7 there, 0.6 here)"),
        ({"data": (INPUTS + 1, TARGETS)}, "dataset.hash"),
        ({"clients": NAMES[::-1][np.arange(120) % 4]}, "partition.hash"),
        ({"model": lambda: mlp()}, "model.source_hash"),
        ({"lr": 0.2}, "lr (0.1 there, 0.2 here)"),
    ],
)
def test_other_objects_cannot_go_on(whole: fedspa.Run, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(fedspa.UserError) as mistake:
        toy(resume=str(whole.folder), **arguments).run()
    assert told in str(mistake.value) and "\n" not in str(mistake.value)


def test_a_run_gives_its_models_and_a_loaded_one_says_what_it_lacks(whole: fedspa.Run) -> None:
    model = whole.model(kind="global")
    weights = load_file(whole.folder / "weights.safetensors")
    network = mlp()
    network.load_state_dict(weights)
    inputs = torch.from_numpy(INPUTS[:5])
    torch.testing.assert_close(model(inputs), network(inputs))
    loaded = fedspa.load(whole.folder)
    assert loaded.rounds.equals(whole.rounds)
    with pytest.raises(fedspa.UserError, match=r"mlp.*Federation\(\.\.\., resume=.*same objects"):
        loaded.model(kind="global")
    assert left(toy(resume=str(whole.folder)).run().folder) == left(whole.folder)


def test_a_module_starts_from_its_own_weights(tmp_path: Path) -> None:
    module = mlp()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    federation = toy(tmp_path / "run", model=module, method=Slow(share=0.0), rounds=1)
    nn.init.zeros_(module[0].weight)  # the user goes on with it
    federation.run()
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_an_object_is_trained_as_the_config_trains_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "dataset": {"train_size": 160, "test_size": 80, "image_size": 8, "client_test_images": 10},
        "federation": {"clients": 4}, "rounds": 2, "clients_per_round": 2, "epochs": 1, "sparsity": 0.5,
        "hardware": {"workers": 1},
    }  # fmt: skip
    named = fedspa.run("dataset=synthetic", "method=fedspa", folder=tmp_path / "a", quiet=True, **settings)
    own = fedspa.Federation("dataset=synthetic", method=FedSpa(), folder=tmp_path / "b", **settings).run()
    assert left(own.folder) == left(named.folder)
    assert own.summary["config_hash"] != named.summary["config_hash"]
    assert own.summary["method"] == "FedSpa"


# Data


def rows_of(run: fedspa.Run) -> tuple[list[list[int]], list[list[int]]]:
    import json

    partition = json.loads((run.folder / "partition.json").read_text())
    return partition["train_rows"], partition["test_rows"]


def test_a_share_of_each_clients_rows_is_held_out(whole: fedspa.Run) -> None:
    train, test = rows_of(whole)
    for client in range(4):
        assert sorted(train[client] + test[client]) == list(range(client, 120, 4))
        assert len(test[client]) == 6


@pytest.mark.parametrize(
    ("arguments", "train", "test"),
    [
        (
            {"clients": [np.arange(50), torch.arange(60, 120)], "test": (INPUTS[:9], TARGETS[:9])},
            [list(range(50)), list(range(60, 120))],
            [list(range(9))] * 2,
        ),
        (
            {
                "clients": np.arange(120) // 60,
                "test": (INPUTS[:9], TARGETS[:9]),
                "test_clients": [0, 1, 1] * 3,
            },
            [list(range(60)), list(range(60, 120))],
            [[0, 3, 6], [1, 2, 4, 5, 7, 8]],
        ),
        (
            {"clients": [[5, 1], [2]], "test": (INPUTS[:3], TARGETS[:3]), "test_clients": [[0, 1], [1, 2]]},
            [[1, 5], [2]],
            [[0, 1], [1, 2]],
        ),
    ],
)
def test_clients_and_test_sets_as_they_are_given(
    tmp_path: Path, arguments: dict[str, Any], train: list[list[int]], test: list[list[int]]
) -> None:
    run = toy(tmp_path / "run", rounds=1, **arguments).run()
    assert rows_of(run) == (train, test)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(9, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.fc(self.embedding(tokens))


class Pixels(nn.Module):
    """Its second answer says whether pixels come as floats from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * 3 * 5, 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        assert pixels.is_floating_point() and float(pixels.max()) <= 1
        return self.fc(pixels.flatten(1))


@pytest.mark.parametrize(
    ("inputs", "targets", "model"),
    [
        (np.arange(120 * 5).reshape(120, 5) % 9, np.arange(120) % 3, Tokens),
        (torch.randint(256, (120, 2, 3, 5), dtype=torch.uint8), torch.arange(120) % 2, Pixels),
        (np.full((120, 30), 255, np.uint8), np.arange(120) % 2, Pixels),
        (INPUTS.astype("float64"), TARGETS.astype("uint8"), mlp),
        (INPUTS.astype(">f4"), TARGETS.astype(">i4"), mlp),
        (INPUTS[:, 0].tolist(), TARGETS.tolist(), lambda: nn.Linear(1, 2)),
    ],
    ids=["tokens", "images", "bytes", "doubles", "big-endian", "lists"],
)
def test_inputs_of_many_kinds(tmp_path: Path, inputs: Any, targets: Any, model: Any) -> None:
    run = toy(tmp_path / "run", data=(inputs, targets), model=model, rounds=1).run()
    assert run.rounds["accuracy/global"].notna().all()


def test_a_regression_learns(tmp_path: Path) -> None:
    targets = INPUTS[:, :2] @ np.array([[1.0, 0.5], [0.0, 2.0]], "float32")
    federation = toy(tmp_path / "run", data=(INPUTS, targets), method=Slow(share=1.0), rounds=8, epochs=4)
    records = list(federation)
    assert records[-1]["mse/global"] < 0.5 * records[0]["mse/global"]
    run = federation.run()
    predicted = run.model(kind="global")(torch.from_numpy(INPUTS)).numpy()
    rows = np.concatenate([np.array(rows) for rows in rows_of(run)[1]])
    error = ((predicted - targets)[rows] ** 2).mean()  # clients have the same number of rows
    assert error == pytest.approx(records[-1]["mse/global"], rel=1e-4)
    assert "mse" in repr(run)


def test_rows_for_validation_and_public_rows(tmp_path: Path) -> None:
    shares = {"val_fraction": 0.2, "public_fraction": 0.25}
    run = toy(tmp_path / "a", method="fedmd", **shares).run()
    assert np.isfinite(run.rounds["val_accuracy/personal"].iloc[-1])
    kept = [len(rows) for rows in rows_of(run)[0]]  # of 24 training rows 5 are public
    assert kept == [19] * 4
    assert (
        toy(tmp_path / "c", method="fedmd", public_fraction=0.25).run().summary["config_hash"]
        != run.summary["config_hash"]
    )


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"data": (INPUTS, TARGETS[:-1])}, "120 rows of inputs and 119 targets"),
        ({"data": INPUTS}, "pair (inputs, targets)"),
        ({"data": (np.where(np.arange(120)[:, None] == 7, np.nan, INPUTS), TARGETS)}, "not finite in row 7"),
        ({"data": (INPUTS, CLIENTS)}, "targets of data have dtype <U3"),
        ({"data": (INPUTS, TARGETS - 1)}, "class -1"),
        ({"data": (INPUTS, np.stack([TARGETS] * 2, 1))}, "numbers to predict are floats"),
        ({"data": (INPUTS, TARGETS * 0)}, "one class only"),
        ({"clients": CLIENTS[:-3]}, "clients has shape [117]"),
        ({"clients": None}, "clients is missing"),
        ({"clients": [[0, 1], []]}, "client 1 has no rows"),
        ({"clients": [[0, 1], [1, 2]]}, "row 1 is given more than once"),
        ({"clients": [[0, 1], [120]]}, "client 1 must be whole numbers from 0 to 119"),
        ({"clients": np.arange(120)}, "client 0 has one row"),
        ({"test": (INPUTS[:, :3], TARGETS)}, "they must be alike"),
        ({"test": (INPUTS, TARGETS), "test_clients": NAMES[np.arange(120) % 3]}, "no row of client 'joe'"),
        ({"test": (INPUTS, TARGETS), "test_fraction": 0.2}, "test_fraction"),
        ({"test_clients": CLIENTS}, "test_clients is about test="),
        ({"test_fraction": 1.0}, "test_fraction=1.0 is out of range"),
        ({"public_fraction": 1.0}, "^public_fraction=1.0 is out of range"),
        ({"method": "fedmd"}, "but public_fraction=0 leaves none: set it to 0.1"),
        ({"dataset": "digits"}, "dataset has no effect beside an own dataset"),
        ({"dataset": {"train_rows": 9}}, "dataset.train_rows has no effect beside an own dataset"),
        ({"test_fraction": True}, "test_fraction=true is not a number"),
        ({"val_fraction": "half"}, "^val_fraction=half is not a number"),
        ({"val_fraction": True}, "^val_fraction=True is not a number"),
        ({"model": lambda: mlp(3)}, "must be (2, 2)"),
        ({"model": nn.Linear(5, 2)}, "cannot take examples of 6"),
        ({"model": nn.Linear}, "raised TypeError"),
        ({"model": lambda: 3}, "makes a int"),
        ({"model": "lenet5"}, "model=lenet5"),
        ({"method": Slow}, "method=Slow is a class"),
        ({"method": object()}, "fedspa.methods.base.Method"),
        ({"mask": Shuffle()}, "method=Slow trains dense, so mask=Shuffle has no meaning"),
        ({"learning_rate": 0.1}, "learning_rate is not a setting: valid are"),
        ({"roundz": 3}, "roundz is not a setting: did you mean rounds?"),
        ({"lr": 0}, "^lr=0"),
        ({"lr": 0.1, "training": {"lr": 0.1}}, "lr is set twice"),
        ({"clients_per_round": 5}, "clients_per_round=5 is more than the 4 clients"),
        ({"batch_size": 64, "drop_last": True}, "drop_last=True leaves client 0"),
        ({"data": None}, "clients is about data="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_sentence(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(fedspa.UserError) as mistake:
        toy(tmp_path / "run", **arguments).run()
    text = str(mistake.value)
    assert text.startswith(told[1:]) if told[0] == "^" else told in text, text
    assert "\n" not in text and "training." not in text and "hydra" not in text
    assert list(tmp_path.iterdir()) == []


def test_the_fractions_are_set_in_any_form(tmp_path: Path) -> None:
    def made(*words: str, **settings: Any) -> float:
        return fedspa.Federation(*words, **TOY | settings)._plan.dataset.val_fraction

    shares = [
        made(val_fraction=0.25),
        made(val_fraction=np.float32(0.25)),
        made(dataset={"val_fraction": 0.25}),
        made("dataset.val_fraction=0.25"),
    ]
    assert shares == [0.25] * 4
    with pytest.raises(fedspa.UserError, match="^val_fraction is set twice"):
        made("dataset.val_fraction=0.25", dataset={"val_fraction": 0.25})


NO_ARRAYS = [3, None, "a", [[1.0], [2.0, 3.0]], torch.eye(120).to_sparse(), torch.empty(120, device="meta")]
NO_NUMBERS = [True, "half", [0.1], {"a": 1}, b"x", object(), np.ones(2)]
WRONG = {
    "data": [*NO_ARRAYS, *((part, TARGETS) for part in NO_ARRAYS), *((INPUTS, part) for part in NO_ARRAYS)],
    "clients": [
        *NO_ARRAYS,
        [None] * 120,
        [None, "a"] * 60,
        [[0, 1], 3],
        [[0], [[1], 2]],
        [np.array(0)] * 120,
    ],
    "test": [part for part in NO_ARRAYS if part is not None],
    "test_clients": [part for part in NO_ARRAYS if part is not None],
    "test_fraction": NO_NUMBERS,
    "val_fraction": NO_NUMBERS,
    "public_fraction": NO_NUMBERS,
    "folder": [3, b"x", ["a"], {}, object(), np.ones(2), "a\0b"],
    "quiet": [3, None, "no", np.ones(2)],
    "model": [3, b"x", object(), np.ones(2), int, "a\0b"],
    "method": [3, b"x", object(), np.ones(2), int, "a\0b"],
    "batchnorm": [3, b"x", object(), np.ones(2)],
    "logger": [3, b"x", object(), [1, None], [["csv"]], "a\0b"],
    "rounds": [10**30, b"x", object(), 1j],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_a_wrong_type_is_one_sentence_that_names_it(tmp_path: Path, name: str) -> None:
    beside = {"test": (INPUTS, TARGETS)} if name == "test_clients" else {}
    for value in WRONG[name]:
        with pytest.raises(fedspa.UserError) as mistake:
            fedspa.Federation(**TOY | beside | {name: value})
        text = str(mistake.value)
        assert name in text and "\n" not in text, (value, text)


# The example


def test_algorithm_1_in_plain_torch_is_what_fedspa_does() -> None:
    command = [sys.executable, str(ROOT / "examples" / "algorithm_1.py")]
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    assert float(done.stdout.split("difference: ")[1].split(";")[0]) < 1e-12
