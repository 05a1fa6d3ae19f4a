"""Every YAML shipped, who wins over whom, what is refused, and the hash."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedspa.config.network import build_model
from fedspa.config.schema import ONE_EACH
from fedspa.core.errors import UserError
from fedspa.core.paths import config_dir
from fedspa.training.hardware import Hardware

OPTIONS = sorted((file.parent.name, file.stem) for file in config_dir().glob("*/*.yaml"))
CELLS = [(data, setting) for data in ("emnist", "cifar10", "cifar100") for setting in ("iid", "a", "b")]


def choose(group: str, option: str) -> list[str]:
    """The command line that chooses an option."""
    if (group, option) == ("mask", "none"):
        return ["method=fedavg"]
    sizes = ["train_size=100", "test_size=9", "test_split=test", "fingerprint=beef"]
    if group == "metric" and option in ("mse", "mae"):
        facts = [*sizes, "inputs=4", "task=regression", "label=y"]
        return ["dataset=table", *(f"dataset.{fact}" for fact in facts), f"metric=[{option}]"]
    if group == "metric":
        return [f"metric=[{option}]" if option == "accuracy" else f"metric=[accuracy,{option}]"]
    # Facts that are read from the data, where they are not given.
    if (group, option) in (("dataset", "table"), ("dataset", "text")):
        facts = [*sizes, "classes=4", "inputs=4" if option == "table" else "vocabulary=4", "name=" + option]
        more = ["task=classification", "label=y"] if option == "table" else []
        return [f"dataset={option}", *(f"dataset.{fact}" for fact in [*facts, *more])]
    if (group, option) in (("dataset", "hub"), ("dataset", "folder")):
        facts = [
            "classes=2",
            "channels=3",
            "image_size=8",
            "train_size=100",
            "test_size=9",
            "mean=[0.5]",
            "std=[0.5]",
            "test_split=test",
            *({"hub": [f"revision={'0' * 40}", "subset=default"], "folder": ["fingerprint=beef"]}[option]),
        ]
        return [f"dataset={option}", f"dataset.name={option}", *(f"dataset.{fact}" for fact in facts)]
    needs = {
        ("partition", "column"): ["partition.column=writer"],
        ("partition", "file"): ["partition.digest=beef"],
        ("mask", "nm"): ["layer_sparsity=uniform"],
    }
    return [f"{group}={option}", *needs.get((group, option), [])]


# Every YAML


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_is_sound(plan, group, option):
    named = {("model", "timm"): "timm:resnet18", ("model", "dotted"): "dotted:None"}
    assert plan(*choose(group, option)).names.get(group, option) == named.get((group, option), option)


def test_a_setting_that_no_yaml_mentions_can_be_set(plan):
    assert "val_fraction" not in (config_dir() / "dataset/digits.yaml").read_text()
    assert plan("dataset.val_fraction=0.25").dataset.val_fraction == 0.25


@pytest.mark.parametrize(("data", "setting"), CELLS)
def test_the_papers_cells(plan, data, setting):
    cell = plan(f"experiment={data}_{setting}")
    gammas = {"a": 0.5, "b": 0.3} if data == "cifar10" else {"a": 0.2, "b": 0.1}
    federation, training = cell.settings.federation, cell.settings.training
    assert (federation.clients, federation.clients_per_round) == (100, 10)
    assert federation.rounds == (400 if data == "emnist" else 1000)
    assert (training.epochs, training.batch_size, training.lr, training.lr_decay) == (5, 128, 0.1, 0.998)
    assert (training.momentum, training.weight_decay) == (0.0, 5e-4)
    assert cell.settings.eval.every == 5
    assert cell.settings.sparsity == 0.5
    assert cell.names["model"] == {"emnist": "lenet5", "cifar10": "vgg11", "cifar100": "resnet18"}[data]
    assert cell.names["partition"] == ("iid" if setting == "iid" else "dirichlet")
    assert cell.resolved["partition"].get("gamma") == gammas.get(setting)


@pytest.mark.parametrize("preset", [option for group, option in OPTIONS if group == "experiment"])
def test_a_preset_begins_with_its_command(preset):
    text = (config_dir() / "experiment" / f"{preset}.yaml").read_text()
    assert text.splitlines()[1].startswith(f"# python src/train.py experiment={preset}")


def test_sparsity_is_a_number_and_no_group(plan):
    """With a folder conf/sparsity/ Hydra takes sparsity=0.37 for the choice of an option of that group, and
    refuses it: "Config group override must be a string or a list. Got float"."""
    assert not (config_dir() / "sparsity").exists()
    assert plan("sparsity=0.37").settings.sparsity == 0.37


# Who wins


def test_the_data_set_chooses_the_model_unless_told_otherwise(plan):
    assert plan("dataset=cifar10").names["model"] == "vgg11"
    assert plan("dataset=cifar10", "model=lenet5").names["model"] == "lenet5"


def test_a_preset_wins_over_the_data_set_and_the_command_line_over_the_preset(plan):
    small = plan("experiment=cifar10_small")
    assert (small.names["dataset"], small.names["model"]) == ("cifar10", "lenet5")
    assert (small.settings.federation.clients, small.resolved["dataset"]["train_rows"]) == (20, 6000)
    told = plan("experiment=cifar10_small", "model=vgg11", "federation.clients=25", "dataset.train_rows=5000")
    assert told.names["model"] == "vgg11"
    assert (told.settings.federation.clients, told.resolved["dataset"]["train_rows"]) == (25, 5000)


@pytest.mark.parametrize("preset", [[], ["experiment=cifar10_small"], ["experiment=emnist_b"]])
def test_the_method_chooses_its_mask(plan, preset):
    assert plan(*preset).names["mask"] == "dst"
    assert plan(*preset, "mask=rsm").names["mask"] == "rsm"
    dense = plan(*preset, "method=fedavg")
    assert dense.names["mask"] == "none"
    assert dense.mask is None


def test_a_dense_method_records_sparsity_0(plan):
    dense = plan("method=fedavg", "sparsity=0.7")
    assert dense.settings.sparsity == dense.resolved["sparsity"] == 0
    assert "s0.0" in dense.settings.name
    assert plan("method=fedavg", "sparsity=0.2").config_hash == dense.config_hash


def test_the_annealing_horizon_follows_the_rounds_until_it_is_set(plan):
    assert plan("federation.rounds=7").mask.anneal_rounds == 7
    assert plan("federation.rounds=7", "mask.anneal_rounds=1000").mask.anneal_rounds == 1000


# What is refused


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("partition.gamma=foo", "partition.gamma=foo is not a number."),
        ("+partition.gama=1", "partition.gama is not a setting: did you mean gamma"),
        ("+training.leaning_rate=1", "training.leaning_rate is not a setting: valid are "),
        ("+fedration=1", "fedration is not a setting: did you mean federation or partition?"),
        ("+dataset.augmentation.flp=true", "dataset.augmentation.flp is not a setting: did you mean flip?"),
        ("dataset.mean=[a]", "dataset.mean[0]=a is not a number."),
        ("hardware.threads=2.5", "hardware.threads=2.5 is not a whole number."),
        ("hardware.precision=16", "hardware.precision=16 is not known: valid are 32-true, 64-true,"),
        ("dataset.augmentation.flip=2", "dataset.augmentation.flip=2 is not true or false."),
        ("training.drop_last=1", "training.drop_last=1 is not true or false."),
        ("save.local=maybe", "save.local=maybe is not true or false."),
        ("dry_run=null", "dry_run=null is not true or false."),
        ("hardware.deterministic=2", "hardware.deterministic=2 is not true or false."),
        ("dataset.augmentation.flip=twice", "dataset.augmentation.flip=twice is not true or false."),
        ("training.lr=inf", "training.lr=inf is not a finite number: it must be more than 0."),
        ("training.lr=nan", "training.lr=nan is not a finite number: it must be more than 0."),
        ("hardware.precision=null", "hardware.precision=null is not a text."),
        ("partition.gamma=null", "partition.gamma=null is not a number."),
        (
            "partition.gamma=[1,2]",
            "partition.gamma=[1,2] is not a number: a run takes one value, a sweep (-m partition.gamma=a,b) runs",
        ),
        ("dataset.mean=0.5", "dataset.mean=0.5 is not a list"),
        ("dataset.augmentation=flip", "dataset.augmentation=flip is no section: set what is in it, as in"),
        ("eval.targets=[[70]]", "eval.targets=[[70]] is not a plain list"),
        ("hardware.lr=1", "hardware.lr is not a setting: did you mean server_optimizer.lr or training.lr?"),
        ("~training", "training cannot be left out"),
        (
            "sparsity=${times:1}",
            "sparsity=${times:1} cannot be resolved: the resolver does not take these arg",
        ),
        ("sparsity=${timse:1,2}", "sparsity=${timse:1,2} cannot be resolved: there is no resolver timse."),
        ("sparsity=${sparsity}", "sparsity=${sparsity} cannot be resolved: it refers to itself."),
        ("name=${oc.env:NO_SUCH}", "cannot be resolved: there is no environment variable NO_SUCH."),
        ("seed=${sparsity}", "seed=0.5 is not a whole number."),
        ("seed=???", "seed=??? has no value: write seed=<value>."),
        ("name=${dataset.path}", "cannot be resolved: the setting dataset.path does not exist or is null."),
        ("partition.gamma=???", "partition.gamma=??? has no value"),
        ("eval.targets=[70,???]", "eval.targets.1=??? has no value"),
        ("training=???", "training=??? has no value"),
        (f"federation.rounds={10**30}", f"federation.rounds={10**30} is out of range"),
        ("loggers.mlflow=null", "loggers.mlflow=null is no component"),
        ("hardware.threads=0", "hardware.threads=0 is out of range: it must be at least 1."),
        (
            "metric=[macro_f1]",
            "metric has no accuracy, which the summary is about: use metric=[accuracy,macro_f1].",
        ),
        ("mask=none", "method=fedspa needs masks, but mask=none: use mask=dst or"),
        (
            "name=${nothing}",
            "name=${nothing} cannot be resolved: the setting nothing does not exist or is null.",
        ),
        ("mask._target_=os.system", "mask._target_=os.system is not a class of fedspa: a package"),
        (
            "mask._target_=fedspa.core.errors.nearest",
            "_target_=fedspa.core.errors.nearest is not a class of fedspa.",
        ),
        (
            "mask._target_=fedspa.config.schema.Path",
            "mask._target_=fedspa.config.schema.Path is not a class of fedspa.",
        ),
        ("mask._target_=fedspa.masks.dts.DST", "No module named 'fedspa.masks.dts'"),
        ("mask._target_=fedspa.methods.fedavg.FedAvg", "it must be a MaskSearcher of fedspa.masks.base."),
        ("mask._target_=fedspa.masks.base.MaskSearcher", "lacks next_mask, which a class derived"),
        (
            "hardware._target_=fedspa.config.plan.Plan",
            "it must be a Hardware of fedspa.training.hardware.",
        ),
        ("+loggers.a._target_=fedspa.config.plan.Plan", "it must be a Tracker of fedspa.core.tracker."),
        ("dataset._target_=null", "dataset._target_ is missing: it must name a class, as in _target_: "),
        ("mask._target_=3", "mask._target_=3 is not a class of fedspa"),
        ("+metrics.speed=1", "metrics.speed=1 is no component: it must be a _target_ and its options."),
        ("method._target_=os.system", "method._target_=os.system is not a class of fedspa"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(plan, override, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)) as raised:
        plan(override)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("group", ["model", *ONE_EACH])
def test_a_component_without_a_name_or_a_class_is_told_in_one_sentence(plan, group):
    for override, told in (
        (f"~{group}.name", f"{group}.name is missing: "),
        (f"~{group}._target_", f"{group}._target_ is missing: it must name a class"),
        (f"~{group}", f"{group}.name is missing: "),
    ):
        with pytest.raises(UserError, match=rf"^{told}[^\n]*\.$"):
            build_model(plan(override))


@pytest.mark.parametrize(
    "part", ["metrics", "metrics.accuracy._target_", "loggers", "loggers.pictures._target_"]
)
def test_a_metric_or_a_logger_without_a_class_is_told_in_one_sentence(plan, part):
    told = (
        f"{part} is missing: it must name a class" if "_target_" in part else f"{part} cannot be left out: "
    )
    with pytest.raises(UserError, match=rf"^{told}[^\n]*\.$"):
        plan("logger=csv", f"~{part}")


def test_an_explicit_mask_for_a_dense_method_is_refused(plan):
    with pytest.raises(UserError, match="method=fedavg trains dense, so mask=dst has no meaning"):
        plan("method=fedavg", "mask=dst")


@pytest.mark.parametrize(
    ("method", "setting"),
    [("local", "weighting"), ("local", "normaliser"), ("fedavg", "normaliser"), ("ditto", "normaliser")],
)
def test_a_setting_without_effect_is_not_there(plan, method, setting):
    with pytest.raises(UserError, match=f"method.{setting} is not a setting"):
        plan(f"method={method}", f"+method.{setting}=samples")
    assert setting not in plan(f"method={method}").resolved["method"]


def test_ditto_trains_as_many_epochs_as_the_others_or_says_so(plan):
    assert plan("method=ditto", "method.personal_epochs=4", "training.epochs=6")
    told = "training.epochs=2 is not what method.shared_epochs=2 and method.personal_epochs=3 add up to: it must be 5"
    with pytest.raises(UserError, match=told):
        plan("method=ditto", "training.epochs=2")


def test_classes_of_other_packages_need_trust(plan):
    target = "hardware._target_=tests_plugin.Cluster"
    with pytest.raises(UserError, match="a package of your own must be named in trusted_packages"):
        plan(target)
    with pytest.raises(UserError, match="is not a class of fedspa or tests_plugin: No module named"):
        plan(target, "trusted_packages=[tests_plugin]")


# The hash


def test_the_hash_ignores_what_does_not_change_results(plan):
    first = plan("dataset=cifar10").config_hash
    assert re.fullmatch("[0-9a-f]{16}", first)
    same = ["name=other", "hardware=cpu", "logger=none", f"dataset.path={config_dir()}", "save.local=true"]
    assert plan("dataset=cifar10", *same).config_hash == first
    assert plan("dataset=cifar10", "partition.gamma=1").config_hash == (
        plan("dataset=cifar10", "partition.gamma=1.0").config_hash
    )


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "sparsity=0.4",
        "training.lr=0.2",
        "partition.gamma=0.9",
        "mask=rsm",
        "hardware.precision=bf16-mixed",
    ],
)
def test_the_hash_sees_what_changes_results(plan, override):
    assert plan(override).config_hash != plan().config_hash


# The network, and the hardware


def test_the_network_takes_its_sizes_from_the_data_set(plan):
    network = build_model(plan("dataset=emnist_letters"))
    assert sum(parameter.numel() for parameter in network.parameters()) == 439_096


def test_a_networks_options_are_checked_against_its_constructor(plan):
    with pytest.raises(UserError, match="model.width is not a setting"):
        build_model(plan("dataset=mnist", "+model.width=2"))


@pytest.mark.parametrize(
    "target", ["fedspa.core.errors.UserError", "fedspa.config.plan.Plan", "fedspa.masks.dst.DST"]
)
def test_a_class_that_is_no_network_is_refused(plan, target):
    with pytest.raises(UserError, match=f"model._target_={target} is not a class.*a Module of torch.nn."):
        build_model(plan(f"model._target_={target}"))


def test_a_network_that_cannot_take_the_images_is_refused(plan):
    with pytest.raises(UserError, match="model=lenet5 cannot take images of 8 x 8 pixels"):
        build_model(plan("dataset=digits", "model=lenet5"))


def test_hardware_makes_a_fabric():
    fabric = Hardware(name="cpu", accelerator="cpu", precision="64-true").fabric()
    assert fabric.device.type == "cpu"
    assert fabric.world_size == 1


def test_a_learning_rate_that_becomes_zero_is_refused(plan):
    """0.1 x 0.5^t is at most 2^-150, half of the least float32, from t = 147 on: round 148."""
    words = ("training.lr=0.1", "training.lr_decay=0.5")
    with pytest.raises(UserError) as caught:
        plan(*words, "federation.rounds=1000")
    told = str(caught.value)
    assert "training.lr=0.1 " in told and "training.lr_decay=0.5" in told and "float32" in told
    assert "from round 148 of federation.rounds=1000" in told and "federation.rounds=147 at most" in told
    assert np.float32(0.1 * 0.5**147) == 0 < np.float32(0.1 * 0.5**146)
    plan(*words, "federation.rounds=147")
    plan(*words, "federation.rounds=1000", "hardware.precision=64-true")
    with pytest.raises(UserError, match="float64 from round"):
        plan(*words, "federation.rounds=2000", "hardware.precision=64-true")
    with pytest.raises(UserError, match="from round 1 .*: raise training.lr\\."):
        plan("training.lr=1e-50")
