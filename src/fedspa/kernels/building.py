"""Builds a C file for this very processor, once a machine: libraries lie in the user's cache (XDG_CACHE_HOME)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedspa.core.errors import brief
from fedspa.core.files import write_whole

COMPILERS = ("cc", "gcc", "clang")
"""Whichever is found first; the variable CC goes before them."""
TIMEOUT_S = 120
_DIGEST = hashlib.sha256().digest_size


class CannotBuild(Exception):
    """Says why there is no library."""


@cache
def library(source: Path) -> ctypes.CDLL:
    """The library of a C file. Raises `CannotBuild` where there is no compiler, or it fails."""
    if os.name != "posix":
        raise CannotBuild("that takes Linux or macOS")
    try:
        command = _command()
        name = f"{source.stem}-{_made_of(source, command)}.so"
        folder = _cache()
        if folder and (kept := _kept(folder / name)):
            return kept
        with tempfile.TemporaryDirectory(prefix="fedspa-") as place:
            made = Path(place) / name
            _compile([*command, "-o", str(made), str(source)])
            content = made.read_bytes()
            if folder:
                with suppress(OSError):  # full, read-only: then the next process builds it again
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                    write_whole(folder / name, _signed(content))
                    if kept := _kept(folder / name):
                        return kept
            return ctypes.CDLL(str(made))
    except (OSError, ValueError) as error:  # of the system, and of what CC says
        raise CannotBuild(brief(error)) from error


def _command() -> list[str]:
    """How a library is compiled, but for its files."""
    told = shlex.split(os.environ.get("CC", ""))
    found = [*filter(shutil.which, told[:1] or COMPILERS)]
    if not found:
        raise CannotBuild(f"there is no C compiler ({' '.join(told[:1]) or ', '.join(COMPILERS)})")
    return [found[0], *told[1:], "-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared"]


def _compile(command: list[str]) -> None:
    """Run the compiler; no process of it stays behind. Raises `CannotBuild` where it fails, `OSError` without it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", env=os.environ | {"LC_ALL": "C"}, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            _, told = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:  # it takes too long, or somebody ends this process
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotBuild(f"{command[0]} took more than {TIMEOUT_S} seconds") from error
            raise
    if process.returncode:
        raise CannotBuild(f"{command[0]} says: {_first_error(told)}")


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["nothing"]
    return next((line for line in lines if "error" in line), lines[-1])


def _cache() -> Path | None:
    """The folder for libraries, if code may be loaded from it: nobody else may write there."""
    told = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (told if told.is_absolute() else Path.home() / ".cache") / "fedspa"
        found = folder.stat()
    except FileNotFoundError:
        return folder
    except (OSError, RuntimeError):  # it cannot be looked at, or there is no home
        return None
    own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if own else None


def _made_of(source: Path, command: list[str]) -> str:
    """A hash of all that a library's code depends on: the machines that share a home are not all alike."""
    compiler = Path(shutil.which(command[0]) or command[0]).resolve()
    found = compiler.stat()
    parts = [source.read_text(), *command, compiler, found.st_size, found.st_mtime_ns, *_processor()]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """What tells machines apart whose code differs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = dict.fromkeys(line for line in lines if re.match("model name|flags", line))
    return [platform.system(), platform.machine(), platform.processor(), *platform.libc_ver(), *told]


def _kept(path: Path) -> ctypes.CDLL | None:
    """The library that an earlier process left there whole, where it can be loaded."""
    try:
        content = path.read_bytes()
        # Half a library ends the process that loads it.
        return ctypes.CDLL(str(path)) if content == _signed(content[:-_DIGEST]) else None
    except OSError:
        return None


def _signed(content: bytes) -> bytes:
    """With its hash behind it, which a loader does not look at."""
    return content + hashlib.sha256(content).digest()
