"""Engines agree: whatever computes a round, it is the round of the eager engine up to rounding."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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

from fedspa.config import check, register
from fedspa.data.batches import Pixels
from fedspa.data.source import Augmentation
from fedspa.engines import over_eager
from fedspa.engines.choice import Auto, Compiled, Stacked, Workload
from fedspa.engines.compiled import CompiledEngine
from fedspa.engines.eager import EagerEngine
from fedspa.engines.forward import Forward
from fedspa.engines.stacked import StackedEngine
from fedspa.errors import UserError
from fedspa.masks.dst import DST
from fedspa.masks.rsm import RSM
from fedspa.methods.ditto import Ditto
from fedspa.methods.fedavg import FedAvg
from fedspa.methods.fedspa import FedSpa
from fedspa.methods.local import Local
from fedspa.methods.subfedavg import SubFedAvg
from fedspa.methods.subsampling import Subsampling
from fedspa.models.initialise import seeded
from fedspa.paths import config_dir
from fedspa.rounds.requests import Gradient, Predict, Pull, Train, TrainingAccuracy
from fedspa.running import experiment
from fedspa.running.hardware import Hardware
from fedspa.settings import TrainingSettings

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


WORK = Workload(largest=17, steps=100, test_batch=7)
ENGINES = {
    # Of four clients: a stack of three and one of one.
    "stacked": lambda eager: StackedEngine(eager, WORK, clients=3, compiler=None),
    "compiled": lambda eager: CompiledEngine(eager, WORK, compiler=None),
}
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
    monkeypatch.setattr(over_eager, "Captures", TapeCaptures)
    monkeypatch.setattr(TapeCaptures, "recorded", 0)
    return TapeCaptures


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, moved: torch.Tensor, tolerance: float) -> None:
    """Within a share of how far the weights have moved."""
    assert (ours - theirs).norm() <= tolerance * moved.norm()


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_the_eager_engine(kind, name, tape):
    eager, other = run(name), run(name, ENGINES[kind])
    for reference, record in zip(eager.run(), other.run(), strict=True):
        assert (record.samples, record.costs, record.scores) == (
            *(reference.samples, reference.costs, reference.scores),
        )
        assert record.loss == pytest.approx(reference.loss, rel=1e-10)
    assert [client for client, _ in other.visits] == [client for client, _ in eager.visits]
    for (_, ours), (_, theirs) in zip(other.visits, eager.visits, strict=True):
        assert_close(ours.local, theirs.local, theirs.local - eager.initial, 1e-10)
        assert ours.state.mask == theirs.state.mask  # exactly
        for item in theirs.state.keys() - {"mask"}:
            own = theirs.state.tensor(item)
            assert_close(ours.state.tensor(item), own, own - eager.initial, 1e-10)
    if name not in ("local", "ditto-personal"):  # whose server never moves
        assert_close(other.weights, eager.weights, eager.weights - eager.initial, 1e-10)
        assert (eager.weights - eager.initial).norm() > 0.01


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_scope": "active"},
        {"clip_norm": None, "momentum": 0.0},
        {"drop_last": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_setting_of_training_means_the_same(kind, settings, tape):
    clients_settings = replace(TRAINING, **settings)
    if clients_settings.drop_last:
        clients_settings = replace(clients_settings, batch_size=3)  # the smallest client has three images
    eager, other = (run("fedspa-rsm", of, clients_settings, 1) for of in (lambda e: e, ENGINES[kind]))
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


def requests(kind: type, dtype: torch.dtype = torch.float64, **options) -> list:
    """One for each client, with a start of its own."""
    weights = flat(network()).to(dtype)
    made = []
    for client, rows in enumerate(ROWS):
        drawn = torch.Generator().manual_seed(client)
        start = weights + 0.1 * torch.randn(weights.shape, generator=drawn, dtype=dtype)
        made.append(kind(weights=start, rows=rows, generator=drawn, **options))
    return made


@pytest.mark.parametrize("kind", ENGINES)
def test_augmented_images_are_the_same_ones(kind, tape):
    training = TrainingSettings(batch_size=4)
    eager = engine(network(), AUGMENTED, training)
    other = ENGINES[kind](engine(network(), AUGMENTED, training))
    for request, options in (
        (Train, {"epochs": 2, "learning_rate": 0.1}),
        (Gradient, {}),
    ):
        theirs = eager.answer(requests(request, **options))
        ours = other.answer(requests(request, **options))
        for answer, reference in zip(ours, theirs, strict=True):
            if request is Train:
                assert answer.samples == reference.samples
                torch.testing.assert_close(answer.loss, reference.loss, rtol=1e-10, atol=0)
                answer, reference = answer.weights, reference.weights
            torch.testing.assert_close(answer, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_in_single_precision(kind):
    """To 1e-4 of its own length: ReLU and max-pooling decide on rounded values, so that longer runs drift apart."""
    images = Pixels(random_images(24, 8, 3, 5), [0.5], [0.25], Augmentation(), "cpu", torch.float32)
    training = TrainingSettings(batch_size=16)
    eager = engine(network(), images, training)
    other = ENGINES[kind](engine(network(), images, training))
    options = {"epochs": 1, "learning_rate": 0.1}
    asked = requests(Train, torch.float32, **options)
    theirs = eager.answer(asked)
    ours = other.answer(requests(Train, torch.float32, **options))
    for answer, reference, request in zip(ours, theirs, asked, strict=True):
        assert_close(answer.weights, reference.weights, reference.weights - request.weights, 1e-4)


IMAGES_32 = Pixels(random_images(24, 8, 3, 5), [0.5], [0.25], Augmentation(), "cpu", torch.float32)


def step_of(precision: str, engine_of=lambda eager: eager) -> list[torch.Tensor]:
    """How far one step moves the weights of each client."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    eager = EagerEngine(fabric, network(), TrainingSettings(batch_size=16), IMAGES_32)
    asked = requests(Train, torch.float32, epochs=1, learning_rate=0.1)
    return [
        trained.weights - request.weights
        for trained, request in zip(engine_of(eager).answer(asked), asked, strict=True)
    ]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_in_mixed_precision(kind, tape):
    """Within 2 % of its length of eager's in bfloat16, and within 5 % of the step in single precision."""
    ours = step_of("bf16-mixed", ENGINES[kind])
    for step, mixed, single in zip(ours, step_of("bf16-mixed"), step_of("32-true"), strict=True):
        assert_close(step, mixed, single, 0.02)
        assert_close(step, single, single, 0.05)
        assert (step - single).norm() > 1e-4 * single.norm()  # it was bfloat16 indeed


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
    for name in ("eager", "stacked"):
        for precision in ("32-true", "bf16-mixed"):
            summary, _ = run_of(
                [*words, f"engine={name}", f"hardware.precision={precision}"], tmp_path / name / precision
            )
            reached[name, precision] = [summary["accuracy"][kind]["mean"] for kind in ("global", "personal")]
    reference = reached["eager", "32-true"]
    assert min(reference) > 80
    assert all(accuracy == pytest.approx(reference, abs=4) for accuracy in reached.values())


