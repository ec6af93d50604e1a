"""One `Engine.generate` call: requests in flight over the servers, and what is done when a server is lost.

Everything happens in one thread. While an engine gets its weights the loop stands still; the servers do not, their
answers wait in the sockets.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import httpx

from mrl.core import Request, Sample, SamplingParams
from mrl.rollout.answers import BadAnswer, error_message, from_json
from mrl.rollout.client import CONNECT_TIMEOUT_S, EngineError
from mrl.rollout.errors import Refused, RolloutError
from mrl.rollout.process import EngineProcess, PortTaken
from mrl.rollout.wire import Expected, generate_body, read_samples

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

REQUESTS_A_CALL = 32  # several requests share an HTTP call: on small models a call costs far more than a token
WATCH_S = 0.25  # between looks at the engine processes
DEATH_WAIT_S = 3.0  # a connection breaks a moment before the process is seen to end

OnSample = Callable[[Sample], None]


@dataclass(eq=False)
class Server:
    """One engine. `life` counts its restarts, so that the failure of an earlier life is not taken for one of this."""

    url: str
    process: EngineProcess | None
    load: int = 0  # requests in flight
    life: int = 0
    up: bool = True
    posts: set[asyncio.Future[httpx.Response]] = field(default_factory=set)

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.exit_code() is not None

    def tail(self) -> str:
        return "" if self.process is None else f"\n{self.process.obituary()}"


class Flight:
    """Each call goes to the server with the least to do. A server of ours that dies or lets a request time out is
    started again, as often as `Restarts` allows; its unfinished calls, seeds and all, go to whichever server is up."""

    def __init__(self, engine: Engine, sampling: SamplingParams, on_sample: OnSample | None) -> None:
        self._engine, self._sampling, self._on_sample = engine, sampling, on_sample
        self._expected = Expected(engine.vocab_size, sampling.max_new_tokens, engine.weight_version)
        self._servers = [Server(url, engine.process_of(url)) for url in engine.urls]
        self._restarting: set[asyncio.Task[None]] = set()
        self._samples: list[Sample] = []

    async def run(self, requests: Sequence[Request]) -> list[Sample]:
        """Finished samples in the order of their ends. Raises RolloutError, or what `on_sample` raises."""
        size = self._call_size(len(requests))
        self._slots = asyncio.Semaphore(max(1, self._engine.concurrent_requests // size))
        calls = [requests[start : start + size] for start in range(0, len(requests), size)]
        self._unfinished = len(calls)
        limit = httpx.Timeout(self._engine.request_timeout_s, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None)
        try:
            async with (
                httpx.AsyncClient(
                    timeout=limit,
                    limits=limits,
                    headers=self._engine.access.headers,
                    trust_env=False,
                    verify=_tls(),
                ) as self._http,
                asyncio.TaskGroup() as self._tasks,
            ):
                self._watcher = self._tasks.create_task(self._watch())
                for call in calls:
                    self._tasks.create_task(self._finish(call))
        except BaseExceptionGroup as failed:
            self._abort_running()
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        except BaseException:
            self._abort_running()
            raise
        return self._samples

    def _call_size(self, requests: int) -> int:
        """Requests a call: no more than leaves every server busy, nor than may be in flight."""
        servers = len(self._servers)
        return max(1, min(REQUESTS_A_CALL, requests // servers, self._engine.concurrent_requests // servers))

    # ---- calls

    async def _finish(self, requests: Sequence[Request]) -> None:
        async with self._slots:
            while (samples := await self._attempt(requests)) is None:
                pass
        for sample in samples:
            self._samples.append(sample)
            if self._on_sample is not None:
                self._on_sample(sample)
        self._unfinished -= 1
        if not self._unfinished:
            self._watcher.cancel()

    async def _attempt(self, requests: Sequence[Request]) -> list[Sample] | None:
        """None if the server was lost over it."""
        server = await self._least_loaded()
        life = server.life
        body = generate_body(requests, self._sampling)
        self._engine.access.check(server.url, "generate")
        post = asyncio.ensure_future(self._http.post(f"{server.url}/generate", json=body))
        post.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
        server.posts.add(post)
        server.load += len(requests)
        try:
            limit = self._engine.request_timeout_s
            done, _ = await asyncio.wait([post], timeout=limit)
            if not done:  # it answers, byte by byte
                raise httpx.ReadTimeout(f"no whole answer in {limit:g} s")
            return None if post.cancelled() else self._read(requests, post.result())
        except (httpx.HTTPError, BadAnswer) as error:
            await self._judge(server, life, requests, error)
            return None
        finally:
            post.cancel()
            server.posts.discard(post)
            server.load -= len(requests)

    def _read(self, requests: Sequence[Request], reply: httpx.Response) -> list[Sample]:
        if reply.status_code != 200:
            kind = Refused if 400 <= reply.status_code < 500 else BadAnswer
            raise kind(f"HTTP {reply.status_code}: {error_message(reply.content)}")
        return read_samples(requests, from_json(reply.content), self._expected)

    async def _least_loaded(self) -> Server:
        while not (up := [server for server in self._servers if server.up]):
            await asyncio.wait(self._restarting, return_when=asyncio.FIRST_COMPLETED)
        return min(up, key=lambda server: server.load)

    async def _judge(self, server: Server, life: int, requests: Sequence[Request], error: Exception) -> None:
        """Returns if the requests are to be sent again; raises RolloutError if they failed for good."""
        if not isinstance(error, (httpx.TimeoutException, Refused)):
            await self._ends_soon(server)
        if not server.up or server.life != life:
            return
        problem = self._explain(server, requests, error)
        if server.has_ended or isinstance(error, httpx.TransportError):
            self._lose(server, problem)
        else:
            raise problem from error

    async def _ends_soon(self, server: Server) -> bool:
        """Whether the process behind a failure is gone, or is so in a moment."""
        end = asyncio.get_running_loop().time() + DEATH_WAIT_S
        while server.process and not server.has_ended and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        return server.has_ended

    def _explain(self, server: Server, requests: Sequence[Request], error: Exception) -> RolloutError:
        names = _names(requests)
        if server.has_ended:
            return RolloutError(f"engine died during generation of {names}: {server.tail().strip()}")
        if isinstance(error, httpx.TimeoutException):
            limit = f"rollout.request_timeout_s = {self._engine.request_timeout_s:g} s"
            return RolloutError(f"engine {server.url}: no answer for {names} within {limit}{server.tail()}")
        if isinstance(error, httpx.TransportError):
            error = RuntimeError(f"connection lost ({type(error).__name__}: {error})")
        tail = "" if isinstance(error, Refused) else server.tail()
        return RolloutError(f"engine {server.url}: /generate failed for {names}: {error}{tail}")

    # ---- servers

    async def _watch(self) -> None:
        """A broken server need not break its connections."""
        while True:
            await asyncio.sleep(WATCH_S)
            for server in self._servers:
                if server.up and server.has_ended:
                    error = RolloutError(f"engine died during generation: {server.tail().strip()}")
                    self._lose(server, error)

    def _lose(self, server: Server, error: RolloutError) -> None:
        """Raises `error` if the server cannot be started again."""
        if server.process is None:
            raise error
        self._engine.restarts.take(server.process, error)
        server.up = False
        for post in server.posts:
            post.cancel()
        task = self._tasks.create_task(self._bring_back(server, server.process))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _bring_back(self, server: Server, process: EngineProcess) -> None:
        while True:
            try:
                await self._engine.start_again(process)
                self._engine.restarts.give_weights(server.url)
                break
            except Exception as error:
                if isinstance(error, PortTaken) or not await self._ends_soon(server):
                    raise
                again = f"engine died again before it had its weights: {process.obituary()}"
                self._engine.restarts.take(process, RolloutError(again))
        server.life += 1
        server.up = True

    def _abort_running(self) -> None:
        for server in self._servers:
            if server.up and not server.has_ended:
                client = self._engine.client(server.url, timeout_s=5.0)
                with suppress(EngineError):  # the error that brought us here is the one to report
                    client.abort_all()
                client.close()


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes 20 ms: once a process, not once a rollout."""
    return httpx.create_ssl_context(trust_env=False)


def _names(requests: Sequence[Request]) -> str:
    first = requests[0]
    if len(requests) == 1:
        return f"sample {first.sample_id} (data row {first.prompt.index})"
    ids = ", ".join(str(request.sample_id) for request in requests)
    return f"samples {ids}"
