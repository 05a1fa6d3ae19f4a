"""Engines agree: whatever computes a round, it is the round of the eager engine up to rounding."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federations import (
    Federation,
    engine,
    federation,
    halved,
    losses,
    random_clients,
    random_images,
    train,
)
from hydra import compose, initialize_config_dir
from lightning.fabric import Fabric
from safetensors.torch import load_file
from tape import TapeCaptures
from torch import nn
from torch._dynamo.utils import counters

from fedspa.config.plan import check
from fedspa.config.schema import register
from fedspa.core.client import Proximal, Trained
from fedspa.core.errors import UserError
from fedspa.core.paths import config_dir
from fedspa.core.settings import TrainingSettings
from fedspa.data.pixels import Augmentation, Pixels
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.local import Local
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.methods.subsampling import Subsampling
from fedspa.models.initialise import seeded
from fedspa.runs import experiment
from fedspa.training import compiled
from fedspa.training.base import Engine, LocalTask
from fedspa.training.choice import Auto, Compiled
from fedspa.training.compiled import CompiledEngine
from fedspa.training.compiling import compiling_afresh
from fedspa.training.eager import EagerEngine
from fedspa.training.flat import Layout
from fedspa.training.hardware import Hardware
from fedspa.training.workload import Workload

CLIENTS = random_clients(
    3, 10, 17, 9
)  # with batches of 4: one, three, five and three a pass, most of them partial


def network() -> nn.Module:
    """Convolution, normalisation, pooling and ReLU in place, on pictures of 8 x 8 pixels."""
    return seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(nn.Flatten(), nn.Linear(64, 3)),
        ),
        seed=0,
    )


WORK = Workload(largest=17, steps=100, test_batches=(3, 7))


def uncompiled(eager: EagerEngine) -> CompiledEngine:
    """The compiled engine's own functions, which no compiler has seen."""
    return CompiledEngine(eager, WORK, compiler=None)


METHODS = {
    "fedavg": (FedAvg(name="fedavg"), None),
    "fedspa-dst": (FedSpa(name="fedspa"), DST(name="dst", initial="different", anneal_rounds=3)),
    "fedspa-rsm": (FedSpa(name="fedspa"), RSM(name="rsm")),
    "ditto": (Ditto(name="ditto", shared_epochs=1, personal_epochs=2), None),
    "ditto-personal": (Ditto(name="ditto", shared_epochs=0, personal_epochs=1), None),
    "local": (Local(name="local"), None),
    "subfedavg": (SubFedAvg(name="subfedavg", accuracy_threshold=0.0), None),
    "subsampling": (Subsampling(name="subsampling"), None),
}
TRAINING = TrainingSettings(epochs=2, batch_size=4, clip_norm=0.5, momentum=0.5)


def run(name: str, engine_of=lambda eager: eager, training=TRAINING, rounds=2) -> Federation:
    method, searcher = METHODS[name]
    model = network()
    return federation(
        method,
        model,
        CLIENTS,
        training,
        searcher=searcher,
        active=halved(model) if searcher else (),
        rounds=rounds,
        engine_of=engine_of,
    )


@pytest.fixture
def tape(monkeypatch) -> type[TapeCaptures]:
    """Engines play a tape of their steps, which on CUDA would be a graph: nothing of their Python runs again."""
    monkeypatch.setattr(compiled, "Captures", TapeCaptures)
    monkeypatch.setattr(TapeCaptures, "recorded", 0)
    return TapeCaptures


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, moved: torch.Tensor, tolerance: float) -> None:
    """Within a share of how far the weights have moved."""
    assert (ours - theirs).norm() <= tolerance * moved.norm()


