"""Files of tensors in the safetensors format, written one tensor at a time, so they may be larger than the memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from fedspa.core.files import write_whole

if TYPE_CHECKING:
    import torch

DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def file_header(layout: Mapping[str, tuple[torch.dtype, Sequence[int]]], config_hash: str = "") -> bytes:
    """The header of a file of tensors with these dtypes and shapes. The values follow in the same order.

    Wider dtypes must come first, so that every tensor is aligned.
    """
    header: dict[str, object] = {"__metadata__": {"config_hash": config_hash}} if config_hash else {}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + dtype.itemsize * prod(shape)
        header[name] = {"dtype": DTYPES[str(dtype)], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor in the format of a file: close-packed and little-endian."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], config_hash: str) -> None:
    """Write tensors to a file that `safetensors` reads; equal tensors give equal bytes.

    `tensors` is read twice, once for the header. A mapping that reads each tensor on access keeps
    the memory use small.
    """
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    order = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))
    header = file_header({name: layout[name] for name in order}, config_hash)
    write_whole(path, chain([header], (as_bytes(tensors[name]) for name in order)))
