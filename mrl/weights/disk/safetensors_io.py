"""Hugging Face weight files: opened lazily, read by slices, written in files of bounded size.

Pickled files (`pytorch_model.bin`) can run code when they are opened. They are refused unless the caller allows them,
and are then read with `weights_only=True`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.families.stacks import slice_of, stored_name
from mrl.foreign import own_file, read_json
from mrl.weights.disk.mxfp4 import BLOCKS, SCALES, UnpackedSource
from mrl.weights.disk.safetensors_header import FLOATS, Entry, checked_name, read_header
from mrl.weights.errors import WeightError

MAX_FILE_NAME = 255  # characters
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_SINGLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class TensorSource:
    """A tensor of a file. Indexing reads only that part."""

    def __init__(self, file: Path, name: str, part: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.file, self.name, self.shape, self.dtype = file, name, shape, dtype
        self._part = part

    @property
    def label(self) -> str:
        return f"{self.file}: {self.name}"

    def __getitem__(self, index: Any) -> Tensor:
        value: Tensor = self._part[index]
        return value

    def narrow(self, ranges: Sequence[tuple[int, int]], dims: int) -> NarrowedSource:
        """Returns the block `ranges` as a source of `dims` dimensions; surplus leading ranges have size one and are
        dropped.
        """
        return NarrowedSource(self, ranges, dims)


class NarrowedSource:
    """Block of a TensorSource that reads like a tensor of its own."""

    def __init__(self, base: TensorSource, ranges: Sequence[tuple[int, int]], dims: int) -> None:
        self._base = base
        self._lead = tuple(slice(start, stop) for start, stop in ranges[: len(ranges) - dims])
        self._ranges = tuple(ranges[len(ranges) - dims :])
        self.label, self.dtype = base.label, base.dtype
        self.shape = tuple(stop - start for start, stop in self._ranges)

    def __getitem__(self, index: Any) -> Tensor:
        asked = index if isinstance(index, tuple) else (index,)
        asked += (slice(None),) * (len(self._ranges) - len(asked))
        cut = []
        for want, (start, stop) in zip(asked, self._ranges, strict=True):
            first, last, _ = want.indices(stop - start)
            cut.append(slice(start + first, start + last))
        block = self._base[(*self._lead, *cut)]
        return block.reshape(block.shape[len(self._lead) :])


class HFCheckpoint:
    """Tensors of a Hugging Face directory, by name, and slices of them. A context manager; closing it unmaps the files.

    Raises WeightError, which names file and tensor, for missing weights, an unreadable index, an index that points
    outside of the directory, a single file beside the index of other files, a missing or truncated file, a tensor that
    is in the index but not in the file, or in two files, a wrong shape.
    """

    def __init__(self, path: str | Path, allow_pickle: bool = False) -> None:
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        self._headers: dict[Path, dict[str, Entry]] = {}
        self._file_of: dict[str, Path] = {}
        self._file_of = self._find(allow_pickle)

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return stored_name(name) in self._file_of or self._is_packed(stored_name(name))

    def _is_packed(self, name: str) -> bool:
        return name not in self._file_of and name + BLOCKS in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def source(self, name: str, shape: tuple[int, ...] | None = None) -> TensorSource | NarrowedSource | UnpackedSource:
        """Returns the tensor `name`, or the slice that the name denotes, unread. Raises WeightError if it is missing,
        quantized, or of another shape than `shape`, if given.
        """
        part = slice_of(name)
        return self._source(name, shape) if part is None else self._slice(*part, shape)

    def _slice(self, whole: str, index: int, shape: tuple[int, ...] | None) -> NarrowedSource | UnpackedSource:
        if self._is_packed(whole):
            blocks, scales = (self._slice_of_file(whole + part, index, None, ("U8",)) for part in (BLOCKS, SCALES))
            groups = blocks.shape[:-1]
            if len(groups) != 2 or blocks.shape[-1] != 16 or scales.shape != groups:
                raise WeightError(f"{blocks.label} and {SCALES} are not packed: {blocks.shape}, {scales.shape}")
            unpacked = UnpackedSource(blocks, scales)
            if shape is not None and unpacked.shape != shape:
                raise WeightError(f"{blocks.label} has {unpacked.shape} each, and config.json requires {shape}")
            return unpacked
        return self._slice_of_file(whole, index, shape, tuple(FLOATS))

    def _slice_of_file(
        self, whole: str, index: int, shape: tuple[int, ...] | None, dtypes: Sequence[str]
    ) -> NarrowedSource:
        source = self._source(whole, None, dtypes)
        self._check_slice(source.file, whole, index, source.shape, shape)
        ranges = [(index, index + 1), *((0, size) for size in source.shape[1:])]
        return source.narrow(ranges, len(source.shape) - 1)

    def _source(self, name: str, shape: tuple[int, ...] | None, dtypes: Sequence[str] = tuple(FLOATS)) -> TensorSource:
        file = self._file_of.get(name)
        if file is None:
            raise WeightError(f"{self.path}: no tensor {name}")
        handle = self._handle(file)
        part: Any
        if isinstance(handle, dict):
            if name not in handle:
                raise WeightError(f"{file}: it has no tensor {name}, which the index places there")
            part, found, dtype = handle[name], tuple(handle[name].shape), _pickle_dtype(handle[name])
        else:
            try:
                part = handle.get_slice(name)
            except SafetensorError as e:
                raise WeightError(f"{file}: it has no tensor {name}, which the index places there ({e})") from e
            found, dtype = tuple(part.get_shape()), part.get_dtype()
        self._check(file, name, dtype, found, shape, dtypes)
        return TensorSource(file, name, part, found, FLOATS.get(dtype, torch.uint8))

    def locate(self, name: str, shape: tuple[int, ...]) -> tuple[Path, int, torch.dtype] | None:
        """Returns (file, first byte, dtype) of a tensor in a safetensors file, without mapping it; None for a tensor
        stored otherwise: pickled, or packed.

        Raises WeightError as `source` does.
        """
        stored, part = stored_name(name), slice_of(name)
        file = self._file_of.get(stored)
        if file is None and self._is_packed(stored):
            return None
        if file is None:
            raise WeightError(f"{self.path}: no tensor {name}")
        if file.suffix != ".safetensors":
            return None
        entry = self._header(file).get(stored)
        if entry is None:
            raise WeightError(f"{file}: it has no tensor {stored}, which the index places there")
        self._check(file, stored, entry.dtype, entry.shape, shape if part is None else None)
        if part is None:
            return file, entry.start, FLOATS[entry.dtype]
        self._check_slice(file, *part, entry.shape, shape)
        return file, entry.start + part[1] * (entry.nbytes // entry.shape[0]), FLOATS[entry.dtype]

    def _check_slice(
        self, file: Path, name: str, index: int, found: tuple[int, ...], wanted: tuple[int, ...] | None
    ) -> None:
        if not found or index >= found[0] or (wanted is not None and found[1:] != wanted):
            shape = f" of shape {list(wanted)}" if wanted is not None else ""
            raise WeightError(
                f"{file}: {name} has shape {list(found)}, and config.json requires its slice {index}{shape}"
            )

    def _check(
        self,
        file: Path,
        name: str,
        dtype: str,
        found: tuple[int, ...],
        wanted: tuple[int, ...] | None,
        dtypes: Sequence[str] = tuple(FLOATS),
    ) -> None:
        if dtype not in dtypes:
            raise WeightError(f"{file}: {name} is {dtype}; supported (unquantized): {', '.join(sorted(FLOATS))}")
        if wanted is not None and found != wanted:
            raise WeightError(f"{file}: {name} has shape {list(found)}, and config.json requires {list(wanted)}")

    def _header(self, file: Path) -> dict[str, Entry]:
        if file not in self._headers:
            header = read_header(self._own(file))
            self._check_copies(file, header)
            self._headers[file] = header
        return self._headers[file]

    def _check_copies(self, file: Path, names: Iterable[str]) -> None:
        """Raises WeightError if an opened file has a tensor that the index places in another one."""
        for name in names:
            if (other := self._file_of.get(name, file)) != file:
                raise WeightError(
                    f"{file}: it has a tensor {name}, which the index places in {other.name}: transformers would read "
                    "the copy in the last file: remove one of them"
                )

    def _own(self, file: Path) -> Path:
        if not file.is_file():
            raise WeightError(f"{file} does not exist, though the index names it")
        try:
            return own_file(self.path, file.relative_to(self.path))
        except ValueError as e:
            raise WeightError(str(e)) from e

    def _find(self, allow_pickle: bool) -> dict[str, Path]:
        if not self.path.is_dir():
            raise WeightError(f"{self.path} is not a directory")
        if (self.path / INDEX).is_file():
            return self._read_index(self.path / INDEX)
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._header(self.path / SINGLE), self.path / SINGLE)
        pickled = [name for name in (PICKLE_INDEX, PICKLE_SINGLE) if (self.path / name).is_file()]
        if not pickled:
            raise WeightError(f"{self.path}: no weights (neither {INDEX} nor {SINGLE})")
        if not allow_pickle:
            raise WeightError(
                f"{self.path / pickled[0]}: pickled weights can run code when they are opened: convert them to "
                "safetensors, or set model.allow_pickle: true (mrl convert: --allow-pickle) to read tensors only"
            )
        if pickled[0] == PICKLE_INDEX:
            return self._read_index(self.path / PICKLE_INDEX)
        return dict.fromkeys(self._handle(self.path / PICKLE_SINGLE), self.path / PICKLE_SINGLE)

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = read_json(self._own(index))["weight_map"]
            named = {checked_name(name): file or "" for name, file in weight_map.items()}
            for file in set(named.values()) - {""}:
                checked_name(file, MAX_FILE_NAME)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise WeightError(f"{index}: not a weight index (no readable weight_map: {e!r})") from e
        for name, file in named.items():
            pure = PurePosixPath(file)
            if pure.is_absolute() or ".." in pure.parts or "\\" in file or not file:
                raise WeightError(f"{index}: {name} points to {file!r}, outside of the directory")
            if pure.suffix != PurePosixPath(index.name.removesuffix(".index.json")).suffix:
                raise WeightError(f"{index}: {name} points to {file!r}, a file of another format")
        single = index.name.removesuffix(".index.json")
        if (others := {*named.values()} - {single}) and (self.path / single).is_file():
            raise WeightError(
                f"{self.path} has both {single} and {index.name}, which names {min(others)}: transformers would read "
                "the single file, and engines the others: remove the one that is not the model"
            )
        return {name: self.path / file for name, file in named.items()}

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._opened(self._own(file))
        return self._open[file]

    def _opened(self, file: Path) -> Any:
        if file.suffix != ".safetensors":
            content = _open_pickle(file)
            self._check_copies(file, content)
            return content
        self._header(file)  # stricter than the library
        return _open_safetensors(file)


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise WeightError(f"{file}: not a complete safetensors file, truncated or damaged ({e})") from e


def _open_pickle(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as e:
        raise WeightError(f"{file}: cannot be read as plain tensors ({type(e).__name__}: {e})") from e
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise WeightError(f"{file}: not a dictionary of tensors")
    return content


def _pickle_dtype(tensor: Tensor) -> str:
    names = {dtype: name for name, dtype in FLOATS.items()}
    return names.get(tensor.dtype, str(tensor.dtype))
