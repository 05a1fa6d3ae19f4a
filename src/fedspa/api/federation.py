"""Training from Python: a federation of the user's own objects, or of options of the config."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.api.arguments import (
    OBJECTS,
    SHORT,
    as_path,
    component,
    in_python,
    model_maker,
    without_fractions,
    words_and_objects,
)
from fedspa.api.finished import Run, read
from fedspa.api.process import stay_in_one_process, threads_of_torch, torch_as_it_was
from fedspa.checkpoints.resuming import AUTO, place
from fedspa.config.composing import as_words, composed
from fedspa.config.plan import Plan
from fedspa.core.errors import UserError, nearest
from fedspa.core.launch import launched
from fedspa.core.names import round_values

if TYPE_CHECKING:
    from torch import nn

    from fedspa.core.records import RoundRecord
    from fedspa.layer_sparsity.base import LayerSparsity
    from fedspa.masks.base import MaskSearcher
    from fedspa.methods.base import Method
    from fedspa.server_optimizers.base import ServerOptimizer


class Round(dict[str, Any]):
    """The values of a round by the names of rounds.csv: `round["accuracy/personal"]`. Missing scores raise
    `UserError`."""

    def __init__(self, record: RoundRecord) -> None:
        super().__init__(round_values(record))

    def __missing__(self, name: str) -> Any:
        raise UserError(f"round has no {name!r}: {nearest(str(name), self)}.")


class Federation:
    """Clients that train together. Iterating runs the rounds, and `run()` runs all remaining ones. Both write a run's
    folder.

    A loop that is left early saves the last complete round. The next loop, or `run()`, continues from there.
    """

    def __init__(
        self,
        *words: str,
        data: tuple[Any, Any] | None = None,
        clients: Any = None,
        test: tuple[Any, Any] | None = None,
        test_clients: Any = None,
        test_fraction: float | None = None,
        model: nn.Module | Any = None,
        method: Method | str | dict[str, Any] | None = None,
        mask: MaskSearcher | str | dict[str, Any] | None = None,
        layer_sparsity: LayerSparsity | str | dict[str, Any] | None = None,
        server_optimizer: ServerOptimizer | str | dict[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        quiet: bool = True,
        **settings: Any,
    ) -> None:
        """
        Args:
            words: settings as on the command line, such as "dataset=digits".
            data: inputs [N, ...] (floats, integer tokens, or uint8, which become floats from 0 to 1) and targets:
                classes, integers [N], or numbers, floats [N] or [N, K]. Arrays or tensors.
            clients: the client of each row of `data` [N], or a list of each client's rows.
            test: inputs and targets of a test set. By default a share of each client's rows is held out.
            test_clients: as `clients`, for the test set. By default all clients are tested on all of it.
            test_fraction: the share that is held out; 0.2 by default.
            model: a module with its initial weights, a function without arguments that makes one, or the
                name of a model of the config.
            method, mask, layer_sparsity, server_optimizer: an object, or a value for the config's group.
            folder: the folder for the run's files; None for outputs/<date>/<time>_<name>.
            quiet: print no progress.
            settings: other settings by name, as for `fedspa.run`. Those of the sections training and federation
                need no section: lr=0.05, rounds=20. Nor do val_fraction and public_fraction of the section dataset.

        Raises `UserError` for a mistake, in one sentence.
        """
        if (ranks := launched().size) > 1:
            raise UserError(
                f"Python's fedspa is one process, but here are {ranks} ranks: use python src/train.py."
            )
        groups = dict(zip(OBJECTS, (model, method, mask, layer_sparsity, server_optimizer), strict=True))
        settings |= {name: value for name, value in groups.items() if value is not None}
        of_data = {
            "clients": clients, "test": test, "test_clients": test_clients, "test_fraction": test_fraction,
        }  # fmt: skip
        if not isinstance(quiet, bool):
            raise UserError(f"quiet={quiet!r} is not True or False.")
        self._quiet = quiet
        self.folder = self._wanted_folder = None if folder is None else as_path("folder", folder)
        """The folder of the run's files; None before the first round of a run without a given folder."""
        self._threads = threads_of_torch()
        self._live: weakref.ref[Generator[Round, None, None]] | None = None
        self._shortened = set(SHORT if data is not None else SHORT.keys() & settings.keys())
        with in_python(self._shortened):
            batchnorm = None if isinstance(model, str | dict | None) else settings.pop("batchnorm", None)
            given, objects = words_and_objects(settings)
            given = [*words, *given]
            nodes, defaults = _nodes(objects), ["logger=none"]
            if data is not None:
                from fedspa.api.own_data import own_data

                with _explained():
                    given, fractions = without_fractions(given)
                source, partition = own_data(data, **of_data, **fractions)
                objects |= {"dataset": source, "partition": partition}
                nodes |= {"dataset": source.node, "partition": partition.node}
                federation = {"clients": partition.clients, "clients_per_round": min(10, partition.clients)}
                defaults += as_words({"federation": federation})
            elif missing := [name for name, value in of_data.items() if value is not None]:
                raise UserError(f"{missing[0]} is about data=(inputs, targets), which is missing.")
            if "method" in objects and not objects["method"].uses_mask:
                defaults += ["mask=none", "sparsity=0"]
            if "model" in objects and batchnorm is not None:
                nodes["model"]["batchnorm"] = batchnorm
            self._objects, self._words = objects, (given, defaults, nodes)
            self._plan, self._default_folder = self._planned()

    def _planned(self) -> tuple[Plan, Path]:
        """A checked plan, and the default folder for its files."""
        from fedspa.config.plan import check

        with _explained():
            config, command = composed(*self._words)
        if self._threads > 1:
            stay_in_one_process(config, self._threads)
        plan = check(config, self._objects)
        if plan.settings.dry_run:
            raise UserError("dry_run=True trains nothing, so there is no run to return: leave it out.")
        return plan, Path(command.run.dir)

    def __iter__(self) -> Iterator[Round]:
        """The remaining rounds. A new loop ends an earlier one."""
        if self._live and (before := self._live()):
            before.close()
        rounds = self._rounds()
        self._live = weakref.ref(rounds)
        return rounds

    def run(self) -> Run:
        """Run the remaining rounds, and return the finished run."""
        for _ in self:
            pass
        assert self.folder is not None
        return read(self.folder, self._objects)

    def _rounds(self) -> Generator[Round, None, None]:
        from fedspa.runs import experiment

        with ExitStack() as stack:
            stack.enter_context(in_python({*self._shortened, "folder"}))
            own = stack.enter_context(_own_folder(self._wanted_folder, self._default_folder))
            found = place(self._plan, own, given=self._wanted_folder is not None)
            self.folder = found.folder
            if found.finished:
                return
            stack.enter_context(torch_as_it_was(self._threads))
            begun = stack.enter_context(experiment.begun(self._plan, found.folder, quiet=self._quiet))
            self._go_on_in(found.folder)
            for record in stack.enter_context(closing(begun.rounds())):
                yield Round(record)

    def _go_on_in(self, folder: Path) -> None:
        """Let the next loop continue the run in this folder, with a plan that has new trackers."""
        self._wanted_folder = folder
        self._plan, _ = self._planned()
        self._plan.settings.resume = AUTO

    def __repr__(self) -> str:
        names = self._plan.names
        return (
            f"<fedspa.Federation {names['dataset']}, {names['model']}, {names['method']}; in {self.folder}>"
        )


