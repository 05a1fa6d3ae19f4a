"""Networks that are not ours: by a dotted path, from timm, and what becomes of their BatchNorm."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fedspa.config.network import build_model
from fedspa.core.errors import UserError
from fedspa.core.weights import ParameterSpace
from fedspa.costs.network import NetworkCosts
from fedspa.models.batchnorm import with_batchnorm
from fedspa.models.checking import check_forward
from fedspa.models.personal_layers import set_personal_layers
from fedspa.runs import experiment
from fedspa.runs.assembly import build as build_federation

SOURCE = """
from torch import nn

def net(in_channels, num_classes, width=4):
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=2, dilation=2, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes),
    )

def pooled(in_channels, num_classes):
    return nn.Sequential(
        nn.Conv2d(in_channels, 64, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(64), nn.Flatten(),
        nn.Linear(64, num_classes),
    )

def twice(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(2 * classes))

def nothing():
    return 3
"""
SHORT = (
    *("dataset=synthetic", "federation.clients=4", "federation.clients_per_round=2", "federation.rounds=2"),
    *("training.epochs=1", "logger=none"),
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of somebody else's, `foreignnets`."""
    (tmp_path / "foreignnets.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "foreignnets"
    sys.modules.pop("foreignnets", None)


def dotted(name: str, *more: str) -> tuple[str, ...]:
    return ("model=dotted", f"model.path=foreignnets.{name}", "trusted_packages=[foreignnets]", *more)


def build(plan, channels: int = 1, side: int = 8, classes: int = 10) -> nn.Module:
    facts = {"channels": channels, "image_size": side, "classes": classes, "mean": [0.5], "std": [0.5]}
    return build_model(replace(plan, dataset=replace(plan.dataset, **facts)))


def test_a_dotted_path_is_given_what_its_parameters_ask_for(plan, package):
    network = build(plan(*dotted("net", "model.arguments={width: 6}")), channels=3, classes=7)
    assert network(torch.zeros(2, 3, 8, 8)).shape == (2, 7) and network[0].out_channels == 6
    assert ParameterSpace.of(network).statistics == 4


NESTED = (
    "model.arguments={path: subprocess.getoutput, arguments: {cmd: 'false'}, trusted_packages: [subprocess]}"
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model=dotted", "model.path=foreignnets.net"), "must be named in trusted_packages"),
        (("model=dotted",), "model.path is missing"),
        (
            ("model=dotted", "model.path=fedspa.core.paths.project_root"),
            "is no network: of fedspa itself it must be",
        ),
        (
            ("model=dotted", "model.path=fedspa.models.dotted_network.dotted_network", NESTED),
            "dotted_network is no network: of fedspa itself",
        ),
        (
            ("model._target_=fedspa.core.paths.project_root",),
            "project_root makes no network: of fedspa's own functions",
        ),
        (dotted("nett"), "has no attribute 'nett'"),
        (dotted("nothing"), "makes a int, not a torch.nn.Module"),
        (dotted("net", "model.arguments={wide: 6}"), "cannot be made of .*wide=6"),
        (dotted("twice"), r"makes \(2, 20\), which must be \(2, 10\), one logit for each of the classes"),
        (("model=timm", "model.name=x", "model.batchnorm=frozen"), "model.batchnorm=frozen is not known"),
    ],
)
def test_mistakes_are_told_in_a_sentence(plan, package, overrides, message):
    with pytest.raises(UserError, match=message):
        build(plan(*overrides))


def test_images_that_are_too_small_are_refused_with_what_torch_says(plan):
    source = replace(plan("dataset=synthetic").dataset, image_size=4)
    with pytest.raises(UserError, match=r"model=x cannot take images of 1 x 4 x 4 \(.*Kernel size"):
        check_forward("x", nn.Sequential(nn.Conv2d(1, 2, 7)), source)


POLICIES = {
    "average": ["model.batchnorm=average"],
    "norm": ["personal_layers=norm", "model.batchnorm=null"],
    "groupnorm": ["model.batchnorm=groupnorm"],
}


@pytest.mark.parametrize("policy", POLICIES)
def test_whole_runs_by_policy(plan, package, tmp_path, policy):
    summary = experiment.run(
        plan(*SHORT, *dotted("net", *POLICIES[policy]), "federation.wire=fp32", "sparsity=0.5"),
        tmp_path,
    )
    table = (tmp_path / "tensors.csv").read_text()
    assert ("running_var" in table) == (policy == "average")
    encoded, exact = summary["cost/traffic_encoded_bytes"], summary["cost/traffic_bytes"]
    # What is counted and what is encoded are the same values; the frames of 4 client updates' messages come on top.
    assert 0 < encoded - exact <= 4 * 2 * 64


def test_curves_of_weights_that_clients_do_not_share_are_refused(plan, package, tmp_path):
    options = (*SHORT, *dotted("net", *POLICIES["norm"]), "theory.every=1")
    with pytest.raises(UserError, match="theory.every=1 is about weights that clients share"):
        experiment.run(plan(*options), tmp_path)


ONE_LEFT = ("dataset.train_rows=164", "partition=iid")  # 41 images each of the four clients


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (*ONE_LEFT, "training.batch_size=8"),
            r"cannot train on one example \(Expected more than 1 value per channel.*\), but of the 41 training images "
            r"of client 0 training.batch_size=8 leaves a batch of one: use training.drop_last=true or model.batchnorm=",
        ),
        (
            ("dataset.train_rows=4", "partition=iid"),
            "of the 1 training images of .*: use clients of more images",
        ),
        ((*ONE_LEFT, "training.batch_size=1", "training.drop_last=true"), "use a larger training.batch_size"),
        ((*ONE_LEFT, "training.batch_size=8", "training.drop_last=true"), None),
        ((*ONE_LEFT, "training.batch_size=8", "model.batchnorm=groupnorm"), None),
        ((*ONE_LEFT, "training.batch_size=9"), None),
        ((*ONE_LEFT, "training.batch_size=8", "model.path=foreignnets.net"), None),  # its maps are larger
    ],
)
def test_a_batch_of_one_image_is_refused_where_batchnorm_has_1_x_1_maps(plan, package, options, message):
    checked = plan(*SHORT, *dotted("pooled", "model.batchnorm=average"), *options)
    if message is None:
        build_federation(checked)
        return
    with pytest.raises(UserError, match=message):
        build_federation(checked)


