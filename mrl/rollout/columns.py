"""The long lists of an engine's answer, read without an object a token.

Token ids and [log-prob, token, null] are nearly all bytes of an answer. `cut` takes these lists out of the text, and
Arrow reads them, outside the interpreter's lock, to the same numbers as a JSON reader. Only what has exactly this form
is read here; everything else is for those who read it object by object, and say what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

IDS, PAIRS = b'"output_ids":', b'"output_token_logprobs":'
LINES, CELLS = bytes.maketrans(b",", b"\n"), bytes.maketrans(b"[]", b",\n")


@dataclass(frozen=True)
class Tokens:
    """Of one response: ids [n] int64, log_probs [n] float64."""

    ids: np.ndarray
    log_probs: np.ndarray


def cut(content: bytes) -> tuple[bytes, list[Tokens]] | None:
    """JSON with these lists emptied, and what they held, in order; None where they have another form, or differ in
    their ids."""
    pieces: list[bytes] = []
    ids: list[bytes] = []
    pairs: list[bytes] = []
    end = 0
    found = {key: content.find(key) for key in (IDS, PAIRS)}
    while any(place >= 0 for place in found.values()):
        key = min((key for key in found if found[key] >= 0), key=found.__getitem__)
        opening, closing = (b"[", b"]") if key == IDS else (b"[[", b"]]")
        begin = found[key] + len(key)
        begin += content[begin : begin + 1] == b" "
        pieces += [content[end:begin], b"[]"]
        end = content.find(closing, begin)
        if content[begin : begin + len(opening)] != opening or end < 0:
            return None
        (ids if key == IDS else pairs).append(content[begin + len(opening) : end])
        end += len(closing)
        found = {key: content.find(key, end) if place < end else place for key, place in found.items()}
    if len(ids) != len(pairs):
        return None
    tokens = [_read(*texts) for texts in zip(ids, pairs)]
    read = [each for each in tokens if each is not None]
    return (b"".join([*pieces, content[end:]]), read) if len(read) == len(ids) else None


def _read(ids: bytes, pairs: bytes) -> Tokens | None:
    """ids: `1,2`. pairs: `-0.5,1,null],[-0.25,2,null`, which become the rows `,,-0.5,1,null` and `,,-0.25,2,null`."""
    (alone,) = _columns(ids.translate(LINES, b" "), {"id": "int64"}, ("id",)) or (None,)
    columns = {"": "string", "[": "string", "log_prob": "float64", "id": "int64", "nothing": "null"}
    both = _columns(b",," + pairs.translate(CELLS, b" "), columns, ("log_prob", "id", "nothing"))
    if alone is None or both is None or not np.array_equal(alone, both[1]):
        return None
    return Tokens(alone, both[0])


def _columns(text: bytes, columns: dict[str, str], wanted: tuple[str, ...]) -> list[np.ndarray] | None:
    """The columns of these types that are wanted and not null; None unless every row has all of them."""
    arrow, csv = _arrow()
    try:
        table = csv.read_csv(
            arrow.py_buffer(text),
            csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=list(columns)),
            csv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=columns, include_columns=wanted, null_values=["null"], check_utf8=False),
        )
    except arrow.ArrowException:
        return None
    numbers = [column for column in table.columns if not arrow.types.is_null(column.type)]
    return None if any(column.null_count for column in numbers) else [column.to_numpy() for column in numbers]


@cache
def _arrow() -> tuple[Any, Any]:
    """Importing it takes longer than a small run's answers."""
    import pyarrow
    from pyarrow import csv

    return pyarrow, csv
