"""Builds a C file for this machine's processor. The library is stored in the user's cache (XDG_CACHE_HOME)."""

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

from fedspa.core.errors import brief
from fedspa.core.files import write_whole

COMPILERS = ("cc", "gcc", "clang")
"""The compilers to try, in this order. The variable CC comes before them."""
TIMEOUT_S = 120


class CannotBuild(Exception):
    """Raised if a library cannot be built. The message says why."""


@cache
def library(source: Path) -> ctypes.CDLL:
    """The library of a C file. Raises `CannotBuild` if there is no compiler, or if it fails."""
    try:
        command = _command()
        kept = _cache() / f"{source.stem}-{_hash(source, command)}.so"
        if kept.is_file() and kept.stat().st_uid == os.getuid():  # never load code of another user
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(prefix="fedspa-") as folder:
            made = Path(folder) / kept.name
            _compile([*command, "-o", str(made), str(source)])
            built = ctypes.CDLL(str(made))
            with suppress(OSError):  # on a full or read-only disk the next process builds it again
                kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_whole(kept, made.read_bytes())
            return built
    # From the system, from a bad CC variable, or from a missing home.
    except (OSError, ValueError, RuntimeError) as error:
        raise CannotBuild(brief(error)) from error


def _command() -> list[str]:
    """The compiler and its options, without file names."""
    asked = shlex.split(os.environ.get("CC", ""))
    found = [*filter(shutil.which, asked[:1] or COMPILERS)]
    if not found:
        raise CannotBuild(f"there is no C compiler ({' '.join(asked[:1]) or ', '.join(COMPILERS)})")
    return [found[0], *asked[1:], "-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared"]


def _compile(command: list[str]) -> None:
    """Run the compiler. Raises `CannotBuild` if it fails, and `OSError` if it does not start."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", env=os.environ | {"LC_ALL": "C"}, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{command[0]} took more than {TIMEOUT_S} seconds") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        raise CannotBuild(
            f"{command[0]} says: {next((line for line in lines if 'error' in line), lines[-1])}"
        )


def _cache() -> Path:
    """The folder for libraries."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "fedspa"


def _hash(source: Path, command: list[str]) -> str:
    """A hash of all that a library's code depends on. Machines that share a home folder may differ."""
    compiler = Path(shutil.which(command[0]) or command[0]).resolve()
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    processor = sorted({*re.findall("^(?:model name|flags).*", facts, re.MULTILINE)}) or [facts]
    system = [platform.system(), platform.machine(), *platform.libc_ver(), *processor]
    parts = [source.read_text(), *command, compiler, compiler.stat().st_mtime_ns, *system]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
