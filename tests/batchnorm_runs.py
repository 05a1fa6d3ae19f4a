"""A small network with BatchNorm under every method, for the tests of its policies."""

from __future__ import annotations

from federations import Federation, federation, halved, random_clients
from torch import nn

from fedspa.core.settings import TrainingSettings
from fedspa.masks.dst import DST
from fedspa.masks.rigl import RigL
from fedspa.masks.rsm import RSM
from fedspa.masks.snip import SNIP
from fedspa.methods.base import Method
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.local import Local
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.methods.subsampling import Subsampling
from fedspa.models.batchnorm import with_batchnorm
from fedspa.models.initialise import seeded
from fedspa.models.personal_layers import set_personal_layers

CLIENTS = random_clients(3, 9, 14, 8)  # with batches of 4, one client has a last batch of a single image
TRAINING = TrainingSettings(epochs=2, batch_size=4, clip_norm=0.5, momentum=0.5, weight_decay=0.1)
METHODS = {
    "fedavg": (FedAvg(name="fedavg"), None),
    "fedspa-dst": (FedSpa(name="fedspa"), DST(name="dst", initial="different", anneal_rounds=3)),
    "fedspa-rsm": (FedSpa(name="fedspa"), RSM(name="rsm")),
    "fedspa-holders": (FedSpa(name="fedspa", normaliser="holders"), RSM(name="rsm", initial="different")),
    "fedspa-snip": (FedSpa(name="fedspa"), SNIP(name="snip")),
    "fedspa-rigl": (FedSpa(name="fedspa"), RigL(name="rigl", anneal_rounds=3)),
    "ditto": (Ditto(name="ditto", shared_epochs=1, personal_epochs=2), None),
    "local": (Local(name="local"), None),
    "subfedavg": (SubFedAvg(name="subfedavg", accuracy_threshold=0.0), None),
    "subsampling": (Subsampling(name="subsampling", rescale=True), None),
}


def network(policy: str = "average") -> nn.Module:
    """A small network with two BatchNorm layers under a policy of `model.batchnorm`, or `norm`, those of
    `personal_layers`."""
    made = seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
        ),
        seed=0,
    )
    if policy == "norm":
        set_personal_layers(made, "norm", None)
        return made
    return with_batchnorm(made, policy)


def run(
    name: str, policy: str = "average", rounds: int = 2, method: Method | None = None, **options
) -> Federation:
    """A federation of four clients, not yet run: half of each weight tensor is active, where the method has masks."""
    known, searcher = METHODS[name]
    model = network(policy)
    return federation(
        method or known,
        model,
        CLIENTS,
        TRAINING,
        searcher=searcher,
        active=halved(model),
        rounds=rounds,
        **options,
    )
