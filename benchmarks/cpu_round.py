"""A FedAvg round on the CPU against a plain PyTorch loop: `python benchmarks/cpu_round.py [repeats]`.

LeNet5, 10 clients x 5 epochs x 1,248 images of 28 x 28, batch 128, as the paper's EMNIST runs have them.
Both are timed in turns in one process; evaluation is left out. Prints a JSON line a timing, then the ratio
of the medians. The plain loop may use every core inside its operations, as torch does unless told otherwise.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from hydra import compose, initialize_config_dir
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fedspa import assembly, config  # noqa: E402
from fedspa.executor import usable_cores  # noqa: E402

OVERRIDES = [
    *("method=fedavg", "dataset=synthetic", "model=lenet5", "partition=iid", "logger=none"),
    *("dataset.image_size=28", "dataset.classes=26", "dataset.train_size=12480", "dataset.test_size=2600"),
    *("federation.clients=10", "federation.clients_per_round=10", "federation.rounds=1000"),
    *("training.epochs=5", "training.batch_size=128", "eval.every=1000000", "dataset.client_test_images=1"),
]


class PlainLeNet5(nn.Sequential):
    """LeNet5 as one writes it down."""

    def __init__(self) -> None:
        super().__init__(
            *(
                nn.Conv2d(1, 20, 5),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(20, 50, 5),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 26)),
        )


def plain_round(images: torch.Tensor, labels: torch.Tensor, clients: list[torch.Tensor]) -> float:
    """Seconds of a round of FedAvg as one writes it down."""
    torch.set_num_threads(usable_cores())
    begin = time.perf_counter()
    server = PlainLeNet5()
    mean = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
    for rows in clients:
        client = PlainLeNet5()
        client.load_state_dict(server.state_dict())
        optimizer = torch.optim.SGD(client.parameters(), lr=0.1, weight_decay=5e-4)
        for _ in range(5):
            for batch in rows[torch.randperm(len(rows))].split(128):
                optimizer.zero_grad()
                pixels = (images[batch].float() / 255 - 0.5) / 0.25
                nn.functional.cross_entropy(client(pixels), labels[batch]).backward()
                nn.utils.clip_grad_norm_(client.parameters(), 10)
                optimizer.step()
        for name, value in client.state_dict().items():
            mean[name] += value / len(clients)
    server.load_state_dict(mean)
    return time.perf_counter() - begin


def main(repeats: int) -> None:
    config.register()
    with initialize_config_dir(str(config.config_dir()), version_base="1.3"):
        plan = config.check(compose("config", overrides=OVERRIDES))
    federation = assembly.build(plan)
    data = federation.data.train
    clients = [torch.from_numpy(rows) for rows in federation.rows.train]
    rounds = federation.loop.rounds()
    plain, ours = [], []
    for _ in range(repeats):
        plain.append(plain_round(data.images, data.labels, clients))
        print(json.dumps({"loop": "plain", "seconds": plain[-1]}))
        torch.set_num_threads(1)
        seconds = next(rounds).seconds
        local_tests = seconds["evaluate"] / min(usable_cores(), 10)
        ours.append(seconds["total"] - local_tests)
        print(json.dumps({"loop": "fedspa", "seconds": ours[-1]}))
    federation.executor.close()
    ratio = median(ours) / median(plain)
    print(
        json.dumps({"cores": usable_cores(), "plain": median(plain), "fedspa": median(ours), "ratio": ratio})
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
