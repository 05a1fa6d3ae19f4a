"""The run's own folder, which is the truth about a run: this module writes its files and reads them back.

docs/files.md describes every file and column. Pictures, TensorBoard, MLflow and reports read them here. Numbers are
written with all their digits: read back, they are the same floats.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedspa.config.recorded import recorded_config
from fedspa.core import names
from fedspa.core.errors import UserError
from fedspa.core.files import write_whole
from fedspa.core.identity import CONFIG_HASH
from fedspa.core.records import Event, RoundRecord
from fedspa.core.tensor_file import save_tensors
from fedspa.core.tracker import RunInfo, RunResult
from fedspa.tracking.tables import Table, Tail, read_table, write_table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

NEEDED = (
    *("method", "mask", "dataset", "model", "partition", "sparsity", "seed", "rounds", "clients"),
    *("metrics", names.TRAFFIC, names.FLOPS),
)
"""The keys that every summary has."""


class RunFolder:
    """Writes the files of a run into `RunInfo.folder`, and refuses a folder that holds a run already.

    A run that goes on has its tables cut back to its completed rounds. One that continues another begins with the
    other's tables.
    """

    def __init__(self, *, replace: bool = False) -> None:
        """`replace`: what an earlier start of the run left in its folder is written anew."""
        self._replace = replace
        self._tables: dict[str, Table] = {}

    def sync(self) -> None:
        """Have the tables on the disk itself, so that no checkpoint outlives rows that it counts on."""
        for table in self._tables.values():
            table.sync()

    def start(self, info: RunInfo) -> None:
        from omegaconf import OmegaConf

        self._info, folder = info, info.folder
        folder.mkdir(parents=True, exist_ok=True)
        begins = not info.completed or not (folder / "rounds.csv").exists()
        if begins:
            if (folder / "rounds.csv").exists() and not self._replace:
                raise UserError(
                    f"hydra.run.dir={folder} holds a run already (rounds.csv): go on with it by resume=auto, "
                    "or give a new folder, or move that run away."
                )
            config = OmegaConf.to_yaml(OmegaConf.create(info.config))
            write_whole(folder / "config.yaml", f"{CONFIG_HASH}{info.config_hash}\n{config}")
            self._write_partition()
        if begins and info.continued:
            for name in ("events.csv", "timing.csv", "rounds.csv"):  # the last one says that all are there
                write_whole(folder / name, Path(info.continued.folder, name).read_bytes())
        for name, columns in (
            ("events.csv", [f.name for f in fields(Event)]),
            ("timing.csv", names.timing_columns()),
            ("rounds.csv", names.round_columns(info.kinds, info.metrics, info.extras)),
        ):
            self._tables[name] = Table(folder / name, columns, info.completed)

    def round(self, record: RoundRecord) -> None:
        """Write a round; rounds.csv comes last: a round that is there is in the other tables too."""
        for event in record.events:
            self._tables["events.csv"].write(asdict(event))
        self._tables["timing.csv"].write({"round": record.round, **names.seconds(record.seconds)})
        self._tables["rounds.csv"].write(names.round_values(record))

    def finish(self, result: RunResult) -> None:
        self._close()
        folder = self._info.folder
        if self._info.many:
            self._save_arrays("clients", result.clients)
        else:
            assert self._info.label_counts is not None
            labels = {f"label_{label}": counts for label, counts in enumerate(self._info.label_counts.T)}
            write_table(
                folder / "clients.csv", {"client": range(self._info.clients), **result.clients, **labels}
            )
        tensors = result.weights  # in the order of the model: safetensors files are in alphabetical order
        write_table(
            folder / "tensors.csv",
            {
                "tensor": list(tensors),
                "shape": ["x".join(map(str, tensor.shape)) for tensor in tensors.values()],
                "parameters": [tensor.numel() for tensor in tensors.values()],
            },
        )
        for name in ("weights", "masks", "local_weights"):
            if kept := getattr(result, name):
                save_tensors(folder / f"{name}.safetensors", kept, self._info.config_hash)
        if result.client_states is not None:  # perhaps empty, which says that there is nothing
            save_tensors(folder / "client_states.safetensors", result.client_states, self._info.config_hash)
        if result.theory:
            rows = [asdict(row) for row in result.theory]
            write_table(folder / "theory.csv", {name: [row[name] for row in rows] for name in rows[0]})
        write_whole(folder / "summary.json", json.dumps(result.summary, indent=2) + "\n")

    def abort(self, status: str, reason: str) -> None:
        self._close()

    def _write_partition(self) -> None:
        info = self._info
        write_whole(info.folder / "partition.json", _partition_json(info))
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


def _partition_json(info: RunInfo) -> str:
    """JSON with a line a client: a diff of two partitions shows the clients that differ.

    Of very many clients it has the key figures.
    """
    head = {
        "hash": info.partition_hash,
        "seed": info.seed,
        "settings": info.config.get("partition", {}),
    }
    if info.many:
        from fedspa.partition.clients import row_counts

        sizes = row_counts(info.partition_rows)
        head["clients"], head["images"] = info.clients, int(sizes.sum())
        head["smallest"], head["largest"] = int(sizes.min()), int(sizes.max())
        return json.dumps(head, indent=2) + "\n"
    head["data"] = info.data_hash
    if info.class_names:
        head["classes"] = info.class_names
    if info.client_names:
        head["names"] = info.client_names

    def lists(rows: Sequence[np.ndarray]) -> str:
        return ",\n".join(json.dumps(own.tolist(), separators=(",", ":")) for own in rows)

    train, test = lists(info.partition_rows), lists(info.test_rows)
    return f'{json.dumps(head)[:-1]}, "train_rows": [\n{train}\n], "test_rows": [\n{test}\n]}}\n'


class Unreadable(Exception):
    """A folder holds no finished run that can be read. The message says why; it does not name the folder."""


@dataclass(frozen=True, eq=False)
class RunFiles:
    """A finished run, as its folder has it. docs/files.md describes the columns of the tables and their units."""

    name: str
    folder: Path
    config: dict[str, Any]
    """The whole config, resolved (config.yaml)."""
    summary: dict[str, Any]
    """The final numbers (summary.json)."""
    rounds: pd.DataFrame
    """A row for each round (rounds.csv)."""
    clients: pd.DataFrame
    """A row for each client at the end (clients.csv; of very many clients clients.safetensors)."""
    timing: pd.DataFrame
    """Seconds of each round (timing.csv)."""

    @classmethod
    def read(cls, folder: Path, name: str = "") -> Self:
        """Read a run's folder. `name`: what the run is called; "" for the folder's own name.

        Raises `Unreadable`.
        """
        import pandas as pd

        if not (folder / "summary.json").is_file():
            raise Unreadable("it has no summary.json, so it has not finished")
        try:
            summary = json.loads((folder / "summary.json").read_text())
            if missing := [key for key in NEEDED if key not in summary]:
                raise Unreadable(f"its summary.json lacks {', '.join(missing)}")
            config = recorded_config(folder / "config.yaml")
            rounds, timing = (pd.DataFrame(read_table(folder / f"{of}.csv")) for of in ("rounds", "timing"))
            if not len(rounds):
                raise Unreadable("its rounds.csv is empty")
            clients = _clients(folder)
        except KeyError as error:
            raise Unreadable(f"it lacks {error}") from error
        except (UserError, OSError, ValueError, TypeError) as error:
            raise Unreadable(str(error).splitlines()[0]) from error
        return cls(name or folder.resolve().name, folder, config, summary, rounds, clients, timing)


def _clients(folder: Path) -> pd.DataFrame:
    """The last scores of each client. Of very many clients a run keeps arrays, without the counts of labels."""
    import pandas as pd

    arrays = folder / "clients.safetensors"
    if not arrays.is_file():
        return pd.DataFrame(read_table(folder / "clients.csv"))
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        columns = pd.DataFrame(load_file(arrays))
    except SafetensorError as error:
        raise ValueError(f"its {arrays.name} cannot be read ({error})") from error
    columns.insert(0, "client", range(len(columns)))
    return columns


class RoundReader:
    """Reads the rounds of a folder that have been written since it read last, perhaps while the run goes on."""

    def __init__(self, folder: Path) -> None:
        self._rounds, self._timing, self._events = (
            Tail(folder / f"{name}.csv") for name in ("rounds", "timing", "events")
        )
        self._waiting: list[dict[str, str]] = []
        self._timed: dict[str, dict[str, str]] = {}
        self._happened: list[dict[str, str]] = []
        self._faults: Counter[str] = Counter()
        self._seconds = 0.0

    def new(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Each new round: its number, the seconds that the run has taken so far, and its points to draw."""
        self._waiting += self._rounds.rows()  # first: the rows of the others are written before
        self._timed |= {row["round"]: row for row in self._timing.rows()}
        self._happened += self._events.rows()
        # A copy of a folder that was made during the run may lack the last rows of timing.csv.
        while self._waiting and (times := self._timed.pop(self._waiting[0]["round"], None)):
            row = self._waiting.pop(0)
            while self._happened and int(self._happened[0]["round"]) <= int(row["round"]):
                self._faults[self._happened.pop(0)["kind"]] += 1
            cells = {**row, **times}
            values = {key: float(cell) for key, cell in cells.items() if cell and not key.startswith("round")}
            self._seconds += values.get(names.TOTAL_SECONDS, 0.0)
            yield int(row["round"]), self._seconds, names.readable({**values, **names.faults(self._faults)})