@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_the_eager_engine(name, tape):
    eager, other = run(name), run(name, uncompiled)
    for reference, record in zip(eager.run(), other.run(), strict=True):
        assert (record.samples, record.costs, record.scores) == (
            *(reference.samples, reference.costs, reference.scores),
        )
        assert record.loss == pytest.approx(reference.loss, rel=1e-10)
    assert [client for client, _ in other.updates] == [client for client, _ in eager.updates]
    for (_, ours), (_, theirs) in zip(other.updates, eager.updates, strict=True):
        assert_close(ours.local, theirs.local, theirs.local - eager.initial, 1e-10)
        assert ours.state.mask == theirs.state.mask  # exactly
        for item in theirs.state.keys() - {"mask"}:
            own = theirs.state.tensor(item)
            assert_close(ours.state.tensor(item), own, own - eager.initial, 1e-10)
    if name not in ("local", "ditto-personal"):  # whose server never moves
        assert_close(other.weights, eager.weights, eager.weights - eager.initial, 1e-10)
        assert (eager.weights - eager.initial).norm() > 0.01


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_scope": "active"},
        {"clip_norm": None, "momentum": 0.0},
        {"drop_last": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_setting_of_training_means_the_same(settings, tape):
    clients_settings = replace(TRAINING, **settings)
    if clients_settings.drop_last:
        clients_settings = replace(clients_settings, batch_size=3)  # the smallest client has three images
    eager, other = (run("fedspa-rsm", of, clients_settings, 1) for of in (lambda e: e, uncompiled))
    (reference,), (record,) = eager.run(), other.run()
    assert record.samples == reference.samples
    assert_close(other.weights, eager.weights, eager.weights - eager.initial, 1e-10)


def flat(network: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(network.parameters()).detach()


AUGMENTED = Pixels(
    random_images(24, side=8, classes=3, seed=5),
    *([0.5], [0.25], Augmentation(crop_padding=2, flip=True, cutout=3), "cpu", torch.float64),
)
ROWS = [torch.arange(2, 9), torch.arange(10, 11), torch.arange(11, 24)]


def starts(dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor, torch.Generator]]:
    """For each client weights of its own, its rows, and its source of random draws."""
    weights = flat(network()).to(dtype)
    made = []
    for client, rows in enumerate(ROWS):
        drawn = torch.Generator().manual_seed(client)
        start = weights + 0.1 * torch.randn(weights.shape, generator=drawn, dtype=dtype)
        made.append((start, rows, drawn))
    return made


def tasks(dtype: torch.dtype = torch.float64, **options: Any) -> list[LocalTask]:
    """Local training of each client, from weights of its own."""
    return [
        LocalTask(
            weights=start, rows=rows, generator=drawn, **({"epochs": 1, "learning_rate": 0.1} | options)
        )
        for start, rows, drawn in starts(dtype)
    ]


def trained(runner: Engine, made: list[LocalTask]) -> list[Trained]:
    return [runner.train(task) for task in made]


def gradients(runner: Engine) -> list[torch.Tensor]:
    return [runner.gradient(*start) for start in starts()]


def test_augmented_images_are_the_same_ones(tape):
    training = TrainingSettings(batch_size=4)
    eager = engine(network(), AUGMENTED, training)
    other = uncompiled(engine(network(), AUGMENTED, training))
    for ours, theirs in zip(trained(other, tasks(epochs=2)), trained(eager, tasks(epochs=2)), strict=True):
        assert ours.samples == theirs.samples
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-10, atol=0)
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-9, atol=1e-12)
    for gradient, reference in zip(gradients(other), gradients(eager), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-12)


def test_full_gradients_are_the_same_ones(tape):
    """Over all rows of a client, the images as they are."""
    eager, other = (engine(network(), AUGMENTED, TrainingSettings(batch_size=4)) for _ in range(2))
    compiled_engine = uncompiled(other)
    trained(compiled_engine, tasks())
    for weights, rows, _ in starts():
        gradient = compiled_engine.full_gradient(weights, rows)
        torch.testing.assert_close(gradient, eager.full_gradient(weights, rows), rtol=1e-9, atol=1e-12)


def test_a_step_in_single_precision():
    """To 1e-4 of its own length: ReLU and max-pooling decide on rounded values, so that longer runs drift apart."""
    images = Pixels(random_images(24, 8, 3, 5), [0.5], [0.25], Augmentation(), "cpu", torch.float32)
    training = TrainingSettings(batch_size=16)
    eager = engine(network(), images, training)
    other = uncompiled(engine(network(), images, training))
    asked = tasks(torch.float32)
    theirs, ours = trained(eager, asked), trained(other, tasks(torch.float32))
    for answer, reference, task in zip(ours, theirs, asked, strict=True):
        assert_close(answer.weights, reference.weights, reference.weights - task.weights, 1e-4)


IMAGES_32 = Pixels(random_images(24, 8, 3, 5), [0.5], [0.25], Augmentation(), "cpu", torch.float32)