@pytest.mark.parametrize("kind", ENGINES)
def test_different_learning_rates_and_pulls_in_one_answer(kind, tape):
    training = TrainingSettings(batch_size=4)
    eager = engine(network(), AUGMENTED, training)
    other = ENGINES[kind](engine(network(), AUGMENTED, training))
    mask = (torch.rand(eager.space.total, generator=torch.Generator().manual_seed(9)) < 0.5).double()
    pulls = [Pull(torch.zeros_like(mask), 2.0), None, Pull(torch.ones_like(mask), 0.5)]

    def asked() -> list[Train]:
        made = requests(Train, epochs=1, learning_rate=0.1)
        return [
            replace(r, learning_rate=rate, pull=pull, mask=own)
            for r, rate, pull, own in zip(made, (0.1, 0.2, 0.1), pulls, (None, mask, mask), strict=True)
        ]

    for ours, theirs in zip(other.answer(asked()), eager.answer(asked()), strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ENGINES)
def test_predictions_are_the_same_ones(kind, tape, monkeypatch):
    """Of models that share a batch, or take several; of one set of images and another; after training as before."""
    eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=4))
    other = ENGINES[kind](engine(network(), AUGMENTED, TrainingSettings(batch_size=4)))
    elsewhere = Pixels(random_images(30, 8, 3, 8), [0.3], [0.2], Augmentation(), "cpu", torch.float64)
    models = [request.weights for request in requests(Gradient)]

    def asked() -> list[Predict]:
        return [
            Predict(weights=weights, pixels=images, rows=rows, batch_size=size)
            for weights, images, rows, size in (
                (models[0], AUGMENTED, torch.arange(24), 20),  # more than fit into a batch of 7
                (models[1], AUGMENTED, torch.tensor([5]), 20),
                (models[2], elsewhere, torch.tensor([9, 2, 29, 2]), 3),
                (models[2], elsewhere, torch.arange(1, 15), 20),
                (models[0], elsewhere, torch.arange(7), 20),
            )
        ]

    theirs = eager.answer(asked())
    assert len({tuple(classes.tolist()[:4]) for classes in theirs}) > 2  # the models disagree
    for _ in range(2):
        other.answer(requests(Train, epochs=1, learning_rate=0.1))
        for classes, reference in zip(other.answer(asked()), theirs, strict=True):
            assert classes.dtype is torch.int64 and torch.equal(classes, reference)
    accuracies = [TrainingAccuracy(weights=r.weights, rows=r.rows) for r in requests(Gradient)]
    assert other.answer(accuracies) == eager.answer(accuracies)
    monkeypatch.setattr(EagerEngine, "predict", None)  # nothing was left to it
    other.answer([*asked()])


