"""Losses, steps and optimizers that a method or a network brings itself, by hand; and personal models of two weight
vectors in a run's folder."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import CLIENTS, LABELS, LRS, MASKS, PICTURES, W0, Vector, logits, loss_and_gradient
from federations import Clients, federation, pack, two_workers
from lightning import LightningModule
from safetensors.torch import load, load_file
from test_rounds_by_hand import equal
from torch import nn

from fedspa.core.client import Client, ClientUpdate
from fedspa.core.errors import UserError
from fedspa.core.records import Costs
from fedspa.core.server import ServerState
from fedspa.core.settings import TrainingSettings
from fedspa.core.transfers import Reads
from fedspa.data.examples import Batch
from fedspa.data.sets import ArraySet
from fedspa.export.formats import as_safetensors, as_torch
from fedspa.export.stored_run import StoredRun
from fedspa.masks.rsm import RSM
from fedspa.methods.base import Method
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.runs.experiment import run
from fedspa.training.local_training import LocalTraining


class Distilled(LocalTraining):
    """Cross-entropy, and the squared distance to the outputs of a teacher with weights of its own."""

    def training_step(self, batch: Batch, batch_idx: int = 0) -> torch.Tensor:
        outputs = self.network(batch.inputs)
        teacher = dict(self.space.items(self.others["teacher"]))
        taught = torch.func.functional_call(self.network, teacher, (batch.inputs,))
        return self.objective.loss(outputs, batch.targets) + (outputs - taught).square().mean()


@dataclass(kw_only=True)
class Distils(FedAvg):
    """Each client's teacher is the global model that it received."""

    weighting: str = "uniform"
    training_class = Distilled

    def client_update(self, client: Client, server: ServerState) -> ClientUpdate:
        trained = client.train(client.weights, others={"teacher": client.weights}, further_passes=1)
        assert torch.equal(trained.others["teacher"], client.weights)
        return ClientUpdate(update=client.weights - trained.weights, local=trained.weights)


class Doubled(LightningModule):
    """A user's network with twice the usual loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        return {"loss": 2 * nn.functional.cross_entropy(self(inputs), targets)}


class ByAdam(Doubled):
    """It also brings an optimizer that moves every weight."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


class Scheduled(Doubled):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)], []


def tiny(network: nn.Module, method: Method, **options: Any):
    """The federation of by_hand.py with another network of 15 weights."""
    nn.utils.vector_to_parameters(torch.from_numpy(W0), network.double().parameters())
    data = ArraySet(torch.from_numpy(PICTURES.astype(np.uint8)).view(14, 1, 2, 2), torch.from_numpy(LABELS))
    rows = [np.arange(0, 3), np.arange(3, 8)], [np.arange(8, 12), np.arange(12, 14)]
    training = TrainingSettings(
        epochs=2, batch_size=8, lr=0.5, lr_decay=0.5, clip_norm=None, weight_decay=0.0
    )
    return federation(method, network, Clients(data, data, *rows, classes=3), training, rounds=2, **options)


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def taught_gradient(w: Vector, teacher: Vector, k: int) -> Vector:
    x = CLIENTS[k].x
    error = 2 * (logits(w, x) - logits(teacher, x)) / (3 * len(x))
    return np.concatenate([(error.T @ x).ravel(), error.sum(axis=0)])


@pytest.mark.parametrize("options", [{}, {"executor": two_workers}], ids=["one process", "two workers"])
def test_a_method_with_a_loss_and_a_second_model(options):
    found, w = tiny(plain(), Distils(name="distils"), **options), W0
    for lr, record in zip(LRS, found.loop.rounds(), strict=True):
        ends = []
        for k, client in enumerate(CLIENTS):
            end = w
            for _ in range(2):
                slope = loss_and_gradient(end, client.x, client.y)[1] + taught_gradient(end, w, k)
                end = end - lr * slope
            ends.append(end)
        w = np.mean(ends, axis=0)
        equal(found.weights, w)
        # The teacher's forward pass is a third of a plain step, which is three passes.
        assert record.costs == Costs(train_flops=4 * 27 * 2 * (3 + 5), down_bytes=2 * 60, up_bytes=2 * 60)
    found.close()


def test_a_network_with_a_step_of_its_own():
    found, w = tiny(Doubled(), FedAvg(name="fedavg", weighting="uniform")), W0
    for lr, _ in zip(LRS, found.loop.rounds(), strict=True):
        ends = []
        for client in CLIENTS:
            end = w
            for _ in range(2):
                end = end - lr * 2 * loss_and_gradient(end, client.x, client.y)[1]
            ends.append(end)
        w = np.mean(ends, axis=0)
        equal(found.weights, w)


