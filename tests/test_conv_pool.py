"""Convolution, pooling and ReLU by code in C: what torch computes, exactly where the order of sums does not matter."""

from __future__ import annotations

import copy
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from federations import train
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import KERNEL, PIXELS, ROOT, WORK, kernel_of, lenet_engine, needs_kernel, stock
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

from fedspa.costs.network import NetworkCosts
from fedspa.kernels.conv_pool import ConvPoolKernel
from fedspa.models.conv_pool import ConvPool
from fedspa.models.initialise import seeded
from fedspa.models.lenet5 import LeNet5
from fedspa.training.choice import Auto, Compiled, Eager


def results(
    function, convolution: nn.Conv2d, images: torch.Tensor, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradients of images, weight and bias."""
    images = images.detach().requires_grad_()
    pooled = function(convolution, images)
    return [pooled.detach(), *torch.autograd.grad(pooled, [images, *convolution.parameters()], gradient)]


@st.composite
def cases(draw) -> tuple[nn.Conv2d, torch.Tensor, torch.Tensor]:
    """A convolution, images and a gradient of small whole numbers: every sum is exact, whatever its order, and ties in
    a pooling window are frequent."""
    side = draw(st.integers(1, 6))
    height, width = (side + draw(st.integers(1, 7)) for _ in range(2))
    images, channels, outputs = draw(st.integers(0, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 50))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=source).float()

    convolution = nn.Conv2d(channels, outputs, side)
    convolution.load_state_dict({"weight": whole(outputs, channels, side, side), "bias": whole(outputs)})
    pictures = whole(images, channels, height, width)
    if draw(st.booleans()):
        pictures = pictures.to(memory_format=torch.channels_last)
    pooled = whole(images, outputs, (height - side + 1) // 2, (width - side + 1) // 2)
    return convolution, pictures, pooled


def assert_as_torch(kernel: ConvPoolKernel, case: tuple[nn.Conv2d, torch.Tensor, torch.Tensor]) -> None:
    assert kernel.serves(*case[:2])
    for ours, theirs in zip(results(kernel, *case), results(stock, *case), strict=True):
        assert ours.shape == theirs.shape and torch.equal(ours, theirs)


@needs_kernel
@settings(max_examples=150)
@given(cases())
def test_output_and_gradients_are_those_of_torch(case):
    assert_as_torch(KERNEL, case)


@needs_kernel
def test_shorter_vectors_give_the_same(afresh, monkeypatch):
    """As on a processor without AVX-512."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vectors are short here anyway")
    monkeypatch.setenv("CC", "cc -mno-avx512f")
    kernel = ConvPoolKernel()
    assert kernel._lanes == 8 and KERNEL._lanes == 16
    settings(max_examples=50)(given(cases())(lambda case: assert_as_torch(kernel, case)))()


