"""Rows on disk: JSON lines, a JSON list, parquet, a directory of the `datasets` library; rows of a library, by name.

JSON is read without that library: its tables give every row the keys and types of all rows, and its errors name no
line. Here a row reaches the reward function as it was written. Parquet and directories are tables already; the library
maps them into memory (parquet through a copy in its cache, HF_DATASETS_CACHE).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mrl.config.json_rows import BOM, as_row, is_name, named_rows, parse, parse_row
from mrl.config.schema import SourceConfig
from mrl.data.errors import DataError


class Rows(Protocol):
    """Rows of a source. `rows[i]` raises ValueError, which says why, for an invalid row."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, Any]: ...

    def where(self, i: int) -> str:
        """Returns file and row, for messages."""
        ...


class OpenSource:
    """One source of a data set: its rows on disk.

    first_index: index of its first row in the data set
    unused_columns: number of rows in which a column has no effect, by (column, why) as in `columns.unused_columns`
    Raises DataError for a path that holds no data of a known kind.
    """

    def __init__(self, source: SourceConfig, first_index: int) -> None:
        self.source, self.first_index = source, first_index
        self.unused_columns: Counter[tuple[str, str]] = Counter()
        self.rows = open_rows(source)
        self.root = root_of(source)

    @property
    def name(self) -> str:
        """Path and split, for messages."""
        return self.source.path if self.source.split is None else f"{self.source.path}[{self.source.split}]"

    def where(self, index: int) -> str:
        """Returns file and row for a row's index in the data set."""
        return self.rows.where(index - self.first_index)


def root_of(source: SourceConfig) -> Path:
    """Returns the directory below which the source's rows may name files."""
    path = Path(source.path)
    return path if path.is_dir() else path.parent


def open_rows(source: SourceConfig, most_bytes: int | None = None) -> Rows:
    """Opens the rows of a source. With `most_bytes`, reads no more of a JSON file than that: the first rows of JSON
    lines, or none of a JSON list in a longer file.

    Raises DataError for a path that holds no data of a known kind.
    """
    path = Path(source.path)
    name = source.path if source.split is None else f"{path}[{source.split}]"
    if is_name(source.path):
        try:
            return Table(name, named_rows(source.path, source.split))
        except ValueError as error:
            raise DataError(f"{name}: {error}") from error
    if path.is_dir():
        return Table(name, _undecoded(_load_directory(source)))
    if not path.is_file():
        raise DataError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    if path.suffix == ".parquet":
        return Table(source.path, _undecoded(_load_dataset("parquet", data_files=source.path)["train"]))
    if path.suffix == ".jsonl" or (path.suffix == ".json" and not _is_list(path)):
        return JsonLines(path, most_bytes)
    if path.suffix == ".json":
        is_read = most_bytes is None or path.stat().st_size <= most_bytes
        return Table(source.path, _read_list(path) if is_read else [])
    raise DataError(f"{path}: expected .jsonl, .json, .parquet or a directory")


class JsonLines:
    """One object a line, kept as text: parsed rows take several times the memory. Blank lines are not rows."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path = path
        with path.open("rb") as file:
            raw = file.read(-1 if most_bytes is None else most_bytes)
            if file.read(1):
                raw = raw[: raw.rfind(b"\n") + 1]
        lines = enumerate(raw.removeprefix(BOM).split(b"\n"), start=1)
        self._lines = [(number, line) for number, line in lines if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return parse_row(self._lines[i][1])

    def where(self, i: int) -> str:
        return f"{self._path}:{self._lines[i][0]}"


class Table:
    """Rows of a list, or of a `datasets.Dataset`, counted from 0."""

    def __init__(self, name: str, rows: Sequence[Any]) -> None:
        self._name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return as_row(self._rows[i])

    def where(self, i: int) -> str:
        return f"{self._name}, row {i}"


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")


def _read_list(path: Path) -> list[Any]:
    try:
        rows: list[Any] = parse(path.read_bytes().removeprefix(BOM))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    return rows


def _load_directory(source: SourceConfig) -> Sequence[Any]:
    path, split = Path(source.path), source.split
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    found = _load_from_disk(source.path) if saved else _load_dataset(source.path)
    if not isinstance(found, dict):
        if split is not None:
            raise DataError(f"{path}: the data set has no splits: leave out split {split!r}")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        wanted = "choose a split" if split is None else f"it has no split {split!r}"
        raise DataError(f"{path}: {wanted}: available: {', '.join(found)}")
    return found[split]


def _load_from_disk(path: str) -> Any:
    import datasets

    return _quietly(datasets.load_from_disk, path)


def _load_dataset(kind_or_path: str, **options: Any) -> Any:
    import datasets

    return _quietly(datasets.load_dataset, kind_or_path, **options)


def _undecoded(rows: Any) -> Any:
    """Returns rows with images as {"bytes", "path"}: the library would otherwise decode them at every access to a
    row.
    """
    import datasets

    def raw(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(feature, datasets.List | datasets.LargeList):
            return type(feature)(raw(feature.feature))
        return {name: raw(part) for name, part in feature.items()} if isinstance(feature, dict) else feature

    features = datasets.Features({name: raw(feature) for name, feature in rows.features.items()})
    return rows if features == rows.features else rows.cast(features)


def _quietly(load: Any, path: str, **options: Any) -> Any:
    """Loads without progress bars; the library's errors are raised as DataError with the name of the data."""
    import datasets

    datasets.disable_progress_bars()
    try:
        return load(path, **options)
    except Exception as error:
        cause = error.__cause__ or error  # the library says only "an error occurred" and chains what it was
        what = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise DataError(f"{options.get('data_files', path)}: the datasets library cannot read it: {what}") from error
