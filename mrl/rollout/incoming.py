"""Body of an HTTP answer as it arrives: uncompressed, and no longer than a valid answer can be."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.rollout.errors import BadAnswer

PLAIN = {"Accept-Encoding": "identity"}  # of every request
MOST_BYTES = 256 << 20  # of an answer without samples; the longest has a hash of every parameter
AS_IT_IS = ("", "identity")


class Incoming:
    """Collects the parts of an answer's body. Raises BadAnswer for a compressed one: a few of its bytes may be more
    than the memory holds.

    headers: of the answer, by case-insensitive name
    """

    def __init__(self, headers: Mapping[str, str], most: int) -> None:
        if (encoding := headers.get("content-encoding", "")) not in AS_IT_IS:
            raise BadAnswer(f"the answer comes as {encoding!r:.40}, and was asked for as it is")
        self._most, self._size = most, 0
        self._parts: list[bytes] = []

    def take(self, part: bytes) -> None:
        """Adds a part; raises BadAnswer if there are more than `most` bytes then."""
        self._size += len(part)
        if self._size > self._most:
            raise BadAnswer(f"the answer has more than {self._most} bytes, which nothing that was asked for has")
        self._parts.append(part)

    @property
    def content(self) -> bytes:
        return b"".join(self._parts)
