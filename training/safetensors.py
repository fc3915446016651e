"""The safetensors format, in which weights travel: tensors in one file, read without running code.

    8 bytes    N, the length of the header, little-endian
    N bytes    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …, "__metadata__": {text: text}}
    the rest   the tensors' bytes, little-endian and row-major, one after another without holes; offsets count from here

Source: https://huggingface.co/docs/safetensors. Written through an open file, so that its bytes can be summed on their way.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; what the format's own library accepts


class Sink(Protocol):
    """What `write` needs of a file."""

    def write(self, data: Any, /) -> object: ...


def write(file: Sink, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors of any device; a tensor that shares memory with another is written twice.

    Raises:
        KeyError: a dtype that the format has no name for.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide elements first, as the format's library does, so that each tensor lies at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        if tensors[name].numel():
            file.write(_bytes(tensors[name]))


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU. They lie in the file until they are used, and writing to them leaves it as it is.

    Raises:
        ValueError: not a whole file of this format.
        OSError: no such file, or it can't be opened.
    """
    header, first = _header(path)
    size = path.stat().st_size - first
    data = torch.from_numpy(np.memmap(path, np.uint8, mode="c", offset=first)) if size else torch.empty(0, dtype=torch.uint8)
    told = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if told != size:
        raise ValueError(f"{path} has {size:,} bytes of tensors, its header tells of {told:,}: it was cut short")
    tensors, expected = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if begin != expected or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: the bytes of tensor {name} are not where its shape {shape} says")
        raw, expected = data[begin:end], end
        if (first + begin) % dtype.itemsize:
            raw = raw.clone()
        tensors[name] = raw.view(dtype).view(shape)
    return tensors


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries by tensor name, and where the tensors' bytes begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{path}: not a safetensors file, or cut short in its header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for entry in header.values():
                begin, end = entry["data_offsets"]
                if not (0 <= begin <= end) or min(entry["shape"], default=0) < 0:
                    raise ValueError
                DTYPES[entry["dtype"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a safetensors file: {type(error).__name__} in its header: {error}") from error
    return header, 8 + length


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