def step_of(precision: str, engine_of=lambda eager: eager) -> list[torch.Tensor]:
    """How far one step moves the weights of each client."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    eager = EagerEngine(fabric, network(), TrainingSettings(batch_size=16), IMAGES_32)
    asked = tasks(torch.float32)
    return [
        ended.weights - task.weights
        for ended, task in zip(trained(engine_of(eager), asked), asked, strict=True)
    ]


def test_a_step_in_mixed_precision(tape):
    """Within 2 % of its length of eager's in bfloat16, and within 5 % of the step in single precision."""
    ours = step_of("bf16-mixed", uncompiled)
    for step, mixed, single in zip(ours, step_of("bf16-mixed"), step_of("32-true"), strict=True):
        assert_close(step, mixed, single, 0.02)
        assert_close(step, single, single, 0.05)
        assert (step - single).norm() > 1e-4 * single.norm()  # it was bfloat16 indeed


def normed() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        ),
        seed=0,
    )


def test_batchnorm_in_mixed_precision(tape):
    """It keeps its running statistics in single precision. Partial batches too are trained like eager's."""
    images = Pixels(random_images(24, 8, 3, 5), [0.5], [0.25], Augmentation(), "cpu", torch.float32)
    made = {}
    for name, engine_of in (("eager", lambda eager: eager), ("compiled", uncompiled)):
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        eager = EagerEngine(fabric, normed(), TrainingSettings(batch_size=4), images)
        made[name] = engine_of(eager)
    start = made["eager"].weights
    ours, theirs = (
        train(runner, start, torch.arange(10), epochs=1, learning_rate=0.1, generator=torch.Generator())
        for runner in made.values()
    )
    assert_close(ours.weights, theirs.weights, theirs.weights - start, 0.02)
    gradients = [
        runner.gradient(start, torch.arange(3), torch.Generator().manual_seed(2)) for runner in made.values()
    ]
    assert_close(*gradients, gradients[0], 0.02)


def test_the_compiled_engine_keeps_weights_of_convolutions_channels_last():
    eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=4))
    layout, vector = Layout(eager.space, eager.device), eager.weights
    ordered = layout.ordered(vector)
    assert torch.equal(layout.restored(ordered), vector)
    views = layout.tensors(*layout.halves(ordered))
    for name, tensor in eager.space.items(vector):
        assert torch.equal(views[name], tensor)
        assert views[name].untyped_storage().data_ptr() == ordered.untyped_storage().data_ptr()
        if tensor.dim() == 4:
            assert views[name].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_step_by_the_inductor():
    def engine_of(eager: EagerEngine) -> CompiledEngine:
        return CompiledEngine(eager, WORK, "inductor")

    for step, reference in zip(step_of("32-true", engine_of), step_of("32-true"), strict=True):
        assert_close(step, reference, reference, 1e-4)


@pytest.mark.slow
def test_engines_and_precisions_come_to_about_the_same_accuracy(tmp_path):
    """After six rounds of the digits, global and personal models within 4 points of eager in single precision."""
    words = [
        *("dataset=digits", "partition=iid", "logger=none", "hardware=cpu", "hardware.workers=1"),
        *("federation.rounds=6", "training.epochs=2", "eval.every=6", "eval.final_rounds=1"),
    ]
    reached = {}
    for name in ("eager", "compiled"):
        compiler = ["engine.compiler=aot_eager"] if name == "compiled" else []
        for precision in ("32-true", "bf16-mixed"):
            summary, _ = run_of(
                [*words, f"engine={name}", *compiler, f"hardware.precision={precision}"],
                tmp_path / name / precision,
            )
            reached[name, precision] = [summary[f"final/accuracy/{kind}"] for kind in ("global", "personal")]
    reference = reached["eager", "32-true"]
    assert min(reference) > 80
    assert all(accuracy == pytest.approx(reference, abs=4) for accuracy in reached.values())


def test_each_training_has_its_own_learning_rate_mask_and_proximal_term(tape):
    training = TrainingSettings(batch_size=4)
    eager = engine(network(), AUGMENTED, training)
    other = uncompiled(engine(network(), AUGMENTED, training))
    mask = (torch.rand(eager.space.total, generator=torch.Generator().manual_seed(9)) < 0.5).double()
    terms = [Proximal(torch.zeros_like(mask), 2.0), None, Proximal(torch.ones_like(mask), 0.5)]

    def asked() -> list[LocalTask]:
        return [
            replace(task, learning_rate=rate, proximal=term, mask=own)
            for task, rate, term, own in zip(tasks(), (0.1, 0.2, 0.1), terms, (None, mask, mask), strict=True)
        ]

    for ours, theirs in zip(trained(other, asked()), trained(eager, asked()), strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-9, atol=1e-12)


