"""fedspa from Python: `run` and `Federation` train, `load` reads finished runs. See docs/api.md."""

from fedspa.api.federation import Federation, run
from fedspa.api.finished import Run, load
from fedspa.core.errors import UserError

__all__ = ["Federation", "Run", "UserError", "load", "run"]
