"""Check of the first rows of a source, read as a run reads them, before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mrl.config.schema import SourceConfig
from mrl.data.columns import named_columns, unused_columns
from mrl.data.errors import raise_for
from mrl.data.rows import Reader, Row, value_at
from mrl.data.sources import open_rows
from mrl.data.tokenizer import TokenizerError

FIRST_ROWS, FIRST_RENDERED, FIRST_BYTES = 20_000, 200, 32 << 20


@dataclass
class FirstRows:
    """Columns that the first rows of a source have or lack.

    Attributes:
        idle: number of rows in which a column has no effect, by (column, why)
        named: settings of `columns.named_columns` whose column has a value in a row
        are_all: the source has no further rows
    """

    idle: Counter[tuple[str, str]] = field(default_factory=Counter)
    named: set[str] = field(default_factory=set)
    are_all: bool = True


def check_first_rows(
    source: SourceConfig,
    reader: Reader,
    render: Callable[[Row], object] | None = None,
    read_images: Callable[[Row], object] | None = None,
) -> FirstRows:
    """Reads the first rows; with `render`, puts a smaller number of them through the chat template.

    Args:
        render: puts a row through the chat template.
        read_images: reads the images of a row as stored, for a vision-language model.

    Raises:
        DataError: names every unusable row.
        TokenizerError: for a template that does not terminate.
    """
    rows, columns = open_rows(source, FIRST_BYTES), named_columns(reader.cfg)
    most = min(len(rows), FIRST_ROWS if render is None else FIRST_RENDERED)
    path = Path(source.path)
    found = FirstRows(are_all=most == len(rows) and not (path.is_file() and path.stat().st_size > FIRST_BYTES))
    problems = []
    for i in range(most):
        try:
            row = reader.read(rows, i, source.name)
            found.idle.update(unused_columns(row, reader.cfg, read_images is not None, reader.margins))
            for setting, key in columns.items():
                if value_at(rows[i] if setting == "images_key" else row, key) is not None:
                    found.named.add(setting)
            if read_images is not None:
                read_images(rows[i])
            if render is not None:
                render(row)
        except TokenizerError as error:  # every other row would fail alike
            raise TokenizerError(f"{rows.where(i)}: {error}") from None
        except ValueError as error:
            problems.append((rows.where(i), str(error)))
    raise_for(problems)
    return found