def test_predictions_are_the_same_ones(tape, monkeypatch):
    """Of models that share a batch, or take several; of one set of images and another; after training as before."""
    eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=4))
    other = uncompiled(engine(network(), AUGMENTED, TrainingSettings(batch_size=4)))
    elsewhere = Pixels(random_images(30, 8, 3, 8), [0.3], [0.2], Augmentation(), "cpu", torch.float64)
    models = [weights for weights, _, _ in starts()]

    def predicted(runner: Engine) -> list[torch.Tensor]:
        return [
            runner.predict(weights, images, rows, size)
            for weights, images, rows, size in (
                (models[0], AUGMENTED, torch.arange(24), 20),  # more than fit into a batch of 7
                (models[1], AUGMENTED, torch.tensor([5]), 20),
                (models[2], elsewhere, torch.tensor([9, 2, 29, 2]), 3),
                (models[2], elsewhere, torch.arange(1, 15), 20),
                (models[0], elsewhere, torch.arange(7), 20),
            )
        ]

    theirs = predicted(eager)
    assert len({tuple(classes.tolist()[:4]) for classes in theirs}) > 2  # the models disagree
    for _ in range(2):
        trained(other, tasks())
        for classes, reference in zip(predicted(other), theirs, strict=True):
            assert classes.dtype is torch.int64 and torch.equal(classes, reference)
    accuracies = [eager.accuracy(weights, rows) for weights, rows, _ in starts()]
    assert [other.accuracy(weights, rows) for weights, rows, _ in starts()] == accuracies
    monkeypatch.setattr(EagerEngine, "predict", None)  # nothing was left to it
    predicted(other)


def test_gradients_are_recorded_when_they_are_asked_for(tape):
    def recorded(workload: Workload, times: int) -> int:
        tape.recorded = 0
        eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=4))
        made = CompiledEngine(eager, workload, compiler=None)
        trained(made, tasks())
        for _ in range(times):
            gradients(made)
        return tape.recorded

    assert recorded(WORK, 0) == 3  # a step and forward passes of two sizes
    assert recorded(WORK, 2) == 4
    assert recorded(replace(WORK, gradients=True), 0) == 4


def test_the_tape_repeats_no_python_and_refuses_what_a_capture_forbids():
    number, place = torch.ones(1), torch.zeros(1)
    play = TapeCaptures(torch.device("cpu"), None)(lambda: place.add_(number * 2))
    number.fill_(5)
    place.zero_()
    play(), play()
    assert place == 20
    read = [1.0]
    play = TapeCaptures(torch.device("cpu"), None)(lambda: place.fill_(read[0]))
    read[0] = 2.0
    play()
    assert place == 1
    with pytest.raises(AssertionError, match="forbids _local_scalar_dense"):
        TapeCaptures(torch.device("cpu"), None)(lambda: place.fill_(float(number)))


# What an engine cannot do ---------------------------------------------------------------------------------


def test_dropout_of_the_compiled_engine_depends_on_the_seed_alone():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))
    start = flat(model).double()
    made = CompiledEngine(engine(model, AUGMENTED, TrainingSettings(batch_size=4)), WORK, "aot_eager")

    def end(client: int) -> torch.Tensor:
        torch.rand(client + 3)  # other draws of the process in between
        drawn = torch.Generator().manual_seed(client)
        return train(made, start, ROWS[0], epochs=2, learning_rate=0.1, generator=drawn).weights

    compiled_before = dict(counters["stats"])
    assert torch.equal(end(0), end(0)) and not torch.equal(end(0), end(2))
    made.predict(start, AUGMENTED, ROWS[2], batch_size=4)
    for rows in ROWS:
        made.gradient(start, rows, torch.Generator())
    assert counters["stats"] == compiled_before  # nothing is compiled once the engine is built


