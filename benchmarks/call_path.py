"""How much code a reader passes from the federated loop to a mask search.

    python benchmarks/call_path.py

Runs one round of FedSpa, looks at the call stack where the mask searcher is entered, and prints each function from the
loop on with its file and its lines of code (without blank lines, comments and docstrings).
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from fedspa.config.plan import check
from fedspa.config.schema import register
from fedspa.core.paths import config_dir
from fedspa.masks.dst import DST
from fedspa.masks.search_input import SearchInput
from fedspa.runs.experiment import run

WORDS = [
    *("dataset=digits", "federation.rounds=1", "training.epochs=1", "engine=eager", "hardware.workers=1"),
    *("logger=none", "mask.anneal_rounds=10"),
]
SKIPPED = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


class _Reached(Exception):
    """Ends the run where the searcher is entered."""


def code_lines(function: str) -> int:
    """The lines of code of a function's source."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(function)):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(function).readline):
        if token.type not in SKIPPED:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def call_path() -> list[tuple[str, str, int]]:
    """File, function and lines of code of each function from the loop to the searcher, the loop first."""
    frames: list[FrameType] = []

    def entered(self: DST, search: SearchInput) -> torch.Tensor:
        frame = inspect.currentframe()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        raise _Reached

    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"), TemporaryDirectory() as folder:
        plan = check(compose("config", WORDS))
        original: Any = DST.next_mask
        DST.next_mask = entered  # type: ignore[method-assign]
        try:
            run(plan, Path(folder))
        except _Reached as error:
            del error
        finally:
            DST.next_mask = original  # type: ignore[method-assign]
    path = []
    for frame in frames[1:]:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        source = inspect.cleandoc("\n".join(["", *inspect.getsourcelines(frame.f_code)[0]]))
        path.append((f"{file.parent.name}/{file.name}", name, code_lines(source)))
        if name == "FederatedLoop._round":
            break
    return path[::-1]


def main() -> None:
    path = call_path()
    for file, name, lines in path:
        print(f"{lines:4}  {file:32} {name}")
    files = {file for file, _, _ in path}
    print(f"{sum(lines for _, _, lines in path):4}  lines of code in {len(files)} files")


if __name__ == "__main__":
    main()