def test_masks_are_searched_at_once_and_models_tested_side_by_side(monkeypatch):
    """Of four clients, by an engine that takes three at a time: masks and local models, then the personal ones."""
    searched, tested = [], []
    search, forward = DST.next_masks, Forward.predict
    monkeypatch.setattr(
        DST, "next_masks", lambda self, asked: searched.append(len(asked)) or search(self, asked)
    )
    monkeypatch.setattr(
        Forward, "predict", lambda self, asked: tested.append(len(asked)) or forward(self, asked)
    )
    run("fedspa-dst", ENGINES["stacked"], rounds=1).run()
    assert searched == [3, 1]
    assert tested == [3, 1, *(3, 3)]  # local ones; the global model in two batches, and four personal ones


@pytest.mark.parametrize("kind", ENGINES)
def test_gradients_are_recorded_when_they_are_asked_for(kind, tape):
    def recorded(workload: Workload, *requests: object) -> int:
        tape.recorded = 0
        eager = engine(network(), AUGMENTED, TrainingSettings(batch_size=4))
        made = {
            "stacked": lambda: StackedEngine(eager, workload, clients=3, compiler=None),
            "compiled": lambda: CompiledEngine(eager, workload, compiler=None),
        }[kind]()
        for kinds in (Train, Gradient):
            if asked := [request for request in requests if isinstance(request, kinds)]:
                made.answer(asked)
        return tape.recorded

    training = requests(Train, epochs=1, learning_rate=0.1)
    assert recorded(WORK, *training) == 2  # a step and a forward pass
    assert recorded(WORK, *training, *requests(Gradient), *requests(Gradient)) == 3
    assert recorded(replace(WORK, gradients=True), *training) == 3


def test_the_tape_repeats_no_python_and_refuses_what_a_capture_forbids():
    number, place = torch.ones(1), torch.zeros(1)
    play = TapeCaptures(torch.device("cpu"))(lambda: place.add_(number * 2))
    number.fill_(5)
    place.zero_()
    play(), play()
    assert place == 20
    read = [1.0]
    play = TapeCaptures(torch.device("cpu"))(lambda: place.fill_(read[0]))
    read[0] = 2.0
    play()
    assert place == 1
    with pytest.raises(AssertionError, match="forbids _local_scalar_dense"):
        TapeCaptures(torch.device("cpu"))(lambda: place.fill_(float(number)))


# What an engine cannot do ---------------------------------------------------------------------------------