def test_recording_at_the_first_use_draws_nothing_from_a_clients_layers():
    """A term that the first client brings, and a first gradient, are recorded then: it draws, before the client."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))
    start = flat(model).double()
    made = uncompiled(engine(model, AUGMENTED, TrainingSettings(batch_size=4)))

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        task = LocalTask(
            weights=start,
            rows=ROWS[0],
            epochs=1,
            learning_rate=0.1,
            generator=torch.Generator().manual_seed(1),
            correction=0.01 * torch.ones_like(start),
        )
        ended = made.train(task).weights
        return ended, made.gradient(start, ROWS[2], torch.Generator().manual_seed(2))

    for first, again in zip(results(), results(), strict=True):
        assert torch.equal(first, again)


# The config's group --------------------------------------------------------------------------------------

SMALL = [
    *("dataset=synthetic", "model=small_cnn", "dataset.image_size=8", "dataset.classes=3", "logger=none"),
    *(
        "dataset.train_size=60",
        "dataset.test_size=30",
        "dataset.client_test_images=5",
        "hardware.precision=64-true",
    ),
    *(
        "federation.clients=4",
        "federation.clients_per_round=3",
        "federation.rounds=2",
        "training.batch_size=8",
    ),
    *("training.epochs=1", "training.lr_decay=0.5", "partition=iid", "hardware=cpu"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run_of([*SMALL, "engine=auto"], tmp_path_factory.mktemp("auto"))


def run_of(words: list[str], folder: Path) -> tuple[dict, Path]:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return experiment.run(check(compose("config", words)), folder), folder


def test_auto_is_eager_on_a_cpu(reference):
    summary, _ = reference
    assert summary["engine"] == "eager" and summary["time/compile_s"] == 0


def test_a_run_by_the_compiled_engine(reference, tmp_path):
    summary, folder = run_of([*SMALL, "engine=compiled", "engine.compiler=aot_eager"], tmp_path)
    assert summary["engine"] == "compiled"
    assert summary["time/compile_s"] > 0
    eager, eager_folder = reference
    for same in ("final/accuracy/personal", "cost/flops", "cost/traffic_bytes", "config_hash"):
        assert summary[same] == eager[same]
    assert losses(folder) == pytest.approx(losses(eager_folder), rel=1e-10)
    weights, theirs = (load_file(place / "weights.safetensors") for place in (folder, eager_folder))
    for name, tensor in theirs.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)


def test_workers_and_the_compiled_engine_exclude_each_other(tmp_path):
    with pytest.raises(
        UserError, match="hardware.workers=2 shares the clients out, engine=compiled keeps them"
    ):
        run_of([*SMALL, "engine=compiled", "engine.compiler=null", "hardware.workers=2"], tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["engine=compiled", "engine.compiler=nvcc"], "engine.compiler=nvcc is not known: valid are"),
        (["engine.least_steps=-1"], "engine.least_steps=-1 is out of range"),
        (["engine.kernels=gcc"], "engine.kernels=gcc is not known: valid are auto, torch"),
        (
            ["hardware.precision=fp8"],
            "hardware.precision=fp8 is not known: valid are 32-true, 64-true, bf16-mixed, tf32",
        ),
    ],
)
def test_mistakes_are_told(plan, words, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        plan(*words)


def test_auto_compiles_long_runs_on_a_gpu_and_falls_back_where_it_cannot(monkeypatch, caplog):
    eager = SimpleNamespace(
        space=SimpleNamespace(channels=None),
        settings=SimpleNamespace(optimizer="sgd"),
        module=SimpleNamespace(own_step=""),
        device=torch.device("cuda"),
        examples=SimpleNamespace(in_memory=True),
    )
    auto = Auto(name="auto", least_steps=100)
    compiled = SimpleNamespace(name="compiled")
    monkeypatch.setattr(Compiled, "build", lambda self, eager, workload: compiled)
    assert auto.build(eager, Workload(largest=5, steps=100)) is compiled
    assert auto.build(eager, Workload(largest=5, steps=99)) is eager
    made = SimpleNamespace(
        settings=SimpleNamespace(optimizer="sgd"),
        module=SimpleNamespace(own_step=""),
        device=torch.device("cuda"),
        examples=SimpleNamespace(in_memory=False),
    )
    assert auto.build(made, Workload(largest=5, steps=100)) is made

    class Failing:
        def __init__(self, *args):
            raise errors.pop(0)

    invalid = RuntimeError("capture invalidated")
    invalid.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    errors = [RuntimeError("no C compiler"), torch.OutOfMemoryError("CUDA out of memory."), invalid]
    monkeypatch.undo()
    monkeypatch.setattr("fedspa.training.compiled.CompiledEngine", Failing)
    for reason in ("no C compiler", "too little memory: CUDA", "too little memory: capture"):
        built = auto.build(eager, Workload(largest=5, steps=100))
        assert built is eager and built.instead_of["compiled"].startswith(reason)
        assert f"auto goes on without compiled ({reason}" in caplog.text
    errors = [TypeError("a bug")]
    with pytest.raises(TypeError, match="a bug"):
        auto.build(eager, Workload(largest=5, steps=100))


def test_a_run_tells_which_engine_computed_and_why_no_other(monkeypatch, tmp_path, capsys):
    def build(self, eager, workload):
        eager.instead_of = {"compiled": "no C compiler"}
        return eager

    monkeypatch.setattr(Auto, "build", build)
    summary, _ = run_of([*SMALL, "engine=auto"], tmp_path)
    assert (summary["engine"], summary["engine_reason"]) == ("eager", "compiled failed: no C compiler")
    assert "Engine: eager (compiled failed: no C compiler)" in capsys.readouterr().out


def test_every_engine_of_a_process_is_compiled():
    """torch keeps eight variants of a function; ten engines that differ are compiled all the same."""
    graphs = []
    for batch_size in range(2, 12):
        before = counters["stats"]["unique_graphs"]
        eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=batch_size))
        Compiled(name="compiled", compiler="aot_eager").build(eager, WORK)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs[0] > 0 and graphs == [graphs[0]] * 10


def test_an_engine_that_torch_would_leave_uncompiled_is_refused():
    eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=4))
    with (
        torch._dynamo.config.patch(recompile_limit=0),
        pytest.raises(UserError, match="engine=compiled cannot compile .* use engine=eager"),
    ):
        Compiled(name="compiled", compiler="aot_eager").build(eager, WORK)


class Breaking(nn.Module):
    """Its forward pass decides by a value, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.fc(images.flatten(1))
        return found if found.sum() > 0 else -found


