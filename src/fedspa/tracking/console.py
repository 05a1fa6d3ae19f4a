"""A run as it goes: a live bar on a terminal, a line now and then elsewhere, a table at the end."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fedspa.core import names
from fedspa.core.records import Event, RoundRecord
from fedspa.core.tracker import RunInfo, RunResult
from fedspa.costs.units import result_tables, show_bytes, show_count, show_density, show_time

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table

WINDOW = 20
"""Rounds over which the speed is taken."""
LINE_SHARE, LINE_SECONDS = 0.05, 10.0
"""Without a terminal: a line each 5 % of the rounds, or each 10 s, whichever comes first."""


def console_views() -> dict[str, ConsoleView]:
    """The console view by its name; none on a machine that has what trains and no more."""
    return {"console_view": ConsoleView()} if find_spec("rich") else {}


class ConsoleView:
    """Shows a run on `file` (standard output by default). Fits into 80 columns."""

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._clock = clock
        self._live: Live | None = None
        self._means: dict[str, float] = {}
        self._mentioned: set[str] = set()

    def start(self, info: RunInfo) -> None:
        self._info = info
        self._last: RoundRecord | None = None
        self._done = info.completed
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._line_round, self._line_time = self._done, self._clock()
        self._say(
            f"{info.config.get('name', 'run')}: {show_count(info.clients, 'client')}, "
            f"{show_count(info.rounds, 'round')}",
            style="bold",
        )
        for remark in info.remarks:
            self._say(remark)
        compiled = f", compiled in {show_time(info.compile_seconds)}" if info.compile_seconds else ""
        reason = f" ({info.engine_reason})" if info.engine_reason else ""
        self._say(f"Engine: {info.engine}{reason}{compiled}")
        if info.completed and not (info.continued and info.continued.round == info.completed):
            self._say(
                f"Goes on after round {info.completed}, whose checkpoint it found in {_short(info.folder)}"
            )
        self._unit = " %" if info.in_percent else ""
        metric = info.metrics[0].capitalize()
        self._say(f"{metric} of each kind of model: mean over {info.mean_over}{self._unit and ', in %'}")
        if info.config.get("personal_layers", "none") != "none" and "global" in info.kinds:
            self._say("The global model of a client has the client's own personal layers.")
        if self._console.is_interactive:
            from rich.live import Live

            self._live = Live(console=self._console, get_renderable=self._bar, transient=True)
            self._live.start()
        else:
            self._say(self._line_head())

    def round(self, record: RoundRecord) -> None:
        self._last, self._done = record, record.round
        self._recent.append((record.samples, record.seconds.get("total", 0.0)))
        main = self._info.metrics[0]
        self._means |= {
            kind: metrics[main].mean for kind, metrics in record.scores.items() if main in metrics
        }
        for event in record.events:
            self._tell(event)
        if not self._live and self._line_is_due(record.round):
            self._line_round, self._line_time = record.round, self._clock()
            self._say(self._line())

    def finish(self, result: RunResult) -> None:
        self._stop()
        self._console.print()
        for head, *rows in result_tables(result.summary):
            self._console.print(_table(head, rows))
            self._console.print()
        if (tested := result.summary.get("final_rounds", 1)) > 1:
            self._say(f"Scores are means over the last {tested} tested rounds; finetuned after the last one.")
        self._say(f"Density: {show_density(result.summary)}.")
        if result.client_states is not None and not result.client_states:
            self._say(
                "\nsave.personal=true kept nothing: clients of this run remember nothing but their masks."
            )
        seconds, speed = result.summary["time/total_s"], result.summary[names.SAMPLES_PER_S]
        if events := [f"{count} {kind}" for kind, count in names.group("faults", result.summary).items()]:
            self._say(f"\nEvents: {', '.join(events)}")
        self._say(f"\nTook {show_time(seconds)} at {_count(speed)} samples/s.")
        self._say(f"Everything lies in the folder {_short(self._info.folder)}")

    def abort(self, status: str, reason: str) -> None:
        self._stop()
        word = "Stopped" if status == "KILLED" else "Failed"
        self._say(
            f"\n{word} after {self._done} of {show_count(self._info.rounds, 'round')}: {reason}", style="bold"
        )
        self._say(f"The files written so far are in {_short(self._info.folder)}")

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, soft_wrap=True)  # never breaks a path in two

    def _tell(self, event: Event) -> None:
        """An event, but of each kind only the first: there may be thousands."""
        if event.kind not in self._mentioned:
            self._mentioned.add(event.kind)
            self._say(f"{event.kind}, {event.action}: {event.detail} (All such: events.csv)")

    def _stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _line_is_due(self, round: int) -> bool:
        enough_rounds = round - self._line_round >= LINE_SHARE * self._info.rounds
        enough_time = self._clock() - self._line_time >= LINE_SECONDS
        return enough_rounds or enough_time or round == self._info.rounds

    def _line_head(self) -> str:
        kinds = "".join(f"{kind:>10}" for kind in self._info.kinds)
        return f"{'round':>11}{kinds}{'samples/s':>11}{'traffic':>10}{'time left':>11}"

    def _line(self) -> str:
        kinds = "".join(f"{self._score(kind):>10}" for kind in self._info.kinds)
        traffic = show_bytes(self._last.total_costs.traffic_bytes) if self._last else "-"
        progress = f"{self._done}/{self._info.rounds}"
        return f"{progress:>11}{kinds}{self._speed():>11}{traffic:>10}{self._time_left():>11}"

    def _bar(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar

        return Group(ProgressBar(self._info.rounds, self._done), self._line_head(), self._line())

    def _score(self, kind: str) -> str:
        return names.shown(self._means[kind], self._unit, 1) if kind in self._means else "-"

    def _speed(self) -> str:
        samples, seconds = (sum(column) for column in zip((0, 0.0), *self._recent, strict=True))
        return _count(samples / seconds) if seconds else "-"

    def _time_left(self) -> str:
        if not self._recent or self._last is None:
            return "-"
        a_round = sum(seconds for _, seconds in tuple(self._recent)) / len(self._recent)
        return show_time(a_round * (self._info.rounds - self._last.round))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(head[0], min_width=15)
    for title in head[1:]:
        table.add_column(title, justify="right", min_width=13)
    for row in rows:
        table.add_row(*row)
    return table


def _count(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _short(folder: Path) -> str:
    """The folder as one would type it from here, where that is shorter."""
    return min(str(folder.resolve()), os.path.relpath(folder), key=len)
