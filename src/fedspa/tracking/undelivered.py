"""What a run's tracking store has not got, kept in the run's folder until somebody delivers it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedspa.core.errors import UserError
from fedspa.core.files import write_whole
from fedspa.tracking.local_store import is_missing
from fedspa.tracking.mlflow_connection import from_note, open_client, store_needed
from fedspa.tracking.mlflow_delivery import UNDELIVERED, Ending, Outbox, Point


@dataclass(frozen=True)
class Undelivered:
    """The rest of one run: points, and how it ended."""

    tracking_uri: str
    """As `noted`: empty for the store beside the project."""
    run_id: str
    points: Sequence[Point]
    ending: Ending

    def save(self, folder: Path) -> None:
        """Write it to the run's folder, whole or not at all."""
        write_whole(folder / UNDELIVERED, json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Undelivered:
        """Read it back. Raises `UserError` where there is none, or a damaged one."""
        file = folder / UNDELIVERED
        try:
            content = json.loads(file.read_text())
            points = [Point(*point) for point in content["points"]]
            rest = cls(content["tracking_uri"], content["run_id"], points, Ending(**content["ending"]))
            rest.check()
            return rest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is damaged: the run's CSV files hold the same numbers.") from error
        except OSError as error:
            raise UserError(
                f"{folder} holds nothing to deliver ({UNDELIVERED}: {error.strerror})."
            ) from error

    def check(self) -> None:
        """Raises `TypeError` where a part is of another type."""
        tags, points = self.ending.tags, self.points
        texts = [self.tracking_uri, self.run_id, self.ending.status, *tags.keys(), *tags.values()]
        texts += [point.key for point in points]
        whole = [self.ending.time, *(number for point in points for number in (point.step, point.timestamp))]
        values = [point.value for point in points]
        for parts, kinds in ((texts, str), (whole, int), (values, (int, float))):
            if not all(isinstance(part, kinds) for part in parts):
                raise TypeError(f"not all of {kinds}")

    def deliver(self, folder: Path) -> None:
        """Send it all, and forget it. Raises `UserError` if the store still cannot be used."""
        uri = from_note(self.tracking_uri)
        if is_missing(uri):
            raise UserError(
                f"There is no tracking store at {uri}: name the one that has the run by MLFLOW_TRACKING_URI=..."
            )
        with store_needed(uri, "start or mend it, then deliver again"):
            outbox = Outbox(open_client(uri), self.run_id, self.points, in_doubt=True)
            while outbox.send():
                pass
            for _ in outbox.end(self.ending, folder):
                pass
        (folder / UNDELIVERED).unlink()
