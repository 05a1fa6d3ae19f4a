"""A FedAvg round on the CPU against a plain PyTorch loop: `python benchmarks/cpu_round.py [repeats]`.

LeNet5, 10 clients x 5 epochs x 1,248 images of 28 x 28, batch 128, as the paper's EMNIST runs have them; evaluation is
left out. The plain loop may use every core inside its operations, as torch does unless it is set otherwise.
"""

from __future__ import annotations

import torch
from bench import EMNIST, PlainLeNet5, federation, in_turns, plain_training, repeats, report, seconds

from fedspa.core.launch import usable_cores
from fedspa.data.sets import ArraySet


def plain_round(
    images: torch.Tensor, labels: torch.Tensor, clients: list[torch.Tensor], threads: int
) -> None:
    """A round of FedAvg as one writes it down."""
    torch.set_num_threads(threads)
    server = PlainLeNet5()
    mean = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
    for rows in clients:
        client = plain_training(PlainLeNet5(), server.state_dict(), images, labels, rows, epochs=5)
        for name, value in client.items():
            mean[name] += value / len(clients)
    server.load_state_dict(mean)


def main() -> None:
    ours = federation(
        *EMNIST, "method=fedavg", "federation.clients=10", "federation.clients_per_round=10",
        "dataset.train_size=12480", "eval.every=1000000",
    )  # fmt: skip
    train, rounds, cores = ours.data.train, ours.loop.rounds(), usable_cores()
    assert isinstance(train, ArraySet)
    clients = [torch.from_numpy(rows) for rows in ours.rows.train]

    def plain() -> float:
        return seconds(lambda: plain_round(train.inputs, train.targets, clients, cores))

    def fedspa() -> float:
        torch.set_num_threads(1)
        spent = next(rounds).seconds
        return spent["total"] - spent["evaluate"] / min(cores, 10)  # each client's local model was tested

    plain_median, own_median = in_turns(repeats(5), [plain, fedspa], warm=0)
    ours.executor.close()
    report(
        [
            {
                "cores": cores,
                "plain_s": plain_median,
                "fedspa_s": own_median,
                "ratio": own_median / plain_median,
            }
        ]
    )


if __name__ == "__main__":
    main()
