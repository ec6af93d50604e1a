"""Check of the first rows of a source, read as a run reads them, before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mrl.config.schema import SourceConfig
from mrl.data.columns import unused_columns
from mrl.data.errors import raise_for
from mrl.data.rows import Reader, Row
from mrl.data.sources import open_rows
from mrl.data.tokenizer import TokenizerError

FIRST_ROWS, FIRST_RENDERED, FIRST_BYTES = 20_000, 200, 32 << 20


def check_first_rows(
    source: SourceConfig,
    reader: Reader,
    render: Callable[[Row], object] | None = None,
    read_images: Callable[[Row], object] | None = None,
) -> Counter[tuple[str, str]]:
    """Reads the first rows; with `render`, puts a smaller number of them through the chat template.

    Args:
        render: puts a row through the chat template.
        read_images: reads the images of a row as stored, for a vision-language model.

    Returns:
        The number of rows in which a column has no effect, by (column, why).

    Raises:
        DataError: names every unusable row.
        TokenizerError: for a template that does not terminate.
    """
    rows, found = open_rows(source, FIRST_BYTES), Counter[tuple[str, str]]()
    problems = []
    for i in range(min(len(rows), FIRST_ROWS if render is None else FIRST_RENDERED)):
        try:
            row = reader.read(rows, i, source.name)
            found.update(unused_columns(row, reader.cfg, read_images is not None, reader.margins))
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
