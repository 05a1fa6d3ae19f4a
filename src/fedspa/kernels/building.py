"""Builds a C file for this very processor, once a machine: the libraries lie in the user's cache (XDG_CACHE_HOME)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
"""Whichever is found first; the variable CC goes before them."""
TIMEOUT_S = 120


class CannotBuild(Exception):
    """Says why there is no library."""


@cache
def library(source: Path) -> ctypes.CDLL:
    """The library of a C file. Raises `CannotBuild` where there is no compiler, or it fails."""
    command = _command()
    name = f"{source.stem}-{_made_of(source, command)}.so"
    try:
        kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedspa"
        if (kept / name).exists():
            with suppress(OSError):  # it is damaged
                return ctypes.CDLL(str(kept / name))
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _built(source, command, kept / name)
    except (OSError, RuntimeError):  # there is no home, or it cannot be written: for this process alone
        with tempfile.TemporaryDirectory(prefix="fedspa-") as folder:
            return _built(source, command, Path(folder) / name)


def _built(source: Path, command: list[str], target: Path) -> ctypes.CDLL:
    """Compiled to a file of its own, which takes its place once it is whole: others may be doing the same."""
    with tempfile.NamedTemporaryFile(
        dir=target.parent, prefix=target.stem, suffix=".so", delete=False
    ) as file:
        part = Path(file.name)
    try:
        done = subprocess.run(
            [*command, "-o", str(part), str(source)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise CannotBuild(f"{command[0]} says: {_first_error(done.stderr)}")
        built = _loaded(part, command)
        part.replace(target)
        return built
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{command[0]} took more than {TIMEOUT_S} seconds") from error
    finally:
        part.unlink(missing_ok=True)


def _loaded(part: Path, command: list[str]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(part))
    except OSError as error:
        raise CannotBuild(f"what {command[0]} made cannot be loaded ({error})") from error


def _command() -> list[str]:
    """How a library is compiled, but for its files."""
    told = shlex.split(os.environ.get("CC", ""))
    found = [*filter(shutil.which, told[:1] or COMPILERS)]
    if not found:
        raise CannotBuild(f"there is no C compiler ({' '.join(told[:1]) or ', '.join(COMPILERS)})")
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    return [found[0], *told[1:], "-std=gnu11", "-O3", native, "-fPIC", "-shared"]


def _made_of(source: Path, command: list[str]) -> str:
    """A hash of all that a library's code depends on, as home folders are shared between machines."""
    compiler = Path(shutil.which(command[0]) or command[0]).resolve()
    parts = [source.read_text(), *command, str(compiler), platform.platform(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What tells processors of different instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        dict.fromkeys(line for line in lines if re.match("(model name|flags|Features|CPU part)", line))
    )


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["nothing"]
    return next((line for line in lines if "error" in line), lines[-1])
