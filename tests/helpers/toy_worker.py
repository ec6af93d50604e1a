"""A worker for tests of worker pools. It does what each message says, in an event loop as the agents' workers have."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

from mrl.workers.child import PoolConnection


def load(setup: dict[str, Any]) -> str:
    if "wrong" in setup:
        raise LookupError(setup["wrong"])
    if "dies" in setup:
        os._exit(4)
    return str(setup["word"])


async def run(pool: PoolConnection, word: str) -> None:
    loop = asyncio.get_running_loop()

    def take(number: int, message: bytes) -> None:
        if message == b"hang":
            time.sleep(600)
        elif message == b"exit":
            os._exit(3)
        elif message == b"garbage":
            os.write(int(sys.argv[1]), b"\0\0\0\4nope")
        elif message != b"silent" and (message or number == 0):
            pool.send(number, {"word": word, "pid": os.getpid(), "bytes": len(message)})

    def listen() -> None:
        for number, message in pool.messages():
            loop.call_soon_threadsafe(take, number, message)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    connection = PoolConnection()
    asyncio.run(run(connection, connection.load(load, LookupError)))
