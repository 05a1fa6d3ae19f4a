"""fedspa: personalised federated learning in which every client trains a sparse model of its own."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "UserError", "load", "run"]


def __getattr__(name: str) -> Any:
    """Load the Python API (pandas, then torch) only when it is first used: the command line answers within a second."""
    if name in __all__:
        from fedspa import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedspa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
