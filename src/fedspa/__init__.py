"""fedspa: personalised federated learning in which every client trains its own sparse model."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Federation", "Run", "UserError", "load", "run"]


def __getattr__(name: str) -> Any:
    """Load the Python API (pandas, then torch) at its first use, so that the command line answers within a second."""
    if name in __all__:
        from fedspa import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedspa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
