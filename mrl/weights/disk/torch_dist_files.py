"""Files of Megatron's `torch_dist` format, read and written without unpickling anything but plain descriptions.

A `.distcp` file is a sequence of torch archives (`torch.save`), one for each block of a tensor; `.metadata`, a pickle
of torch's own classes, locates the blocks. Torch opens `.metadata` with pickle, which can run code; here only the
classes that describe tensors are allowed.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from mrl.weights.disk.rows import FileRows
from mrl.weights.errors import WeightError

METADATA = ".metadata"
DIFFERS = "it differs from its checksums"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
_ENTRIES = (dcp.TensorStorageMetadata, dcp.BytesStorageMetadata)


@dataclass(frozen=True)
class BlockLocation:
    """Location of a block of the tensor `key`, or of an object if sizes is None: bytes `offset` .. `offset + length` of
    `file`.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...] | None
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    items: tuple[BlockLocation, ...]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not describe a tensor")


def load_metadata(directory: Path) -> dcp.Metadata:
    """Returns the content of `.metadata` in torch's form. Raises WeightError if it cannot be read or trusted."""
    file = directory / METADATA
    try:
        content = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        places = [(index.fqn, PurePosixPath(place.relative_path)) for index, place in content.storage_data.items()]
        described = content.state_dict_metadata.items()
        wrong = [key for key, entry in described if not isinstance(key, str) or not isinstance(entry, _ENTRIES)]
    except FileNotFoundError:
        raise WeightError(f"{file} does not exist: {directory} is not a complete torch_dist checkpoint") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise WeightError(f"{file} is not the description of a checkpoint ({error})") from error
    if wrong:
        raise WeightError(f"{file} is not the description of a checkpoint (nor what {wrong[0]!r} is)")
    for key, pure in places:
        if pure.is_absolute() or ".." in pure.parts:
            raise WeightError(f"{file}: {key} points to {str(pure)!r}, outside of the directory")
    return content


def read_metadata(directory: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by key, without objects. Raises WeightError as `load_metadata`."""
    content, file = load_metadata(directory), directory / METADATA
    try:
        return {
            key: _stored(key, entry, content.storage_data, file)
            for key, entry in content.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }
    except (AttributeError, TypeError) as error:  # half-made entries
        raise WeightError(f"{file} is not the description of a checkpoint ({error})") from error


def _stored(key: str, entry: dcp.TensorStorageMetadata, places: Mapping[Any, Any], file: Path) -> StoredTensor:
    items = []
    for chunk in entry.chunks:
        place = places.get(dcp.MetadataIndex(key, chunk.offsets))
        if place is None:
            raise WeightError(f"{file}: {key} at {tuple(chunk.offsets)} has no stored data")
        where = str(place.relative_path)
        items.append(BlockLocation(key, tuple(chunk.offsets), tuple(chunk.sizes), where, place.offset, place.length))
    return StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(items))


def equals_checksums(file: Path | FileSlice | IO[bytes]) -> bool:
    """Compares a file of torch.save with its checksums, which torch.load ignores. Returns True also for a file without
    them: `mrl convert` writes zeros in their place, and formats other than torch's archives have none.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return not any(record.CRC for record in archive.infolist()) or archive.testzip() is None
    except zipfile.BadZipFile:  # for torch.load to judge
        return True


def read_plain(file: Path | IO[bytes], name: str | Path) -> Any:
    """Reads a file of torch.save that holds only tensors and plain values.

    Raises WeightError, with `name`, for anything else.
    """
    try:
        if not equals_checksums(file):
            raise WeightError(f"{name} is damaged: {DIFFERS}")
        if not isinstance(file, Path):
            file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except WeightError:
        raise
    except FileNotFoundError:
        raise WeightError(f"{name} does not exist") from None
    except Exception as error:  # a damaged pickle can raise anything; torch's own text advises to load without safety
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it names {found[1]}, which is not a plain value" if found else "it cannot be read as plain values"
        raise WeightError(f"{name} is damaged: {reason}") from error


def write_metadata(
    directory: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], items: Iterable[BlockLocation]
) -> None:
    """Writes `.metadata`. `tensors`: shape and dtype of every key."""
    described: dict[str, Any] = {
        key: dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), [])
        for key, (shape, dtype) in tensors.items()
    }
    places = {}
    for item in items:
        index = dcp.MetadataIndex(item.key)
        if item.sizes is None:
            described[item.key] = dcp.BytesStorageMetadata()
        else:
            chunks = described[item.key].chunks
            index = dcp.MetadataIndex(item.key, item.offsets, len(chunks))
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
        places[index] = _StorageInfo(item.file, item.offset, item.length)
    content = dcp.Metadata(described, {}, places, dcp.StorageMeta(), CURRENT_DCP_VERSION)
    (directory / METADATA).write_bytes(pickle.dumps(content))


@dataclass(frozen=True)
class ArchiveRows:
    """Tensor inside of a `.distcp` file, viewed as a matrix of `shape`."""

    directory: Path
    item: BlockLocation
    dtype: torch.dtype
    shape: tuple[int, int]

    @property
    def label(self) -> str:
        return f"{self.directory / self.item.file}: {self.item.key}"

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` [n, columns]. Raises WeightError unless the archive holds exactly this tensor, contiguous."""
        FileRows(self.directory / self.item.file, self._data, self.shape, self.dtype).read(start, out)

    @cached_property
    def _data(self) -> int:
        """Offset of the tensor's bytes. Raises WeightError unless the archive holds exactly this tensor, contiguous."""
        file = self.directory / self.item.file
        try:
            with file.open("rb") as whole:
                part = FileSlice(whole, self.item.offset, self.item.length)
                records = {info.filename.partition("/")[2]: info for info in zipfile.ZipFile(part).infolist()}
                pickled_at = _data_offset(part, records["data.pkl"])
                part.seek(pickled_at)
                found = _TensorPickle(io.BytesIO(part.read(records["data.pkl"].file_size))).load()
                data = records[f"data/{found.storage}"]
                start = self.item.offset + _data_offset(part, data)
            wanted = (self.item.sizes, self.dtype.itemsize * torch.Size(self.item.sizes or ()).numel())
            fits = (found.size, data.file_size) == wanted and found.contiguous and not data.compress_type
        except Exception as error:  # a damaged pickle can raise anything
            raise WeightError(f"{file}: {self.item.key} cannot be read ({error})") from error
        if not fits:
            raise WeightError(f"{file}: {self.item.key} is stored as {found} instead of {wanted}")
        return start


def _data_offset(archive: FileSlice, record: zipfile.ZipInfo) -> int:
    """Returns the offset of a record's bytes: after its header, its name and an extra field. Avoids zipfile, which
    would verify checksums that torch can be told to omit.
    """
    archive.seek(record.header_offset + 26)
    lengths = archive.read(4) or b""
    name, extra = lengths[:2], lengths[2:]
    return record.header_offset + 30 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")


@dataclass(frozen=True)
class _StoredLayout:
    storage: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        return self.offset == 0 and torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()


class _TensorPickle(pickle.Unpickler):
    """Reads the layout of a saved tensor in its storage; creates nothing but a `_StoredLayout`."""

    def persistent_load(self, pid: Any) -> str:
        return str(pid[2])

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *rest: _StoredLayout(
                storage, offset, tuple(size), tuple(stride)
            )
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"it contains a {module}.{name}, not a plain tensor")


class FileSlice(io.RawIOBase):
    """File object over bytes `start` .. `start + length` of a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def pickle_object(value: Any) -> bytes:
    """Returns an object as Megatron stores it: a list of the values of this key."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()
