"""Models that leave: equal to what the run tested, in every format, with every refusal."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from safetensors import safe_open
from safetensors.torch import load_file

import fedspa.export.command
import fedspa.export.runs
import fedspa.runs.experiment
from fedspa.config.plan import check
from fedspa.config.schema import register
from fedspa.core.client import Client, ClientUpdate
from fedspa.core.client_state import ClientState
from fedspa.core.errors import UserError
from fedspa.core.paths import config_dir
from fedspa.core.server import ServerState
from fedspa.export.formats import as_onnx, as_safetensors, as_torch
from fedspa.export.stored_run import StoredRun
from fedspa.methods.fedspa import FedSpa
from fedspa.partition.clients import client_rows
from fedspa.runs.assembly import Federation, build
from fedspa.runs.commands import main
from fedspa.runs.experiment import run

ROOT = Path(__file__).resolve().parents[1]
SHORT = (
    *("federation.rounds=2", "federation.clients=4", "federation.clients_per_round=2", "training.epochs=1"),
    *("logger=none", "hardware.workers=1", "save.local=true"),
)
NEVER = 1
"""The client that is not trained in these two rounds."""
BATCHNORM = """
from torch import nn

def make(channels: int, image_size: int, classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(width * (image_size - 2) ** 2, classes),
    )
