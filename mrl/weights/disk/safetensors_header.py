"""Safetensors header, checked against its file: stricter than the library that reads it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrl.foreign import parse_json
from mrl.weights.errors import WeightError

MAX_HEADER, MAX_NAME = 100_000_000, 512  # bytes (as the format has it), characters
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file: `nbytes` bytes from `start`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """Returns the entries by name. Raises WeightError unless the tensors fill the file from the header to its end
    without gaps.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in {size}")
            header = parse_json(opened.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {checked_name(name): _entry(name, value, 8 + length) for name, value in header.items()}
        at = 8 + length
        for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
            if entry.start != at:
                raise ValueError("its tensors leave gaps or overlap")
            at += entry.nbytes
        if at != size or not entries:
            raise ValueError("its tensors do not fill it")
        return entries
    except (ValueError, OSError) as e:
        raise WeightError(f"{file}: not a complete safetensors file, truncated or damaged ({e})") from e


def _entry(name: str, value: Any, data: int) -> Entry:
    """Returns the header's entry of a tensor; `data` is the offset of the first tensor. Raises ValueError."""
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        known = isinstance(dtype, str) and len(dtype) <= 16
        numbers = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        known = numbers = False
    if not known or not numbers or start > stop:
        raise ValueError(f"{name} has no valid dtype, shape and data_offsets")
    if dtype in FLOATS and stop - start != math.prod(shape) * FLOATS[dtype].itemsize:
        raise ValueError(f"{name} has {stop - start} bytes, which do not match {shape} {dtype}")
    return Entry(dtype, tuple(shape), data + start, stop - start)


def checked_name(name: Any, longest: int = MAX_NAME) -> str:
    """Returns the name of a tensor or a file. Raises ValueError for an invalid one: empty, too long, or not
    printable.
    """
    if not isinstance(name, str) or not name or len(name) > longest or not name.isprintable():
        raise ValueError(f"{str(name)[:80]!r} is not a valid name (1 to {longest} printable characters)")
    return name
