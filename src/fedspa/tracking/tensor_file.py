"""Files of tensors in the safetensors format, written one tensor at a time: they may be larger than the memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], config_hash: str) -> None:
    """Write tensors to a file that `safetensors` reads; equal tensors give equal bytes.

    `tensors` is gone through twice, once for what the header says of each, and is best one that reads a tensor
    when it is asked for it where they are many. The widest dtype comes first, so that all are aligned.
    """
    import torch

    places, end = {}, 0
    widths = {name: (-tensor.element_size(), name) for name, tensor in tensors.items()}
    order = sorted(widths, key=widths.__getitem__)
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        places[name] = {"dtype": DTYPES[str(tensor.dtype)], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(
        {"__metadata__": {"config_hash": config_hash}} | places, separators=(",", ":")
    ).encode()
    header += b" " * (-len(header) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little")
        yield header
        for name in order:
            values = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield values.view(torch.uint8).numpy().data

    write_whole(path, pieces())
