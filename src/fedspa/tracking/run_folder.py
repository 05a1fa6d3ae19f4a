"""The run's own folder: everything that a run leaves as plain files, whatever else follows it.

| file | when | what |
|---|---|---|
| config.yaml | start | the resolved config |
| partition.json | start | the partition's settings, its hash and the rows of each client; of very many |
| | | clients their number and sizes, and all rows in partition.safetensors |
| rounds.csv | each round | a row a round; the same run gives the same bytes, so no wall-clock time is in it |
| timing.csv | each round | seconds by phase |
| events.csv | each round | a row for each client or round that did not go as it should, mostly none |
| clients.csv | end | a row a client; of very many (see `save.client_files`) clients.safetensors, an array a column |
| tensors.csv | end | a row a parameter tensor, in the order in which masks and flat weights hold them |
| weights, masks, local_weights, client_states.safetensors | end | what there is of them |
| theory.csv | end, with `theory.every` | the quantities of Theorem 1 |
| summary.json | end, last of all | the run in a page; a folder that has it holds a finished run |

Numbers are written with all their digits: read back, they are the same floats.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.core.errors import UserError
from fedspa.core.files import write_whole
from fedspa.core.identity import CONFIG_HASH
from fedspa.core.records import (
    PHASES,
    ClientRow,
    Event,
    RoundRecord,
    RunInfo,
    RunResult,
    Spread,
    TheoryRow,
)
from fedspa.core.saved import Saved
from fedspa.tracking.tensor_file import save_tensors

if TYPE_CHECKING:
    import numpy as np

TABLES = ("rounds.csv", "timing.csv", "events.csv")
"""What grows from round to round."""
STATISTICS = tuple(f.name for f in fields(Spread))
"""How a score is spread over the clients: mean, std, p10, worst_decile, min, max, clients."""


class RunFolder:
    """Writes the files above into `RunInfo.folder`, and refuses a folder that holds a run already.

    A run that goes on has its tables cut back to what they were at its checkpoint.
    """

    def __init__(self, *, replace: bool = False) -> None:
        """`replace`: what an earlier start of the run left in its folder is written anew."""
        self._replace = replace
        self._tables: dict[str, _Table] = {}
        self._bytes: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": {name: table.bytes for name, table in self._tables.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = Saved({"bytes": {}, **state}, "run_folder")["bytes"]
        if saved.mapping():
            saved.mapping(TABLES)
        self._bytes = {name.text(): size.integer() for name, size in saved.items()}

    def sync(self) -> None:
        """Have the tables on the disk itself, so that no checkpoint outlives rows that it counts on."""
        for table in self._tables.values():
            table.sync()

    def start(self, info: RunInfo) -> None:
        from omegaconf import OmegaConf

        self._info, folder = info, info.folder
        folder.mkdir(parents=True, exist_ok=True)
        if not self._bytes:
            if (folder / "rounds.csv").exists() and not self._replace:
                raise UserError(
                    f"hydra.run.dir={folder} holds a run already (rounds.csv): go on with it by resume=auto, "
                    "or give a new folder, or move that run away."
                )
            config = OmegaConf.to_yaml(OmegaConf.create(info.config))
            write_whole(folder / "config.yaml", f"{CONFIG_HASH}{info.config_hash}\n{config}")
            self._write_partition()
        for name, columns in (
            ("rounds.csv", _round_columns(info)),
            ("timing.csv", ["round", *(f"{phase}_s" for phase in PHASES)]),
            ("events.csv", [f.name for f in fields(Event)]),
        ):
            self._tables[name] = _Table(folder / name, columns, self._bytes.get(name))

    def round(self, record: RoundRecord) -> None:
        self._tables["rounds.csv"].write(_round_row(record))
        seconds = {f"{phase}_s": value for phase, value in record.seconds.items()}
        self._tables["timing.csv"].write({"round": record.round, **seconds})
        for event in record.events:
            self._tables["events.csv"].write(asdict(event))

    def finish(self, result: RunResult) -> None:
        self._close()
        folder = self._info.folder
        if self._info.many:
            self._save_arrays("clients", result.client_arrays)
        else:
            self._write_clients(result.clients)
        layout = _Table(folder / "tensors.csv", ["tensor", "shape", "parameters"])
        for name, tensor in result.weights.items():  # safetensors files are in alphabetical order
            layout.write(
                {"tensor": name, "shape": "x".join(map(str, tensor.shape)), "parameters": tensor.numel()}
            )
        layout.close()
        for name in ("weights", "masks", "local_weights"):
            if tensors := getattr(result, name):
                save_tensors(folder / f"{name}.safetensors", tensors, self._info.config_hash)
        if result.client_states is not None:  # perhaps empty, which says that there is nothing
            save_tensors(folder / "client_states.safetensors", result.client_states, self._info.config_hash)
        if result.theory:
            theory = _Table(folder / "theory.csv", [f.name for f in fields(TheoryRow)])
            for row in result.theory:
                theory.write(asdict(row))
            theory.close()
        write_whole(folder / "summary.json", json.dumps(result.summary, indent=2) + "\n")

    def abort(self, status: str, reason: str) -> None:
        self._close()

    def _write_clients(self, clients: Sequence[ClientRow]) -> None:
        scores = dict.fromkeys(name for client in clients for name in client.scores)
        counts = self._info.label_counts
        assert counts is not None
        table = _Table(self._info.folder / "clients.csv", _client_columns(scores, self._info.classes))
        for client in clients:
            table.write(_client_row(client, counts[client.client]))
        table.close()

    def _write_partition(self) -> None:
        info = self._info
        text = _partition_summary(info) if info.many else _partition_json(info)
        write_whole(info.folder / "partition.json", text)
        if info.many and isinstance(
            info.partition_rows, list
        ):  # rows that are found on demand are consecutive
            import numpy as np

            sizes = np.array([len(rows) for rows in info.partition_rows])
            self._save_arrays("partition", {"rows": np.concatenate(info.partition_rows), "sizes": sizes})

    def _save_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        import torch

        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        save_tensors(self._info.folder / f"{name}.safetensors", tensors, self._info.config_hash)

    def _close(self) -> None:
        for table in self._tables.values():
            table.close()


class _Table:
    """A CSV file with fixed columns. A missing value is blank; an unknown column is an error."""

    def __init__(self, path: Path, columns: Iterable[str], keep: int | None = None) -> None:
        """`keep`: go on with the file after so many bytes. Raises `UserError` where that cannot be."""
        if keep is not None:
            _cut_back(path, columns := list(columns), keep)
        self._file = path.open("w" if keep is None else "a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, list(columns), lineterminator="\n")
        if keep is None:
            self._writer.writeheader()
            self._file.flush()

    @property
    def bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        if not self._file.closed:  # as at the end of a run, when other files could not be written
            os.fsync(self._file.fileno())

    def write(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)  # floats as repr, None as blank
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_back(path: Path, columns: list[str], keep: int) -> None:
    """Cut a table that goes on to its first `keep` bytes."""
    if not path.exists() or path.stat().st_size < keep:
        raise UserError(
            f"{path} is shorter than when the run's checkpoint was written: put it back as it was, or start anew "
            "in another folder."
        )
    with path.open(newline="", encoding="utf-8") as file:
        if next(csv.reader(file), []) != columns:
            raise UserError(
                f"{path} has other columns than this version of fedspa writes: go on with the version that began it."
            )
    os.truncate(path, keep)


def _round_columns(info: RunInfo) -> list[str]:
    return [
        *("round", "participants", "learning_rate", "loss", "samples"),
        *("train_flops", "search_flops", "down_bytes", "up_bytes", "mask_bytes", "encoded_bytes"),
        *("total_flops", "total_traffic_bytes"),
        *info.extras,
        *(f"{k}_{m}_{s}" for k in info.kinds for m in info.metrics for s in STATISTICS),
    ]


def _round_row(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.round,
        "participants": len(record.participants),
        "learning_rate": record.learning_rate,
        "loss": record.loss,
        "samples": record.samples,
        **{f.name: getattr(record.costs, f.name) for f in fields(record.costs)},
        "total_flops": record.total_costs.flops,
        "total_traffic_bytes": record.total_costs.traffic_bytes,
        **record.extras,
        **{
            f"{kind}_{metric}_{statistic}": getattr(spread, statistic)
            for kind, spreads in record.scores.items()
            for metric, spread in spreads.items()
            for statistic in STATISTICS
        },
    }


def _client_columns(scores: Iterable[str], classes: int) -> list[str]:
    return [
        *("client", "train_size", "val_size", "test_size", "visits", "density"),
        *scores,
        *(f"label_{label}" for label in range(classes)),
    ]


def _client_row(client: ClientRow, label_counts: np.ndarray) -> dict[str, Any]:
    facts = {f.name: getattr(client, f.name) for f in fields(client) if f.name != "scores"}
    return {
        **facts,
        **client.scores,
        **{f"label_{label}": int(count) for label, count in enumerate(label_counts)},
    }


def _partition_json(info: RunInfo) -> str:
    """JSON with a line a client: a diff of two partitions shows the clients that differ."""
    head = {
        "hash": info.partition_hash,
        "seed": info.seed,
        "settings": info.config.get("partition", {}),
        "data": info.data_hash,
        **({"classes": info.class_names} if info.class_names else {}),
        **({"names": info.client_names} if info.client_names else {}),
    }

    def lists(rows: Sequence[np.ndarray]) -> str:
        return ",\n".join(json.dumps(own.tolist(), separators=(",", ":")) for own in rows)

    train, test = lists(info.partition_rows), lists(info.test_rows)
    return f'{json.dumps(head)[:-1]}, "train_rows": [\n{train}\n], "test_rows": [\n{test}\n]}}\n'


def _partition_summary(info: RunInfo) -> str:
    """What is worth reading of a partition among very many clients."""
    from fedspa.partition.clients import row_counts

    sizes = row_counts(info.partition_rows)
    facts = {
        "hash": info.partition_hash,
        "seed": info.seed,
        "settings": info.config.get("partition", {}),
        "clients": info.clients,
        "images": int(sizes.sum()),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
    }
    return json.dumps(facts, indent=2) + "\n"