def test_a_network_that_breaks_the_graph_is_refused():
    eager = engine(Breaking(), AUGMENTED, TrainingSettings(batch_size=4))
    with pytest.raises(UserError, match="engine=compiled cannot compile this model's training here"):
        Compiled(name="compiled", compiler="aot_eager").build(eager, WORK)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no working C++ compiler\nmore lines"), "no working C++ compiler"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_a_compiler_that_fails_is_told_in_a_sentence(monkeypatch, error, reason):
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(torch, "compile", fail)
    eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=4))
    with pytest.raises(UserError, match=rf"here \({re.escape(reason)}\); use engine=eager\.$"):
        Compiled(name="compiled").build(eager, Workload(largest=4, steps=1))


def test_images_that_are_made_on_demand_cannot_be_captured():
    eager = SimpleNamespace(examples=SimpleNamespace(in_memory=False))
    with pytest.raises(UserError, match="engine=compiled needs all examples on the device"):
        Compiled(name="compiled").build(eager, Workload(largest=4, steps=1))


def test_tf32_is_single_precision_whose_products_cuda_may_round():
    for precision, allowed in (("tf32", True), ("32-true", False)):
        hardware = Hardware(name="here", accelerator="cpu", precision=precision)
        assert hardware.fabric()._precision.precision == "32-true" and hardware.dtype is torch.float32
        assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is allowed


def test_the_compiler_chooses_by_trial_only_where_reruns_may_differ():
    for deterministic in (False, True):
        Hardware(name="here", accelerator="cpu", deterministic=deterministic).fabric()
        with compiling_afresh():
            assert torch._inductor.config.deterministic is deterministic


def test_a_gpu_computes_in_the_fastest_way_unless_a_run_asks_for_another(plan):
    gpu, automatic = plan("hardware=gpu").hardware, plan("hardware=auto").hardware
    assert (gpu.precision, gpu.deterministic) == ("bf16-mixed", False) and gpu.remark("cuda") is None
    assert (automatic.precision, automatic.deterministic) == ("32-true", True)
    assert "hardware=gpu" in automatic.remark("cuda") and automatic.remark("cpu") is None
    assert "only CUDA has TF32" in replace(automatic, precision="tf32").remark("cpu")