"""


def trained(folder: Path, *overrides: str, **parts: Any) -> Path:
    """The folder of a run of the digits."""
    register()
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = hydra.compose("config", [*SHORT, *overrides])
    with open_dict(config):
        for name, part in parts.items():
            config[name] = part
    run(check(config), folder)
    return folder


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(
        tmp_path_factory.mktemp("runs") / "sparse", "mask=dst", "sparsity=0.8", "mask.initial=different"
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """FedAvg, a network of the user's own, with BatchNorm."""
    packages = tmp_path_factory.mktemp("packages")
    (packages / "own_network.py").write_text(BATCHNORM)
    model = {"name": "own", "_target_": "own_network.make", "batchnorm": "average", "width": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        yield trained(packages / "dense", "method=fedavg", model=model, trusted_packages=["own_network"])


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """`command("run=...", ...)`: exit code, output, errors; in a clone of its own that holds nothing yet."""
    for module in (fedspa.export.command, fedspa.export.runs):
        monkeypatch.setattr(module, "project_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    program = runpy.run_path(str(ROOT / "src" / "export.py"))

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["export.py", *arguments])
        code = main(program["write"], program["__doc__"])
        told = capsys.readouterr()
        return code, told.out, told.err

    return command


def refusal(ended: tuple[int, str, str]) -> str:
    """The one sentence that a command ended with."""
    code, out, err = ended
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    return line.removeprefix("Error: ")


def copied(folder: Path, to: Path, **changed: Any) -> Path:
    """The folder of a run that says of itself that it had other settings."""
    shutil.copytree(folder, to)
    config = OmegaConf.load(to / "config.yaml")
    assert isinstance(config, DictConfig)
    for key, value in changed.items():
        OmegaConf.update(config, key, value, merge=False)
    (to / "config.yaml").write_text(OmegaConf.to_yaml(config))
    return to


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_an_exported_model_is_as_accurate_as_the_run_found_it(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    plan = check(OmegaConf.load(folder / "config.yaml"))
    data = plan.dataset.load()
    tested = client_rows(data, plan.dataset, plan.partition, 4, plan.settings.seed).test
    with (folder / "clients.csv").open(newline="") as file:
        clients = list(csv.DictReader(file))
    assert int(clients[NEVER]["client_updates"]) == 0
    compared = []
    for client, row in enumerate(clients):
        for kind in plan.method.kinds:
            if row[f"accuracy/{kind}"]:
                module = StoredRun(folder).model(kind, client).module
                images = data.test.inputs[tested[client]].float() / 255
                right = module(images).argmax(1) == data.test.targets[tested[client]]
                assert 100 * float(right.double().mean()) == pytest.approx(
                    float(row[f"accuracy/{kind}"]), rel=1e-6
                )
                compared.append((kind, client))
    assert len(compared) == (11 if name == "sparse" else 7)  # local models only of the trained three


FILES = ("client3-personal.pt2", "client3-local.safetensors", "global.onnx")
"""What the examples of the documentation read."""


@pytest.mark.parametrize(("name", "kind"), [("sparse", "personal"), ("dense", "local")])
def test_formats_give_the_same_logits_and_the_documentations_examples_read_them(
    name: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    folder: Path = request.getfixturevalue(name)
    model = StoredRun(folder).model(kind, 3)
    images = torch.rand(5, 1, 8, 8)  # another number than the exporters saw
    wanted = model.module(images)
    for file, make in zip(FILES, (as_torch, as_safetensors, as_onnx), strict=True):
        Path(file).write_bytes(make(model).data)
    program = torch.export.load(FILES[0]).module()
    assert torch.allclose(program(images), wanted, atol=1e-5, rtol=0)
    session = onnxruntime.InferenceSession(FILES[2], providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    assert session.get_outputs()[0].shape == ["batch", len(wanted[0])]
    (logits,) = session.run(["logits"], {"inputs": images.numpy()})
    assert torch.allclose(torch.from_numpy(logits), wanted, atol=1e-5, rtol=0)
    other = StoredRun(folder).model("global", None).module
    assert not torch.allclose(other(images), wanted, atol=1e-3)
    other.load_state_dict(load_file(FILES[1]))  # strict: num_batches_tracked too
    assert torch.equal(other(images), wanted)
    if name == "sparse":
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "export.md").read_text(), re.M | re.S)
        assert len(blocks) == 3 and all(file in block for file, block in zip(FILES, blocks, strict=True))
        for block in blocks:
            names: dict[str, Any] = {}
            exec(block, names)
            assert len(names.get("classes", names.get("logits"))) == 5


def test_sizes_and_metadata_by_hand(
    sparse: Path, dense: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, _ = command(f"run={sparse}", "client=3", "format=safetensors")
    file = tmp_path / "outputs" / "exports" / "sparse" / "client3-personal.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name.startswith("network.")}
    held, size = (
        sum(int(t.count_nonzero()) for t in tensors.values()),
        sum(t.numel() for t in tensors.values()),
    )
    assert code == 0 and size == 26_090 and held == pytest.approx(0.2 * size, abs=1)
    packed = 4 * held + 3262  # 26,090 bits
    assert f"The personal model of client 3 is {file} ({file.stat().st_size:,} bytes)\n" in out
    assert f"Active: {held:,} of 26,090 parameters, density 0.2\n" in out
    assert (
        f"Weights: 104,360 bytes dense; {packed:,} packed (the active values and one bit a weight)\n" in out
    )
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    assert facts["class"] == "fedspa.models.small_cnn.SmallCNN" and facts["batchnorm"] == ""
    assert json.loads(facts["arguments"]) == {"channels": 1, "image_size": 8, "classes": 10}
    assert json.loads(facts["density"]) == held / size
    conv = tensors["network.conv3.weight"]
    assert json.loads(facts["densities"])["conv3.weight"] == int(conv.count_nonzero()) / conv.numel()
    # By hand: conv 3 x 9 + 3, BatchNorm 2 x 3 and its statistics 2 x 3, linear 10 x 108 + 10.
    code, out, _ = command(f"run={dense}", "format=safetensors", "model=global", "out=g.safetensors")
    assert code == 0 and "The global model is g.safetensors (" in out
    assert "Active: 1,126 of 1,126 parameters, density 1\n" in out
    assert "Weights: 4,528 bytes dense; 4,528 packed (the same: none is inactive)\n" in out


def test_a_local_model_has_the_mask_that_it_was_trained_with(sparse: Path) -> None:
    """Client 0 was trained in the first round alone, after which half of its mask moved."""
    local, personal = (StoredRun(sparse).model(kind, 0) for kind in ("local", "personal"))
    before, after = (model.module[1].conv3.weight != 0 for model in (local, personal))
    assert before.sum() == after.sum() == 1417 and (before != after).sum() > 1000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run={}", "client=3", "format=onxn"), "format=onxn is not known: did you mean onnx?"),
        (("run={}", "client=3"), "Say how to write the model: format=torch, safetensors, onnx."),
        (("run={}", "format=torch"), "Say whose model=personal to write: client=<number, from 0>."),
        (("client=3", "format=torch"), "Say which run the model is of:"),
        (("run={}", "client=4", "format=torch"), "client=4 is out of range: the run has 4, 0 to 3."),
        (("run={}", "client=-1", "format=torch"), "client=-1 is out of range: the run has 4, 0 to 3."),
        (("run={}", "client=3", "format=torch", "model=lokal"), "did you mean local or global?"),
        (("run={}", "client=3", "format=torch", "out=a.onnx"), "name it a.pt2."),
        (("run={}", "clint=3", "format=torch"), "clint is not an option: did you mean client?"),
        (("run={}", "client=1", "format=torch", "model=local"), "client=1 had no client update"),
        (("run=/dev", "client=1", "format=torch"), "run=/dev is no run: a run's folder has a config.yaml"),
        (("run={}", "client=1", "format=safetensors", "out=/dev/null/a.safetensors"), "cannot be written"),
    ],
)  # fmt: skip
def test_refusals(command: Callable[..., Any], sparse: Path, arguments: tuple[str, ...], told: str) -> None:
    assert told in refusal(command(*(argument.format(sparse) for argument in arguments)))


def test_runs_that_are_unknown_unfinished_or_have_no_weights(
    command: Callable[..., Any], sparse: Path, tmp_path: Path
) -> None:
    words = ("client=3", "format=safetensors")
    assert "neither a run's folder nor the id of a run" in refusal(command("run=12-00_dst", *words))
    known = copied(sparse, tmp_path / "outputs" / "day" / "12-00_dst")
    assert command("run=12-00_dst", *words)[0] == 0
    assert "did you mean outputs/day/12-00_dst?" in refusal(command("run=12-00_dts", *words))
    (known / "weights.safetensors").write_bytes(b"broken")
    assert "weights.safetensors does not hold what" in refusal(command(f"run={known}", *words))
    (known / "weights.safetensors").unlink()
    assert "save.upload_weights=true" in refusal(command(f"run={known}", *words))
    (known / "summary.json").unlink()
    assert "has not finished (it has no summary.json)" in refusal(command(f"run={known}", *words))
    config = OmegaConf.merge(OmegaConf.load(known / "config.yaml"), {"nope": 1})
    OmegaConf.save(config, known / "config.yaml")
    (known / "weights.safetensors").touch()
    (known / "summary.json").write_text('{"version": "9.8.7"}')
    told = refusal(command(f"run={known}", *words))
    assert f"{known}/config.yaml, which fedspa 9.8.7 wrote, does not fit this version" in told
    assert "nope is not a setting" in told
    (known / "config.yaml").write_text("a: [")
    (known / "summary.json").write_text("{}")
    (known / "weights.safetensors").touch()
    assert "config.yaml cannot be read" in refusal(command(f"run={known}", *words))


def test_models_that_a_run_does_not_hold(
    command: Callable[..., Any], sparse: Path, dense: Path, tmp_path: Path
) -> None:
    words = ("client=3", "format=safetensors")
    assert "method=fedavg has no personal model: a run of it has global and local models." in refusal(
        command(f"run={dense}", *words)
    )
    without = copied(sparse, tmp_path / "without", **{"save.local": False})
    assert "train it with save.local=true" in refusal(command(f"run={without}", *words, "model=local"))
    ditto = copied(
        sparse, tmp_path / "ditto", method={"name": "ditto", "_target_": "fedspa.methods.ditto.Ditto"},
        mask={"name": "none"}, **{"training.epochs": 5},
    )  # fmt: skip
    assert "method=ditto makes models of what clients keep" in (
        told := refusal(command(f"run={ditto}", *words))
    )
    assert "train it with save.personal=true" in told
    assert command(f"run={ditto}", *words, "model=local")[0] == 0
    assert command(f"run={ditto}", f"client={NEVER}", *words[1:])[0] == 0  # its first state is known
    rigl = copied(sparse, tmp_path / "rigl", mask={"name": "rigl", "_target_": "fedspa.masks.rigl.RigL"})
    assert "mask=rigl makes models of what clients keep" in refusal(command(f"run={rigl}", *words))
    small = copied(sparse, tmp_path / "small", **{"dataset.image_size": 12})
    assert "holds other tensors than the run's model has" in refusal(command(f"run={small}", *words))


@dataclass(kw_only=True)
class Averaging(FedSpa):
    """FedSpa whose personal model is the mean of the global weights and the client's own, once it was trained."""

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        update = super().client_update(client, server)
        assert update.state is not None and update.local is not None
        return replace(update, state=update.state | {"average": update.local})

    def personal(self, weights: torch.Tensor, state: ClientState) -> torch.Tensor:
        shared = super().personal(weights, state)
        return (shared + state.tensor("average")) / 2 if "average" in state else shared


@pytest.mark.parametrize("save", ["true", "false"])
def test_an_item_that_clients_keep_only_after_an_update_must_be_saved(save: str, tmp_path: Path) -> None:
    method = {"name": "averaging", "_target_": f"{__name__}.Averaging"}
    options = ("mask=dst", "sparsity=0.8", f"save.personal={save}")
    folder = trained(tmp_path / "run", *options, method=method, trusted_packages=[__name__])
    assert "average" in json.loads((folder / "summary.json").read_text())["clients_keep"]
    stored = StoredRun(folder)
    stored.model("personal", NEVER)
    stored.model("local", 0)
    if save == "true":
        with safe_open(folder / "client_states.safetensors", "pt") as file:
            assert "0.average" in file.keys()  # noqa: SIM118 (no mapping)
        stored.model("personal", 0)
    else:
        with pytest.raises(UserError, match=r"^method=averaging makes models .* save.personal=true"):
            stored.model("personal", 0)


REMEMBERED = {
    "ditto": ("method=ditto", "mask=none", "method.shared_epochs=1", "method.personal_epochs=1"),
    "rigl": ("mask=rigl", "mask.anneal_rounds=40", "sparsity=0.8", "training.epochs=2"),
    "snip": ("mask=snip", "sparsity=0.8", "training.epochs=2"),
    "topkast": ("mask=topkast", "sparsity=0.8", "training.epochs=2"),
}


@pytest.mark.parametrize("name", REMEMBERED)
@pytest.mark.parametrize("batchnorm", ["average", None])
def test_models_made_of_what_clients_remember(
    name: str,
    batchnorm: str | None,
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every model gives the very logits of the one in the run, whose server and clients are still at hand."""
    (tmp_path / "own_network.py").write_text(BATCHNORM)
    monkeypatch.syspath_prepend(tmp_path)
    model = {"name": "own", "_target_": "own_network.make", "batchnorm": batchnorm, "width": 3}
    federations: list[Federation] = []

    def kept(*arguments: Any) -> Federation:
        federations.append(build(*arguments))
        return federations[-1]

    monkeypatch.setattr(fedspa.runs.experiment, "build", kept)
    layers = "none" if batchnorm else "norm"
    options = (*REMEMBERED[name], "training.epochs=2", "save.personal=true", "federation.rounds=3")
    options += (f"personal_layers={layers}",)
    folder = trained(tmp_path / name, *options, model=model, trusted_packages=["own_network"])
    (federation,) = federations
    loop, runner = federation.loop, federation.runner
    engine, own_layers = runner.setup.engine, runner.setup.own_layers
    network, images = engine.module.network.eval(), torch.rand(6, 1, 8, 8)
    stored = StoredRun(folder)
    for client in range(4):
        state = loop.state.client_state(client)
        for kind in ("personal", "global"):
            weights = loop.state.weights
            if kind == "personal":
                weights = runner.method.personal(weights, state)
            engine.module.load(own_layers.complete(weights, state, kind == "personal"))
            exported = stored.model(kind, client).module
            with torch.no_grad():
                assert torch.equal(exported(images), network(exported.normalise(images)))
    if name == "topkast":  # the network sees the counts of the layer sparsity, and the mask has more
        exported = stored.model("personal", 2)
        counts = runner.method.searcher.target
        assert exported.active[: len(counts)] == counts
        assert loop.state.client_state(2).mask.active > sum(exported.active)
    words = (f"run={folder}", "client=2", "format=safetensors")
    assert command(*words)[0] == 0
    without = copied(folder, tmp_path / "without", **{"save.personal": False})
    if name in ("snip", "topkast") and batchnorm == "average":
        assert command(f"run={without}", *words[1:])[0] == 0
    else:
        assert "train it with save.personal=true" in refusal(command(f"run={without}", *words[1:]))
    if batchnorm is None:
        assert "say whose by client=<number, from 0>" in refusal(command(*words[::2], "model=global"))
    (folder / "client_states.safetensors").unlink()
    assert "client_states.safetensors does not hold what" in refusal(command(*words))


def test_what_onnx_needs_is_named(
    command: Callable[..., Any], sparse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    told = refusal(command(f"run={sparse}", "client=3", "format=onnx"))
    assert told.startswith("format=onnx needs onnxruntime") and told.endswith("pip install 'fedspa[onnx]'.")


def test_a_graph_that_computes_something_else_is_not_written(
    command: Callable[..., Any], sparse: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import onnxruntime

    class Wrong(onnxruntime.InferenceSession):
        def run(self, *args: Any) -> Any:
            return [logits + 0.01 for logits in super().run(*args)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    told = refusal(command(f"run={sparse}", "client=3", "format=onnx", "out=wrong.onnx"))
    assert "makes other logits of this network (they differ by 0.01), so nothing was written" in told
    assert not list(tmp_path.glob("*.onnx"))


def test_a_run_of_the_tracking_store(
    command: Callable[..., Any], sparse: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fedspa.tracking.store import open_client

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    words = ("client=3", "format=safetensors", "out=a.safetensors")
    assert "no tracking store at" in refusal(command(f"run={'a' * 32}", *words))
    client = open_client(uri)
    experiment = client.create_experiment("fedspa", artifact_location=(tmp_path / "artifacts").as_uri())
    made = client.create_run(experiment).info.run_id
    client.log_artifacts(made, str(sparse))
    assert command(f"run={made}", *words)[0] == 0
    assert "its files are not in the tracking store" in refusal(command(f"run={'a' * 32}", *words))
