"""Puts off the import of torch, which takes seconds, so that a command can report a mistake at once.

This is the one rule that keeps start-up fast. Any module may say `import torch` at its top: after `defer_torch` the
import costs nothing before the first use. A module may need more at its top (a subclass of `torch.nn.Module`,
Lightning, pandas, matplotlib, MLflow). The function that begins the work imports such a module, after the check of
   the config.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def defer_torch() -> None:
    """Put off importing torch until an attribute of it is first used.

    The LazyLoader of the standard library does not work here: `import torch` itself reads an attribute and loads it.
    """
    if "torch" in sys.modules:
        return
    stand_in = ModuleType("torch")
    stand_in.__spec__ = find_spec("torch")  # read by code that only checks that torch is installed,
    stand_in.__file__ = "deferred"  # and so is this

    def load(name: str) -> Any:
        if sys.modules.get("torch") is stand_in:
            del sys.modules["torch"]
        torch = import_module("torch")
        for module in list(sys.modules.values()):
            if getattr(module, "torch", None) is stand_in:
                module.torch = torch  # type: ignore[attr-defined]
        return getattr(torch, name)

    stand_in.__getattr__ = load  # type: ignore[method-assign]
    sys.modules["torch"] = stand_in


@contextmanager
def torch_deferred() -> Iterator[None]:
    """Defer torch inside. Outside other libraries, such as matplotlib, would use the stand-in and load torch."""
    there = "torch" in sys.modules
    defer_torch()
    try:
        yield
    finally:
        if not there and sys.modules["torch"].__file__ == "deferred":
            del sys.modules["torch"]
