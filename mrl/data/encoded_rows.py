"""Common base of data sets of tokenised rows: a source that reads its rows, and several sources in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from mrl.config.schema import SourceConfig
from mrl.data.encoder import Encoder
from mrl.data.errors import DataError, raise_for
from mrl.data.mixture import Mixture
from mrl.data.row_sampler import RowSampler
from mrl.data.sources import OpenSource
from mrl.data.tokenizer import TokenizerError

BATCH_ROWS = 512  # tokenised at once
T = TypeVar("T")


class Indexed(Protocol):
    @property
    def index(self) -> int: ...


Row = TypeVar("Row", bound=Indexed)


class EncodedSource(OpenSource, Generic[Row]):
    """One source of tokenised rows.

    kept: its usable rows, tokenised
    as_text, as_control: for each row with control tokens, the first one's name; see `Encoder.render`
    """

    def __init__(self, source: SourceConfig, encoder: Encoder, first_index: int) -> None:
        super().__init__(source, first_index)
        self.kept: list[Row] = []
        self.as_text: list[str] = []
        self.as_control: list[str] = []
        self._encoder = encoder
        self._problems: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self.kept)

    def _keep(self, rows: Iterable[Row]) -> None:
        """Raises DataError that names every malformed row, or if there is none at all."""
        self.kept = list(rows)
        raise_for(self._problems)
        if not len(self.rows):
            raise DataError(f"{self.source.path}: no rows")

    def _parts(self, read: Callable[[int], T]) -> Iterator[dict[int, T]]:
        """Yields, in batches, the result of `read` by row number; rows that `read` refuses by ValueError become
        problems.
        """
        for start in range(0, len(self.rows), BATCH_ROWS):
            yield dict(self._read(range(start, min(start + BATCH_ROWS, len(self.rows))), read))

    def _read(self, rows: range, read: Callable[[int], T]) -> Iterator[tuple[int, T]]:
        for i in rows:
            try:
                yield i, read(i)
            except TokenizerError as error:  # every other row would fail alike
                raise TokenizerError(f"{self.rows.where(i)}: {error}") from None
            except ValueError as error:
                self._problems.append((self.rows.where(i), str(error)))


Source = TypeVar("Source", bound=EncodedSource[Any])


class EncodedRows(Generic[Source, Row]):
    """The usable rows of all sources; a row's number is its place among them."""

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        opened: Callable[[SourceConfig, int], Source],
        why_none: Callable[[Source], str],
        shuffle: bool,
        first_index: int = 0,
    ) -> None:
        """Opens the sources.

        Args:
            opened: opens a source, given the index of its first row.
            why_none: says why a source has no usable row, for the DataError.
            first_index: index of the first source's first row.
        """
        self.sources: list[Source] = []
        for source in sources:
            first = first_index + sum(len(other.rows) for other in self.sources)
            self.sources.append(found := opened(source, first))
            if not found:
                raise DataError(f"{source.path}: none of its {len(found.rows)} rows can be used: {why_none(found)}")
        sizes = [len(source) for source in self.sources]
        self._order, self._first = RowSampler(sources, sizes, shuffle), [sum(sizes[:i]) for i in range(len(sizes))]
        self.rows: list[Row] = [row for source in self.sources for row in source.kept]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def mixture(self) -> Mixture:
        """Mixture of the sources."""
        return self._order.mixture

    def of_step(self, step: int, n: int, seed: int) -> list[int]:
        """Returns the numbers of the n rows of step `step` (from 0), in the order of `RowSampler.of_step`."""
        return [self._first[source] + place for source, place in self._order.of_step(step, n, seed)]

    def first(self, n: int | None) -> list[int]:
        """Returns the numbers of the first n rows (all if None), round-robin over several sources: every validation
        gets the same rows.
        """
        return [self._first[source] + place for source, place in self._order.first(len(self) if n is None else n)]

    def where(self, row: Row) -> str:
        """Returns file and row, for messages."""
        return next(s for s in reversed(self.sources) if s.first_index <= row.index).where(row.index)