class Decides(nn.Module):
    """Looks at its images to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images.flatten(1)) if images.sum() > 0 else self.linear(-images.flatten(1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)), "draws random numbers as it trains"),
        (Decides(), "torch.func.vmap cannot run"),
    ],
    ids=["dropout", "control flow"],
)
def test_networks_that_cannot_be_stacked_are_refused_in_a_sentence(model, reason):
    eager = engine(model, AUGMENTED, TrainingSettings(batch_size=4))
    with pytest.raises(
        UserError, match=rf"engine=stacked cannot train a model that {reason}.*use engine=eager\.$"
    ):
        StackedEngine(eager, WORK, clients=2, compiler=None)


def test_dropout_of_the_compiled_engine_depends_on_the_seed_alone():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))
    start = flat(model).double()
    compiled = CompiledEngine(engine(model, AUGMENTED, TrainingSettings(batch_size=4)), WORK, "aot_eager")

    def end(client: int) -> torch.Tensor:
        torch.rand(client + 3)  # other draws of the process in between
        drawn = torch.Generator().manual_seed(client)
        return train(compiled, start, ROWS[0], epochs=2, learning_rate=0.1, generator=drawn).weights

    compiled_before = dict(counters["stats"])
    assert torch.equal(end(0), end(0)) and not torch.equal(end(0), end(2))
    compiled.answer([Predict(weights=start, pixels=AUGMENTED, rows=ROWS[2], batch_size=4)])
    for rows in ROWS:
        compiled.answer([Gradient(weights=start, rows=rows, generator=torch.Generator())])
    assert counters["stats"] == compiled_before  # nothing is compiled once the engine is built


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
    assert summary["engine"] == "eager" and summary["seconds"]["compile"] == 0


@pytest.mark.parametrize("words", [["engine=stacked", "engine.clients=2"], ["engine=compiled"]])
def test_a_run_by_any_engine(reference, tmp_path, words):
    summary, folder = run_of([*SMALL, *words, "engine.compiler=aot_eager"], tmp_path)
    assert f"engine={summary['engine']}" == words[0]
    assert summary["seconds"]["compile"] > 0
    eager, eager_folder = reference
    for same in ("accuracy", "flops", "traffic_bytes", "config_hash"):
        assert summary[same] == eager[same]
    assert losses(folder) == pytest.approx(losses(eager_folder), rel=1e-10)
    weights, theirs = (load_file(place / "weights.safetensors") for place in (folder, eager_folder))
    for name, tensor in theirs.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)


def test_workers_and_lockstep_exclude_each_other(tmp_path):
    with pytest.raises(
        UserError, match="hardware.workers=2 shares the clients out, engine=stacked keeps them"
    ):
        run_of([*SMALL, "engine=stacked", "hardware.workers=2"], tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["engine=compiled", "engine.compiler=nvcc"], "engine.compiler=nvcc is not known: valid are"),
        (["engine=stacked", "engine.clients=1"], "engine.clients=1 is out of range: it must be at least 2"),
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
    eager = SimpleNamespace(device=torch.device("cuda"), pixels=SimpleNamespace(in_memory=True))
    auto = Auto(name="auto", least_steps=100)
    compiled = SimpleNamespace(name="compiled")
    monkeypatch.setattr(Compiled, "build", lambda self, eager, workload: compiled)
    assert auto.build(eager, Workload(largest=5, steps=100)) is compiled
    assert auto.build(eager, Workload(largest=5, steps=99)) is eager
    made = SimpleNamespace(device=torch.device("cuda"), pixels=SimpleNamespace(in_memory=False))
    assert auto.build(made, Workload(largest=5, steps=100)) is made

    class Failing:
        def __init__(self, *args):
            raise errors.pop(0)

    invalid = RuntimeError("capture invalidated")
    invalid.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    errors = [RuntimeError("no C compiler"), torch.OutOfMemoryError("CUDA out of memory."), invalid]
    monkeypatch.undo()
    monkeypatch.setattr("fedspa.engines.compiled.CompiledEngine", Failing)
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


def test_auto_stacks_small_networks_whose_clients_are_about_as_large(monkeypatch):
    eager = SimpleNamespace(device=torch.device("cuda"), pixels=SimpleNamespace(in_memory=True))
    for kind in (Compiled, Stacked):
        monkeypatch.setattr(kind, "build", lambda self, eager, workload: SimpleNamespace(name=self.name))
    auto, small = Auto(name="auto"), Workload(largest=1248, steps=200_000, batch_flops=600_000_000)
    assert auto.build(eager, small).name == "stacked"
    for other in ({"batch_flops": 39_000_000_000}, {"batch_flops": 0}, {"evenness": 0.5}, {"clients": 1}):
        assert auto.build(eager, replace(small, **other)).name == "compiled"
    assert auto.build(eager, replace(small, steps=19_999)) is eager

    def refuse(self, eager, workload):
        raise UserError("engine=stacked cannot train a model that draws random numbers")

    monkeypatch.setattr(Stacked, "build", refuse)
    assert auto.build(eager, small).name == "compiled"


@pytest.mark.parametrize(("clients", "lanes"), [(10, 10), (12, 6), (3, 3), (1, 1), (21, 7), (100, 10)])
def test_turns_of_a_stack_are_of_equal_size(clients, lanes):
    assert Stacked(name="stacked", clients=10).lanes(Workload(largest=1, steps=1, clients=clients)) == lanes


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


@pytest.mark.parametrize("choice", [Compiled(name="compiled"), Stacked(name="stacked")])
def test_images_that_are_made_on_demand_cannot_be_captured(choice):
    eager = SimpleNamespace(pixels=SimpleNamespace(in_memory=False))
    with pytest.raises(UserError, match=f"engine={choice.name} needs all images on the device"):
        choice.build(eager, Workload(largest=4, steps=1))


def test_tf32_is_single_precision_whose_products_cuda_may_round():
    for precision, allowed in (("tf32", True), ("32-true", False)):
        hardware = Hardware(name="here", accelerator="cpu", precision=precision)
        assert hardware.fabric()._precision.precision == "32-true" and hardware.dtype is torch.float32
        assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is allowed