@needs_kernel
def test_sums_are_as_exact_as_torchs():
    """LeNet5's own layers on noise; a decision of pooling or ReLU may turn on rounding, so few values may differ."""
    source = torch.Generator().manual_seed(0)
    for channels, outputs, side in ((1, 20, 28), (20, 50, 12)):
        convolution = seeded(lambda c=channels, o=outputs: nn.Conv2d(c, o, 5), seed=0)
        images = torch.randn(32, channels, side, side, generator=source)
        gradient = torch.randn(32, outputs, (side - 4) // 2, (side - 4) // 2, generator=source)
        exact = results(stock, convolution.double(), images.double(), gradient.double())
        ours = results(KERNEL, convolution.float(), images, gradient)
        for mine, true in zip(ours, exact, strict=True):
            assert (mine - true).norm() <= 1e-5 * true.norm()


@needs_kernel
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["images", "weight", "bias"])
def test_what_is_not_finite_is_not_lost(where, value):
    convolution = seeded(lambda: nn.Conv2d(2, 18, 3), seed=0)
    images = torch.randn(3, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tensor = images if where == "images" else getattr(convolution, where)
        tensor.view(-1)[-1 if where == "bias" else 40] = value
    ours, theirs = KERNEL(convolution, images), stock(convolution, images)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    if where == "bias" and value != -float("inf"):  # which ReLU makes a zero of
        assert not ours.isfinite().all()


@needs_kernel
def test_it_serves_what_it_can_compute_alone():
    images = torch.zeros(1, 4, 8, 8)
    assert KERNEL.serves(nn.Conv2d(4, 2, 3), images)
    for options in ({"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"bias": False}):
        assert not KERNEL.serves(nn.Conv2d(4, 2, 3, **options), images)
    assert not KERNEL.serves(nn.Conv2d(4, 2, (3, 5)), images)
    assert not KERNEL.serves(nn.Conv2d(4, 2, 8), images)  # of one value pooling by 2 leaves none
    assert not KERNEL.serves(nn.Conv2d(4, 2, 3).double(), images.double())
    assert not KERNEL.serves(nn.Conv2d(4, 2, 3, device="meta"), images.to("meta"))
    assert not KERNEL.serves(nn.Conv2d(4, 2, 3), images[0])  # torch takes a single image, too
    assert not KERNEL.serves(nn.Conv2d(3, 2, 3), images)  # torch says that it cannot be
    with torch.random.fork_rng(), FakeTensorMode():
        assert not KERNEL.serves(nn.Conv2d(4, 2, 3), torch.zeros(1, 4, 8, 8))
    with torch.autocast("cpu"):
        assert not KERNEL.serves(nn.Conv2d(4, 2, 3), images)
    torch.set_num_threads(2)  # torch shares an operation among them
    try:
        assert not KERNEL.serves(nn.Conv2d(4, 2, 3), images)
    finally:
        torch.set_num_threads(1)


@needs_kernel
def test_a_network_with_it_can_be_copied_and_sent():
    runner = Eager(name="eager").build(lenet_engine(), WORK)
    network, images = runner.module.network, PIXELS.batch(torch.arange(9), None).inputs
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert isinstance(other.pooled.kernel, ConvPoolKernel)
        assert torch.equal(other(images), network(images))


class Halved(nn.Conv2d):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) / 2


@needs_kernel
def test_a_layer_that_does_more_is_called():
    images = torch.randn(2, 4, 8, 8)
    assert not KERNEL.serves(Halved(4, 2, 3), images)
    for way in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        convolution = nn.Conv2d(4, 2, 3)
        getattr(convolution, f"register_{way}")(lambda *_: None)
        assert not KERNEL.serves(convolution, images)
    pruned = prune.random_unstructured(nn.Conv2d(4, 2, 3), "weight", 0.5)
    assert not KERNEL.serves(pruned, images)


class Counting:
    """In place of a kernel."""

    def __init__(self) -> None:
        self.calls = 0

    def serves(self, convolution: nn.Conv2d, images: torch.Tensor) -> bool:
        return len(images) > 1

    def __call__(self, convolution: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return stock(convolution, images)


def test_a_layer_asks_its_kernel_where_that_serves():
    layer, convolution = ConvPool(), nn.Conv2d(1, 3, 3)
    layer.kernel = kernel = Counting()
    layer(convolution, torch.zeros(2, 1, 6, 6))
    assert kernel.calls == 1
    layer(convolution, torch.zeros(1, 1, 6, 6))
    assert kernel.calls == 1
    with torch.no_grad():
        layer(convolution, torch.zeros(2, 1, 6, 6))
    assert kernel.calls == 2


@needs_kernel
def test_costs_are_those_of_the_layers():
    runner = Eager(name="eager").build(lenet_engine(), WORK)
    network = runner.module.network
    assert NetworkCosts.of(network, (1, 16, 16)) == NetworkCosts.of(LeNet5(1, 16, 5), (1, 16, 16))
    assert isinstance(network.pooled.kernel, ConvPoolKernel)


@needs_kernel
def test_a_client_update_is_trained_alike_with_and_without(afresh):
    ends = {}
    for kernels in ("auto", "torch"):
        runner = Eager(name="eager", kernels=kernels).build(lenet_engine(), WORK)
        assert (kernel_of(runner) is not None) == (kernels == "auto")
        drawn = torch.Generator().manual_seed(3)
        trained = train(
            runner, runner.weights, torch.arange(40), epochs=1, learning_rate=0.1, generator=drawn
        )
        ends[kernels] = trained.weights
    apart = (ends["auto"] - ends["torch"]).norm()
    assert 0 < apart <= 1e-4 * (ends["torch"] - lenet_engine().weights).norm()  # another order of sums


@needs_kernel
def test_auto_takes_them_and_the_other_engines_do_not():
    assert kernel_of(Auto(name="auto").build(lenet_engine(), WORK)) is not None
    assert kernel_of(Auto(name="auto", kernels="torch").build(lenet_engine(), WORK)) is None
    assert kernel_of(Compiled(name="compiled", compiler=None).build(lenet_engine(), WORK)) is None


@pytest.mark.slow
@needs_kernel
def test_it_stays_within_its_memory(tmp_path):
    """On thousands of shapes, under the sanitizers of addresses and of what C leaves undefined."""
    program = tmp_path / "bounds"
    made = subprocess.run(
        ["cc", "-std=gnu11", "-O1", "-g", "-march=native", "-fsanitize=address,undefined", "-o", str(program)]
        + ["-fno-sanitize-recover", f"-I{ROOT / 'src/fedspa/kernels'}", str(ROOT / "tests/conv_pool_bounds.c")],
        capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no sanitizers here: {made.stderr[:200]}")
    subprocess.run([str(program)], check=True)
