"""The networks: the paper's parameter counts, reproducible weights, and what they can take."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedspa.core.errors import UserError
from fedspa.models.initialise import seeded
from fedspa.models.lenet5 import LeNet5
from fedspa.models.resnet18 import ResNet18
from fedspa.models.small_cnn import SmallCNN
from fedspa.models.vgg11 import VGG11

CASES = [
    (LeNet5, 1, 28, 26),
    (LeNet5, 3, 32, 10),
    (VGG11, 3, 32, 10),
    (ResNet18, 3, 32, 100),
    (SmallCNN, 1, 8, 10),
]
EACH = pytest.mark.parametrize(("model", "channels", "size", "classes"), CASES)


@pytest.mark.parametrize(
    ("model", "channels", "size", "classes", "parameters"),
    [
        (LeNet5, 1, 28, 26, 439_096),
        (LeNet5, 3, 32, 10, 657_080),
        (VGG11, 3, 32, 10, 9_231_114),
        (ResNet18, 3, 32, 100, 11_220_132),
        (SmallCNN, 1, 8, 10, 26_090),
    ],
)
def test_parameter_counts(model, channels, size, classes, parameters):
    assert sum(p.numel() for p in model(channels, size, classes).parameters()) == parameters


@EACH
def test_logits_do_not_depend_on_the_memory_format_or_the_rest_of_the_batch(model, channels, size, classes):
    network = seeded(lambda: model(channels, size, classes), seed=0).double()
    images = torch.randn(3, channels, size, size, dtype=torch.float64)
    logits = network(images)
    assert logits.shape == (3, classes)
    fast = network.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(fast, logits)
    torch.testing.assert_close(network(images[1:2]), logits[1:2])


@EACH
def test_every_parameter_gets_a_gradient_and_there_is_no_other_state(model, channels, size, classes):
    network = model(channels, size, classes)
    F.cross_entropy(network(torch.randn(2, channels, size, size)), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())
    assert not list(network.buffers())


@pytest.mark.parametrize(
    ("model", "smallest"), [(LeNet5, 16), (VGG11, 32), (ResNet18, 8), (SmallCNN, 4)], ids=lambda v: str(v)
)
def test_the_smallest_image_works_and_a_smaller_one_is_refused_with_the_size_that_would(model, smallest):
    for size in (smallest, smallest + 3, 2 * smallest + 1):
        assert model(1, size, 5)(torch.randn(2, 1, size, size)).shape == (2, 5)
    with pytest.raises(
        UserError, match=rf"dataset.image_size={smallest - 1}.*smallest that work are {smallest} x"
    ):
        model(1, smallest - 1, 5)


def test_vgg_refuses_mnist_in_one_sentence():
    with pytest.raises(UserError) as error:
        VGG11(1, 28, 10)
    assert str(error.value) == (
        "model=vgg11 cannot take images of 28 x 28 pixels (dataset.image_size=28) because its five "
        "poolings by 2 leave nothing of them: the smallest that work are 32 x 32."
    )


def test_relu_after_pooling_is_the_textbook_lenet():
    network = LeNet5(1, 28, 26).double()
    textbook = nn.Sequential(
        network.conv1, nn.ReLU(), nn.MaxPool2d(2), network.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        network.fc3, nn.ReLU(), network.fc4,
    )  # fmt: skip
    images = torch.randn(4, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(network(images), textbook(images), rtol=0, atol=0)


def test_relu_after_pooling_is_the_textbook_vgg():
    network = seeded(lambda: VGG11(3, 32, 10), seed=0).double()
    layers = dict(network.features.named_children())
    for pool in [name for name in layers if name.startswith("pool")]:
        relu = pool.replace("pool", "relu")
        layers[pool], layers[relu] = layers[relu], layers[pool]
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    textbook = nn.Sequential(*layers.values(), nn.Flatten(), network.classifier)
    torch.testing.assert_close(network(images), textbook(images))


def test_vgg_starts_kaiming_normal_by_fan_out():
    network = seeded(lambda: VGG11(3, 32, 10), seed=0)
    for name, tensor in network.named_parameters():
        if name.endswith("bias"):
            assert not tensor.any()
        elif "norm" in name:
            assert (tensor == 1).all()
        else:
            wanted = math.sqrt(2 / (tensor.shape[0] * 9)) if tensor.dim() == 4 else 0.01
            assert tensor.std().item() == pytest.approx(wanted, rel=0.05)
            assert abs(tensor.mean().item()) < wanted / 10


@EACH
def test_weights_are_a_function_of_the_seed_alone(model, channels, size, classes):
    def flat(seed):
        return torch.cat(
            [p.flatten() for p in seeded(lambda: model(channels, size, classes), seed).parameters()]
        )

    torch.manual_seed(1)
    first = flat(7)
    torch.manual_seed(2)
    assert torch.equal(flat(7), first)
    assert not torch.equal(flat(8), first)


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    seeded(lambda: SmallCNN(1, 8, 10), seed=0)
    with pytest.raises(UserError):
        seeded(lambda: VGG11(1, 8, 10), seed=0)
    assert torch.equal(torch.get_rng_state(), before)