def test_groupnorm_takes_the_layers_place_and_its_scales():
    network = nn.Sequential(nn.Conv2d(1, 48, 3), nn.BatchNorm2d(48), nn.BatchNorm2d(7, affine=False))
    scales = network[1].weight
    with_batchnorm(network, "groupnorm")
    assert (type(network[1]), network[1].num_groups, network[2].num_groups) == (nn.GroupNorm, 24, 7)
    assert network[1].weight is scales and not list(network.buffers())
    with pytest.raises(UserError, match="say what becomes of them by model.batchnorm"):
        set_personal_layers(nn.Sequential(nn.BatchNorm2d(2)), "none", None)


def test_depthwise_and_dilated_convolutions_are_counted_by_hand(package):
    from foreignnets import net

    costs = NetworkCosts.of(net(1, 10), (1, 8, 8))
    first, depthwise, linear = 64 * (2 * 9 * 4 + 4), 64 * 2 * 9 * 4, 2 * 40 + 10
    assert costs.forward_flops() == first + depthwise + linear


def test_tables_tell_a_network_of_others_from_ours(plan, package):
    """The paper's resnet18 is ours: its printed values must not stand beside timm's."""
    assert plan("model=resnet18").names["model"] == "resnet18"
    assert plan("model=timm", "model.name=resnet18").names["model"] == "timm:resnet18"
    assert plan(*dotted("net")).names["model"] == "dotted:foreignnets.net"


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
class TestTimm:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050"])
    def test_its_head_and_channels_are_the_datas(self, plan, name, policy):
        network = build(plan("model=timm", f"model.name={name}", *POLICIES[policy]), channels=1, side=32)
        assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
        space = ParameterSpace.of(network)
        assert (bool(space.statistics), bool(space.kept)) == (policy != "groupnorm", policy == "norm")
        assert not [module for module in sys.modules if module.partition(".")[0] == "torchvision"]

    def test_a_name_that_it_does_not_know(self, plan):
        with pytest.raises(UserError, match="resent18 is no network of timm: did you mean resnet18"):
            build(plan("model=timm", "model.name=resent18"))

    def test_a_network_that_costs_cannot_count_is_named(self, plan):
        network = build(plan("model=timm", "model.name=vit_tiny_patch16_224"), channels=3, side=32)
        costs = NetworkCosts.of(network, (3, 32, 32))
        assert costs.forward_flops() is None and "VisionTransformer" in " ".join(costs.uncounted)
