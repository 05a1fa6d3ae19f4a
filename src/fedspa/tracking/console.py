"""A run as it goes: a live bar on a terminal, a line now and then elsewhere, a table at the end."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fedspa.core.records import ACCURACY, KINDS, Event, RoundRecord, RunInfo, RunResult
from fedspa.core.saved import Saved
from fedspa.costs.units import show_bytes, show_flops, show_saved
from fedspa.tracking.measures import density_text, final_scores

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
        self._accuracy: dict[str, float] = {}
        self._mentioned: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": dict(self._accuracy), "mentioned": sorted(self._mentioned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = Saved({"accuracy": {}, "mentioned": [], **state}, "console")
        accuracy = {kind.text(KINDS): mean.number() for kind, mean in saved["accuracy"].items()}
        mentioned = {kind.text() for kind in saved["mentioned"].sequence()}
        self._accuracy, self._mentioned = accuracy, mentioned

    def start(self, info: RunInfo) -> None:
        self._info = info
        self._last: RoundRecord | None = None
        self._done = info.completed
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._line_round, self._line_time = self._done, self._clock()
        self._say(
            f"{info.config.get('name', 'run')}: {info.clients} clients, {info.rounds} rounds",
            style="bold",
        )
        for remark in info.remarks:
            self._say(remark)
        compiled = f", compiled in {_duration(info.compile_seconds)}" if info.compile_seconds else ""
        reason = f" ({info.engine_reason})" if info.engine_reason else ""
        self._say(f"Engine: {info.engine}{reason}{compiled}")
        if info.completed:
            self._say(
                f"Goes on after round {info.completed}, whose checkpoint it found in {_short(info.folder)}"
            )
        self._say(f"Accuracy of each kind of model: mean over {self._info.mean_over}, in %")
        if self._console.is_interactive:
            from rich.live import Live

            self._live = Live(console=self._console, get_renderable=self._bar, transient=True)
            self._live.start()
        else:
            self._say(self._line_head())

    def round(self, record: RoundRecord) -> None:
        self._last, self._done = record, record.round
        self._recent.append((record.samples, record.seconds.get("total", 0.0)))
        self._accuracy |= {kind: metrics[ACCURACY].mean for kind, metrics in record.scores.items()}
        for event in record.events:
            self._tell(event)
        if not self._live and self._line_is_due(record.round):
            self._line_round, self._line_time = record.round, self._clock()
            self._say(self._line(record))

    def finish(self, result: RunResult) -> None:
        self._stop()
        self._console.print()
        for metric, scores in final_scores(result.summary).items():
            self._console.print(_score_table(metric, scores))
            self._console.print()
        if (rounds := result.summary.get("final_rounds", 1)) > 1:
            self._say(f"Means over the last {rounds} tested rounds; finetuned after the last one.\n")
        self._console.print(_cost_table(result.summary))
        density = result.summary["density"]
        self._say(f"\nDensity: {density['asked']:.4g} asked, {density_text(density)} measured.")
        if result.client_states is not None and not result.client_states:
            self._say(
                "\nsave.personal=true kept nothing: clients of this run remember nothing but their masks."
            )
        seconds, speed = result.summary["seconds"]["total"], result.summary["samples_per_s"]
        if events := result.summary["events"]:
            self._say("\nEvents: " + ", ".join(f"{count} {kind}" for kind, count in events.items()))
        self._say(f"\nTook {_duration(seconds)} at {_count(speed)} samples/s.")
        self._say(f"Everything lies in {_short(self._info.folder)}")

    def abort(self, status: str, reason: str) -> None:
        self._stop()
        word = "Stopped" if status == "KILLED" else "Failed"
        self._say(f"\n{word} after {self._done} of {self._info.rounds} rounds: {reason}", style="bold")
        self._say(f"What there is lies in {_short(self._info.folder)}")

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

    def _line(self, record: RoundRecord) -> str:
        kinds = "".join(f"{self._score(kind):>10}" for kind in self._info.kinds)
        traffic = show_bytes(record.total_costs.traffic_bytes)
        progress = f"{record.round}/{self._info.rounds}"
        return f"{progress:>11}{kinds}{self._speed():>11}{traffic:>10}{self._time_left():>11}"

    def _bar(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        record, rounds = self._last, self._info.rounds
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            f"round {self._done}/{rounds}", ProgressBar(rounds, self._done), f"{self._time_left()} left"
        )
        if record is None:
            return bar
        scores = "  ".join(f"{kind} {self._score(kind)}" for kind in self._info.kinds)
        traffic = show_bytes(record.total_costs.traffic_bytes)
        return Group(bar, f"{scores}   {self._speed()} samples/s   {traffic}")

    def _score(self, kind: str) -> str:
        return f"{self._accuracy[kind]:.1f}" if kind in self._accuracy else "-"

    def _speed(self) -> str:
        samples, seconds = (sum(column) for column in zip(*tuple(self._recent), strict=True))
        return _count(samples / seconds) if seconds else "-"

    def _time_left(self) -> str:
        if not self._recent or self._last is None:
            return "-"
        a_round = sum(seconds for _, seconds in tuple(self._recent)) / len(self._recent)
        return _duration(a_round * (self._info.rounds - self._last.round))


def _score_table(metric: str, scores: Mapping[str, dict[str, float] | None]) -> Table:
    table = _table(f"{metric} in %", "mean \u00b1 std", "worst decile", "clients")
    for kind in KINDS:
        if spread := scores.get(kind):
            mean = f"{spread['mean']:.2f} \u00b1 {spread['std']:.2f}"
            table.add_row(kind, mean, f"{spread['worst_decile']:.2f}", f"{spread['clients']:.0f}")
    return table


def _cost_table(summary: dict[str, Any]) -> Table:
    table = _table("cost", "this run", "dense", "saved")
    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        ("traffic", "traffic_bytes", show_bytes),
        ("FLOPs", "flops", show_flops),
    ]
    for title, key, text in rows:
        total, dense = summary[key]["total"], summary[key]["dense_total"]
        table.add_row(title, text(total), text(dense), show_saved(total, dense))
    if finetune := summary["flops"].get("finetune"):
        table.add_row("fine-tuning", show_flops(finetune), "-", "-")
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        first = title == titles[0]
        table.add_column(title, justify="left" if first else "right", min_width=15 if first else 13)
    return table


def _count(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    """0:07, 12:34 or 2:05:09."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _short(folder: Path) -> str:
    """The folder as one would type it from here, where that is shorter."""
    return min(str(folder.resolve()), os.path.relpath(folder), key=len)
