"""Credentials of a run's engines, and the check which account listens on a port before the key is sent there.

The check asks the kernel about the port (NETLINK_SOCK_DIAG, sock_diag(7)), which takes 0.06 ms for each request. If
that is not possible it reads the tables of /proc/net, which hold every connection of the machine and take about 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from mrl.inference.errors import EngineError
from mrl.ports import HERE, is_here

EVERYWHERE = (bytes(4), bytes(16))
ADDRESS_BYTES = {socket.AF_INET: 4, socket.AF_INET6: 16}

# of linux/netlink.h, sock_diag.h, inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP = 4, 20, 0x301
NLMSG_ERROR, NLMSG_DONE, HEADER_BYTES = 2, 3, 16
TCP_LISTEN = 10
ANSWER_S = 1.0


@dataclass(frozen=True)
class Listener:
    """A listening socket. user: the account that opened it."""

    user: int
    inode: str

    def is_held_by(self, pid: int) -> bool:
        """Returns True if process `pid`, one of ours, or a descendant of it holds the socket."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            return any(self._is_open_in(process.pid) for process in (root, *root.children(recursive=True)))
        return False

    def _is_open_in(self, pid: int) -> bool:
        with contextlib.suppress(OSError):  # it has just ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) == f"socket:[{self.inode}]":
                        return True
        return False


def listeners(port: int, host: str = HERE) -> list[Listener]:
    """Returns the sockets that accept connections to `host`:`port`, an IPv4 address of this machine."""
    found: dict[bytes, list[Listener]] = {}
    try:
        entries = list(_ask(port))
    except OSError:  # a kernel without it, or a container that may not ask
        entries = list(_read_tables(port))
    for address, listener in entries:
        found.setdefault(address, []).append(listener)
    forms = (socket.inet_pton(socket.AF_INET, host), socket.inet_pton(socket.AF_INET6, f"::ffff:{host}"))
    exact = [one for address in forms for one in found.get(address, [])]
    return exact or [one for address in EVERYWHERE for one in found.get(address, [])]


def _ask(port: int) -> Iterator[tuple[bytes, Listener]]:
    """Yields (address, listener) of all sockets that listen on the port. Raises OSError if the kernel refuses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_S)
        for family, size in ADDRESS_BYTES.items():
            wanted = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, 1 << TCP_LISTEN)
            wanted += struct.pack("!H46x", port)  # the local port; every address, peer and interface
            length = HEADER_BYTES + len(wanted)
            kernel.send(struct.pack("=IHHII", length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 0, 0) + wanted)
            for message in _messages(kernel):
                user, inode = struct.unpack_from("=II", message, 64)
                yield message[8 : 8 + size], Listener(user, str(inode))


def _messages(kernel: socket.socket) -> Iterator[bytes]:
    while True:
        left = kernel.recv(1 << 16)
        while left:
            length, kind = struct.unpack_from("=IH", left)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                raise OSError(-struct.unpack_from("=i", left, HEADER_BYTES)[0], "sock_diag")
            yield left[HEADER_BYTES:length]
            left = left[(length + 3) & ~3 :]


def _read_tables(port: int) -> Iterator[tuple[bytes, Listener]]:
    """Yields the same as `_ask`, from /proc/net."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                column = line.split()
                (local, number), state, user, inode = column[1].split(":"), column[3], column[7], column[9]
                if int(state, 16) == TCP_LISTEN and int(number, 16) == port:
                    words = struct.iter_unpack("!I", bytes.fromhex(local))  # each as a number of the machine's own
                    yield b"".join(struct.pack("=I", word) for (word,) in words), Listener(int(user), inode)


@dataclass(frozen=True)
class Access:
    """Credentials of the engines of a run, the same for all of them.

    api_key: sent with every request; None for engines without a key
    ours: mrl started them, so a process of another account on their port is not an engine
    """

    api_key: str | None = field(default=None, repr=False)
    ours: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def check(self, url: str, endpoint: str) -> None:
        """Called before each request: raises EngineError if another account's process has taken the engine's port."""
        parts = urlsplit(url)
        host = parts.hostname or HERE
        if not self.ours or not is_here(host):
            return
        for listener in listeners(parts.port or 0, host):
            if listener.user != os.geteuid():
                text = f"not asked: a process of user {listener.user} listens there, it is no engine of this run"
                raise EngineError(url, endpoint, None, text)


OPEN = Access()


@cache
def tls() -> ssl.SSLContext:
    """Returns the TLS context of all connections. Reading the certificates takes 20 ms and 1 MiB, so a process does it
    once."""
    return httpx.create_ssl_context(trust_env=False)
