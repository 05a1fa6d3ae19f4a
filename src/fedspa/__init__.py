"""fedspa: personalised federated learning in which every client trains its own sparse model."""

import sys
from importlib.util import find_spec
from os.path import abspath, dirname
from typing import Any

__version__ = "0.1.0"
__all__ = ["Federation", "Run", "UserError", "load", "run"]

# Each command in src/ imports this file first, so one check here spares all of them a traceback. A run with logger=csv
# needs no MLflow: a machine for training alone may lack it.
if _missing := [name for name in ("hydra", "torch", "lightning", "pandas") if not find_spec(name)]:
    _sentence = (
        f"this Python ({sys.executable}) does not have the package {_missing[0]}: activate the environment "
        "(source .venv/bin/activate), or install fedspa (pip install -e .)."
    )
    if sys.argv[0] != "-m" and dirname(abspath(sys.argv[0])) != dirname(dirname(abspath(__file__))):
        raise ModuleNotFoundError(_sentence)
    print(f"Error: {_sentence}", file=sys.stderr)
    raise SystemExit(2)


def __getattr__(name: str) -> Any:
    """Load the Python API (pandas, then torch) at its first use, so that the command line answers within a second."""
    if name in __all__:
        from fedspa import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedspa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
