"""Another account of this machine, without any secret: finds the engines of a run and attacks their ports.

    python tests/worlds/stranger.py MODEL FOREIGN SECONDS RESULT      (as root it becomes user 12345 first)

It knows what any account can read: command lines in /proc, which name MODEL, the directory that the engines loaded.
FOREIGN has other weights of the same shape. RESULT gets {attack: {outcome: count}} as JSON; the engines are asked to
write to RESULT.written.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - of connections: the stranger may not be able to read Python's library
import http.client
import json
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

STRANGER = 12345
PAUSE_S = 0.02  # pause between attacks, which leaves the processor to the run
HALF_OPEN = 50

Found = dict[str, Counter[str]]
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "generate": ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 64}}),
    "weights": ("/update_weights_from_disk", {"model_path": "{foreign}", "weight_version": "1", "flush_cache": True}),
    "begin": ("/begin_weight_update", {"selector": "all"}),
    "version": ("/update_weight_version", {"new_version": "evil", "abort_all_requests": True}),
    "flush": ("/flush_cache", {}),
    "abort": ("/abort_request", {"rid": "", "abort_all": True}),
    "pause": ("/pause_generation", {"mode": "abort"}),
    "logging": ("/configure_logging", {"dump_requests_folder": "{folder}", "dump_requests_threshold": 1}),
    "profile": ("/start_profile", {"output_dir": "{folder}"}),
    "health": ("/health_generate", {}),
}


def become_a_stranger() -> None:
    """Changes to another account if this is root; otherwise the process keeps its account, without the key."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)


def engine_ports(model: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            # a forked engine sets its title, with spaces between the arguments
            line = Path("/proc", entry, "cmdline").read_text(errors="replace").replace("\0", " ").split()
            if "--port" in line and model in line:
                found.append(int(line[line.index("--port") + 1]))
    return sorted(set(found))


def ask(port: int, path: str, body: dict[str, object], headers: dict[str, str]) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        method = "GET" if path == "/health_generate" else "POST"
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json", **headers})
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def junk(port: int, data: bytes) -> str:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(data)
            return "sent"
    except OSError as error:
        return type(error).__name__


def attacks(foreign: str, folder: str, held: list[socket.socket]) -> dict[str, Callable[[int], str]]:
    def request(path: str, body: dict[str, object], headers: dict[str, str]) -> Callable[[int], str]:
        text = json.dumps(body).replace("{foreign}", foreign).replace("{folder}", folder)
        return lambda port: ask(port, path, json.loads(text), headers)

    def half_open(port: int) -> str:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            held[-1].sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 1000000\r\n")
        if len(held) > HALF_OPEN:
            held.pop(0).close()
        return "held"

    found = {name: request(path, body, {}) for name, (path, body) in REQUESTS.items()}
    found["wrong key"] = request(*REQUESTS["weights"], {"Authorization": "Bearer 0"})
    found["key of no ascii"] = request(*REQUESTS["weights"], {"Authorization": "Bearer \xe9"})
    found["host"] = request(*REQUESTS["weights"], {"Host": "x/health?"})
    found["junk"] = lambda port: junk(port, os.urandom(2000))
    found["junk length"] = lambda port: junk(port, b"POST /generate HTTP/1.1\r\nContent-Length: many\r\n\r\n")
    return found | {"half open": half_open}


def flood(port: int, seconds: float, idle: int) -> dict[str, int]:
    """Opens `idle` connections to an endpoint that needs a key and keeps them open. Sends slow bytes, heads without an
    end, large bodies and wrong keys. Returns the answers by count, and the largest number of open connections."""
    counts: Counter[str] = Counter()
    held: list[socket.socket] = []
    end = time.monotonic() + seconds
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer guessed\r\n"

    def sent(*parts: bytes) -> None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                for part in parts:
                    connection.sendall(part)
                counts[connection.recv(100).partition(b" ")[2][:3].decode() or "closed"] += 1
        except OSError as error:
            counts[type(error).__name__] += 1

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    while time.monotonic() < end:
        for _ in range(idle - len(held)):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        counts["held"] = max(counts["held"], len(held))
        for number, connection in enumerate([*held]):
            try:
                if number % 2:
                    connection.send(b"x")  # one byte at a time
                connection.setblocking(False)
                if not connection.recv(1):
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                counts["dropped"] += 1
                held.remove(connection)
                connection.close()
        sent(head + b"Content-Length: 2\r\n\r\n{}")
        sent(head + b"Content-Length: 50000000\r\n\r\n", b"x" * 50_000_000)
        sent(head + b"X: " + b"x" * 10_000_000)
        sent(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        sent(os.urandom(2000) + b"\r\n\r\n")
        time.sleep(PAUSE_S)
    return counts


def main() -> None:
    model, foreign, seconds, result = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
    with open(result, "w") as file:
        become_a_stranger()
        json.dump(hammer(model, foreign, seconds, f"{result}.written"), file)


def hammer(model: str, foreign: str, seconds: float, folder: str) -> Found:
    counts: Found = defaultdict(Counter)
    held: list[socket.socket] = []
    end, told = time.monotonic() + seconds, []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    while time.monotonic() < end and not told:
        ports = engine_ports(model)
        for name, attack in attacks(foreign, folder, held).items():
            for port in ports:
                counts[name][attack(port)] += 1
            time.sleep(PAUSE_S)
    return counts


if __name__ == "__main__":
    main()