def test_no_step_moves_what_the_mask_leaves_out_or_what_is_frozen():
    found = tiny(
        ByAdam(),
        FedSpa(name="fedspa"),
        searcher=RSM(name="rsm"),
        initial_mask=lambda client: pack(MASKS[client]),
        active=[6, 2],
    )
    found.run()
    for (_, update), mask in zip(found.updates, MASKS * 2, strict=True):
        assert not update.local.numpy()[mask == 0].any()
        assert (update.update.numpy()[mask == 1] != 0).all()
    client = found.loop._runner._client(0, 0, False, found.weights, found.loop.state.client_state(0), Reads())
    frozen = torch.tensor([1.0, 0.0] * 7 + [1.0], dtype=torch.float64)
    moved = client.train(found.weights, trainable=frozen).weights != found.weights
    assert moved.tolist() == frozen.bool().tolist()


def test_a_networks_own_optimizer_is_one_optimizer():
    with pytest.raises(UserError, match="configure_optimizers of Scheduled gives tuple: .*one torch optim"):
        tiny(Scheduled(), FedAvg(name="fedavg"))


def test_a_mixture_is_tested_kept_and_exported(plan, tmp_path):
    """The exported module has the accuracy that the run found, in every client, also in one that never took part."""
    words = (
        *("method=apfl", "method.alpha=0.7", "dataset=digits", "logger=none", "save.personal=true"),
        *("federation.rounds=1", "federation.clients=3", "federation.clients_per_round=2"),
        *("training.epochs=1", "hardware.workers=1", "hardware=cpu"),
    )
    summary = run(plan(*words), tmp_path / "run")
    assert {f"final/accuracy/{kind}" for kind in ("global", "personal", "local")} <= set(summary)
    stored, images = StoredRun(tmp_path / "run"), torch.rand(6, 1, 8, 8)
    states = load_file(tmp_path / "run" / "client_states.safetensors")
    visited = sorted({int(name.partition(".")[0]) for name in states})
    assert len(visited) == 2
    shared = stored.model("global", None).module
    for client in range(3):
        model = stored.model("personal", client)
        whole = shared.network.state_dict()
        if client in visited:
            sizes = [tensor.numel() for tensor in whole.values()]
            pieces = states[f"{client}.personal"].split(sizes)
            whole = {name: piece.view(whole[name].shape) for name, piece in zip(whole, pieces, strict=True)}
        else:
            whole = model.module.network.personal.state_dict()
        with torch.no_grad():
            normal = shared.normalise(images)
            own = torch.func.functional_call(shared.network, whole, (normal,))
            wanted = 0.7 * own + 0.3 * shared.network(normal)
            torch.testing.assert_close(model.module(images), wanted, rtol=1e-4, atol=1e-5)
        assert model.parameters == 2 * stored.model("global", None).parameters == model.active_parameters
    encoded = as_safetensors(model)
    tensors = load(encoded.data)
    assert {name.split(".")[1] for name in tensors if name.startswith("network.")} == {"personal", "shared"}
    (tmp_path / "model.safetensors").write_bytes(encoded.data)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["alpha"]) == pytest.approx(0.7)
        assert len(json.loads(file.metadata()["densities"])) == 2 * len(whole)
    assert "Checked with torch" in as_torch(model).remark


def test_a_global_model_under_one_mask_is_exported_and_told_as_sparse(plan, tmp_path):
    words = (
        *("method=ssfl", "mask.scope=tensor", "sparsity=0.5", "dataset=digits", "logger=none"),
        *("federation.rounds=1", "federation.clients=3", "federation.clients_per_round=2"),
        *("training.epochs=1", "hardware.workers=1", "hardware=cpu"),
    )
    made = plan(*words)
    run(made, tmp_path / "run")
    model = StoredRun(tmp_path / "run").model("global", None)
    active = sum(made.active_counts(model.space))
    assert model.active_parameters == pytest.approx(active, abs=5)  # a weight may end at 0 by itself
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        densities = [float(row["density"]) for row in csv.DictReader(file)]
    assert densities == pytest.approx([active / model.parameters] * 3)


@pytest.mark.parametrize("method", ["apfl", "mapper", "pfedme"])
def test_fine_tuning_takes_plain_steps(plan, tmp_path, method):
    """An own step needs tensors of the client; a fine-tuned copy of the global model has none."""
    words = (
        *("dataset=digits", "logger=none", "federation.rounds=1", "federation.clients=3"),
        *("federation.clients_per_round=2", "training.epochs=1", "hardware.workers=1", "finetune.epochs=1"),
    )
    summary = run(plan(f"method={method}", *words), tmp_path / "run")
    assert summary["final/accuracy/finetuned"] > summary["final/accuracy/global"]


def test_too_many_neighbours_are_refused_before_the_run(plan):
    with pytest.raises(
        UserError, match="method.neighbours=10 .* federation.clients=4 .* method.neighbours=3"
    ):
        plan("method=dispfl", "federation.clients=4", "federation.clients_per_round=2")
