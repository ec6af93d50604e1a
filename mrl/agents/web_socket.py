"""Client of a WebSocket (RFC 6455) for text messages, whose methods block. Standard library only: workers start with
it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
import struct
from contextlib import suppress
from urllib.parse import urlsplit

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of the RFC, for every handshake
MAX_HEAD_BYTES, MAX_MESSAGE_BYTES = 1 << 16, 64 << 20
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
CLOSE_S = 1.0


class WebSocketError(OSError):
    """The peer has closed the connection, or does not speak the protocol."""


class WebSocket:
    """Connection to a server at ws://host:port/path or wss://...

    timeout_s: limit for the connection and for each wait for bytes
    Raises OSError, also in each method, if the server does not answer or closes the connection.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or parts.hostname is None:
            raise WebSocketError(f"{url!r} is not an address such as ws://host:port")
        is_secret = parts.scheme == "wss"
        self._socket = socket.create_connection((parts.hostname, parts.port or (443 if is_secret else 80)), timeout_s)
        self._received = bytearray()
        try:
            if is_secret:
                secured = ssl.create_default_context()
                self._socket = secured.wrap_socket(self._socket, server_hostname=parts.hostname)
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            self._shake_hands(parts.netloc.rpartition("@")[2], path)
        except BaseException:
            self._socket.close()
            raise

    def send(self, text: str) -> None:
        """Sends a message."""
        self._send(TEXT, text.encode())

    def receive(self) -> str:
        """Returns the next message."""
        message, is_text = bytearray(), False
        while True:
            is_last, kind, content = self._frame(MAX_MESSAGE_BYTES - len(message))
            if kind == PING:
                self._send(PONG, content)
            elif kind == CLOSE:
                reason = content[2:].decode(errors="replace")
                raise WebSocketError(f"the server has closed the connection{reason and f': {reason}'}")
            elif kind == BINARY or kind == (TEXT if is_text else CONTINUATION):
                raise WebSocketError("the server sent other frames than those of a text message")
            elif kind in (TEXT, CONTINUATION):
                message += content
                is_text = True
                if is_last:
                    return message.decode()

    def close(self) -> None:
        """Says so to the server, and closes the connection."""
        with suppress(OSError):
            self._socket.settimeout(CLOSE_S)
            self._send(CLOSE, struct.pack("!H", 1000))
        self._socket.close()

    def _shake_hands(self, host: str, path: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > MAX_HEAD_BYTES:
                raise WebSocketError(f"the answer's head has more than {MAX_HEAD_BYTES} bytes")
            self._fill()
        status, *headers = self._received[:end].decode("latin-1").split("\r\n")
        del self._received[: end + 4]
        named = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in headers)}
        wanted = base64.b64encode(hashlib.sha1(f"{key}{GUID}".encode(), usedforsecurity=False).digest()).decode()
        if status.split(" ")[1:2] != ["101"] or named.get("sec-websocket-accept") != wanted:
            raise WebSocketError(f"no WebSocket: the server answered {status[:200]!r}")

    def _send(self, kind: int, content: bytes) -> None:
        """Sends one frame, masked as clients must."""
        size, mask = len(content), os.urandom(4)
        head = bytes([0x80 | kind])
        if size < 126:
            head += bytes([0x80 | size])
        else:
            head += struct.pack("!BH", 0x80 | 126, size) if size < 1 << 16 else struct.pack("!BQ", 0x80 | 127, size)
        key = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(content, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")
        self._socket.sendall(head + mask + masked)

    def _frame(self, most: int) -> tuple[bool, int, bytes]:
        """Returns (is the last of its message, kind, content) of the next frame."""
        first, second = self._take(2)
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(self._take(2 if size == 126 else 8), "big")
        if second & 0x80 or first & 0x70:
            raise WebSocketError("the server sent a frame that is masked, or of an extension")
        if size > most:
            raise WebSocketError(f"the server sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        return bool(first & 0x80), first & 0x0F, self._take(size)

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            self._fill()
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _fill(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise WebSocketError("the server has closed the connection")
        self._received += data
