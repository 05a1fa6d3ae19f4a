"""Names of files and folders that are valid on every file system."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from urllib.parse import quote

LONGEST_NAME = 200
"""The longest name in bytes. File systems allow 255; a date, a number or an ending needs some of them."""
SIGNS = "=,+~@[]-_. "
"""The signs that stay as they are, beside letters and digits."""


def file_name(parts: Iterable[str], longest: int = LONGEST_NAME) -> str:
    """The parts as one name that any file system takes, different for different parts.

    A sign that some file system refuses is written as in an address (%3A for a colon). A name of more than `longest`
    bytes loses its last parts, and ends with a hash of the whole.
    """
    kept = ["".join(map(_spelt, part)) for part in parts]
    name = ",".join(kept)
    if name.endswith((".", " ")):
        name = f"{name[:-1]}%{ord(name[-1]):02X}"
    encoded = name.encode()
    if len(encoded) <= longest:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    while len(kept) > 1 and len(",".join(kept).encode()) > longest:
        kept.pop()
    return f"{','.join(kept).encode()[:longest].decode(errors='ignore')}-{digest}"


def _spelt(sign: str) -> str:
    kept = sign.isalnum() or sign in SIGNS if sign.isascii() else sign.isprintable()
    return sign if kept else quote(sign, safe="", errors="surrogatepass")
