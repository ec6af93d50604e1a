"""An answer on its way in: as it was sent, whole, and no longer than an answer can be."""

from __future__ import annotations

import httpx

from mrl.rollout.errors import BadAnswer

PLAIN = {"Accept-Encoding": "identity"}  # of every request
MOST_BYTES = 256 << 20  # of an answer that is no samples; the longest has a hash of every parameter
AS_IT_IS = ("", "identity")


class Incoming:
    """Of a reply that is streamed. Raises BadAnswer where it comes in another form than was asked for: a few bytes of
    a compressed one may be more than the memory holds."""

    def __init__(self, reply: httpx.Response, most: int) -> None:
        if (encoding := reply.headers.get("content-encoding", "")) not in AS_IT_IS:
            raise BadAnswer(f"the answer comes as {encoding!r:.40}, and was asked for as it is")
        self._reply, self._most, self._size = reply, most, 0
        self._parts: list[bytes] = []

    def take(self, part: bytes) -> None:
        """Raises BadAnswer for what is more than `most` bytes with all before it."""
        self._size += len(part)
        if self._size > self._most:
            raise BadAnswer(f"the answer has more than {self._most} bytes, which nothing that was asked for has")
        self._parts.append(part)

    def whole(self) -> httpx.Response:
        kind = {"Content-Type": self._reply.headers.get("content-type", "")}
        return httpx.Response(self._reply.status_code, headers=kind, content=b"".join(self._parts))