def run(
    *words: str, folder: str | os.PathLike[str] | None = None, quiet: bool = False, **settings: Any
) -> Run:
    """Train in this process, and return the finished run.

    The run writes to its folder only: no pictures, no MLflow. `logger="mlflow"` adds tracking.

    If torch already computes on several threads, the clients are trained one after another in this process, and one
    warning says so: worker processes need a process with a single torch thread.

    Args:
        words: settings as on the command line, such as "method=fedspa" or "training.lr=0.05".
        folder: the folder for the run's files; None for outputs/<date>/<time>_<name>.
        quiet: print no progress.
        settings: settings by name. A text chooses in a group (dataset="digits"); a dict sets several settings of a
            section or group (training={"lr": 0.05}). All arguments of `Federation` are allowed.

    Raises `UserError` for a mistake, in one sentence, if possible before training starts.
    """
    return Federation(*words, folder=folder, quiet=quiet, **settings).run()


@contextmanager
def _explained() -> Iterator[None]:
    """Turn Hydra's errors about settings into a `UserError`."""
    from fedspa.cli import COMPOSING, explain_hydra

    try:
        yield
    except COMPOSING as error:
        raise explain_hydra(error) from error


def _nodes(objects: dict[str, Any]) -> dict[str, Any]:
    """The config's records of the user's objects. `objects` is changed to the objects that a run takes."""
    if not objects:
        return {}
    from fedspa.api.objects import describe, describe_model
    from fedspa.models.initialise import seeded

    nodes = {}
    for group, value in objects.items():
        if group == "model":
            objects[group] = model_maker(value)
            nodes[group] = describe_model(value, seeded(objects[group], 0))
        else:
            objects[group] = component(group, value)
            nodes[group] = describe(value)
    return nodes


@contextmanager
def _own_folder(wanted: Path | None, default: Path) -> Iterator[Path]:
    """The folder of a run. A new folder is removed if nothing was written to it.

    Raises `UserError` if the folder cannot be written to, or has another run.
    """
    from fedspa.cli import UNWRITABLE, unwritable
    from fedspa.runs.folders import new_folder

    own = wanted or default
    there = wanted is not None and own.is_dir()
    try:
        try:
            if wanted is None:
                own = new_folder(default)
            else:
                own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(error) from error
        yield own
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise unwritable(error) from error
    finally:
        with suppress(OSError):
            if not there:
                own.rmdir()
            if wanted is None:
                own.parent.rmdir()  # the folder of the day
