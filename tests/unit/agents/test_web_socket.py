"""The client of WebSockets, against bytes that a server may send."""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from mrl.agents.web_socket import GUID, WebSocket, WebSocketError


def frame(kind: int, content: bytes, *, is_last: bool = True, bits: int = 0) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 126 else struct.pack("!BH", 126, size) if size < 65536 else b""
    return bytes([0x80 * is_last | bits | kind]) + (length or struct.pack("!BQ", 127, size)) + content


@contextmanager
def server(sent: bytes, status: str = "101 Switching Protocols") -> Iterator[tuple[str, bytearray]]:
    """A server that answers a handshake, sends these bytes, and keeps what it receives."""
    received = bytearray()

    def answer() -> None:
        with listener.accept()[0] as peer:
            head = b""
            while b"\r\n\r\n" not in head:
                head += peer.recv(1 << 16)
            [key] = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key")]
            accept = base64.b64encode(hashlib.sha1(key + GUID.encode()).digest())
            lines = [f"HTTP/1.1 {status}".encode(), b"sec-websocket-accept: " + accept, b"", b""]
            peer.sendall(b"\r\n".join(lines) + sent)
            while data := peer.recv(1 << 16):
                received.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/a?b=c", received
        thread.join(10)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 70_000])
def test_messages_of_any_size_come_whole_in_any_number_of_frames(size: int) -> None:
    text = ("\u00e9x" * size)[:size]
    data = text.encode()
    parts = [frame(1, data[: size // 2], is_last=False), frame(9, b"?"), frame(0, data[size // 2 :])]
    with server(frame(1, data) + b"".join(parts)) as (url, received):
        with closing(WebSocket(url, 10.0)) as made:
            assert made.receive() == made.receive() == text
            made.send(text)
    pong, rest = bytes(received[:7]), received[7:]
    assert pong[:2] == b"\x8a\x81" and pong[6] ^ pong[2] == ord("?"), "a ping is answered with its content"
    at = {126: 4, 127: 10}.get(rest[1] & 0x7F, 2)
    mask, masked = rest[at : at + 4], rest[at + 4 : at + 4 + len(data)]
    assert rest[0] == 0x81 and bytes(byte ^ mask[i % 4] for i, byte in enumerate(masked)) == data


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (frame(8, struct.pack("!H", 1013) + b"full"), "closed the connection: full"),
        (frame(8, b""), "closed the connection$"),
        (frame(2, b"x"), "other frames"),
        (frame(0, b"x"), "other frames"),
        (frame(1, b"x", is_last=False) + frame(1, b"y"), "other frames"),
        (frame(1, b"x", bits=0x40), "of an extension"),
        (bytes([0x81, 0x81, 1, 2, 3, 4, 5]), "masked"),
        (bytes([0x81, 127]) + struct.pack("!Q", 1 << 40), "more than"),
    ],
)
def test_what_is_no_text_message_is_refused(sent: bytes, said: str) -> None:
    with server(sent) as (url, _):
        with closing(WebSocket(url, 10.0)) as made, pytest.raises(WebSocketError, match=said):
            made.receive()


def test_a_server_without_websockets_is_named() -> None:
    with server(b"", "404 Not Found") as (url, _), pytest.raises(WebSocketError, match="answered 'HTTP/1.1 404 Not"):
        WebSocket(url, 10.0)
    with pytest.raises(WebSocketError, match="not an address"):
        WebSocket("http://127.0.0.1:1", 1.0)
