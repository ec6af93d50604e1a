"""Dispatch of generation requests to the servers: one HTTP request per sample, to the server with the fewest running.

Everything happens in one thread. While an engine gets its weights the event loop stands still; the servers do not, and
their answers wait in the sockets.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import aiohttp
import orjson

from mrl.core import Request, Sample, SamplingParams
from mrl.rollout.access import tls
from mrl.rollout.answers import error_message
from mrl.rollout.client import CONNECT_TIMEOUT_S
from mrl.rollout.errors import BadAnswer, EngineError, Refused, RolloutError, ServerLost
from mrl.rollout.fleet import Fleet
from mrl.rollout.incoming import PLAIN, Incoming
from mrl.rollout.protocol import GENERATE, GenerateBody
from mrl.rollout.samples import Expected, generate_body, most_bytes, prefill_body, read_answer
from mrl.rollout.server import Server

MOST_TOGETHER = 32  # requests of one prompt that go to one server together
LARGE_BYTES = 1 << 18  # of an answer that is read in a thread of its own
WATCH_S = 0.25  # between looks at the engine processes
ABORT_TIMEOUT_S = 5.0

OnSamples = Callable[[list[Sample]], None]


@dataclass(eq=False)
class _Together:
    """Requests of one prompt. They go to one server, as long as it lives, which prefills the prompt once."""

    requests: Sequence[Request]
    server: Server | None = None
    life: int = 0
    prefill: asyncio.Future[None] | None = None


class Flight:
    """Requests in flight over the servers of a fleet, those of one call or as they come.

    A server of ours that dies or lets a request time out is started again, as often as `Restarts` allows; its
    unfinished requests, seeds and all, go to whichever server is up.

    looks_after: False: servers are somebody else's to look after; one that is lost is raised as ServerLost
    """

    def __init__(
        self,
        fleet: Fleet,
        sampling: SamplingParams,
        expected: Expected,
        on_samples: OnSamples | None,
        concurrent_requests: int,
        request_timeout_s: float,
        adapter: str | None = None,
        *,
        looks_after: bool = True,
    ) -> None:
        self._adapter, self._looks_after = adapter, looks_after
        self._fleet, self._sampling, self._expected, self._on_samples = fleet, sampling, expected, on_samples
        self._concurrent_requests, self._request_timeout_s = concurrent_requests, request_timeout_s
        self._running: dict[Server, set[asyncio.Future[Any]]] = defaultdict(set)
        self._restarting: set[asyncio.Task[None]] = set()
        self._unfinished = self._waiting = 0

    async def run(self, requests: Sequence[Request]) -> list[Sample]:
        """Returns finished samples in the order in which they end. Raises RolloutError, or what `on_samples` raises."""
        samples: list[Sample] = []
        on_samples = self._on_samples

        def finished(some: list[Sample]) -> None:
            nonlocal samples
            samples += some
            if on_samples is not None:
                on_samples(some)

        self._fleet.forget_losses()
        self._on_samples = finished
        await self._fly(_once(requests), len(requests))
        return samples

    async def follow(self, fed: AsyncIterator[Sequence[Request]], together: int) -> None:
        """Sends requests as they come, spread over the servers as `run` would spread `together` of them, and returns
        when there are no more and all have finished. Raises as `run`; and ServerLost, if this flight does not look
        after servers."""
        await self._fly(fed, together)

    async def _fly(self, fed: AsyncIterator[Sequence[Request]], together: int) -> None:
        servers = max(1, len(self._fleet.servers))
        most = max(1, min(MOST_TOGETHER, together // servers, self._concurrent_requests // servers))
        self._slots = asyncio.Semaphore(max(1, self._concurrent_requests))
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, ssl=tls()),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                    headers=self._fleet.access.headers | PLAIN | {"Content-Type": "application/json"},
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    trust_env=False,
                ) as self._http,
                asyncio.TaskGroup() as self._tasks,
            ):
                self._watcher = self._tasks.create_task(self._watch())
                self._unfinished = 1  # as long as more may come
                async for requests in fed:
                    self._unfinished += len(requests)
                    self._waiting += len(requests)
                    self._fleet.waiting.begin(len(requests))
                    for part in _by_prompt(requests, most):
                        for request in part.requests:
                            self._tasks.create_task(self._finish(request, part))
                self._one_less()
        except BaseExceptionGroup as failed:
            self._abort_running()
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        except BaseException:
            self._abort_running()
            raise
        finally:
            self._begin(self._waiting)

    def _begin(self, requests: int) -> None:
        """So many do not wait here any longer."""
        self._waiting -= requests
        self._fleet.waiting.end(requests)

    # ---- requests

    async def _finish(self, request: Request, part: _Together) -> None:
        async with self._slots:
            self._begin(1)
            while (sample := await self._attempt(request, part)) is None:
                pass
        if self._on_samples is not None:
            self._on_samples([sample])
        self._one_less()

    def _one_less(self) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self._watcher.cancel()

    async def _attempt(self, request: Request, part: _Together) -> Sample | None:
        """Returns None if the server was lost over it."""
        server = await self._server(part)
        life = server.life
        if not self._looks_after and not server.has_weights:  # another life than the one that this flight began with
            raise ServerLost(server.url, life - 1, server.asleep() or "")
        self._fleet.access.check(server.url, GENERATE.name)
        task = asyncio.ensure_future(self._generate(server, request, part))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
        self._running[server].add(task)
        server.meter.begin(1)
        sample: Sample | None = None
        try:
            await self._wait_for(task)
            sample = None if task.cancelled() else task.result()
            return sample
        except (aiohttp.ClientError, OSError, BadAnswer) as error:  # TimeoutError is an OSError
            await self._judge(server, life, request, error)
            return None
        finally:
            task.cancel()
            self._running[server].discard(task)
            server.meter.end(1, [sample] if sample is not None else ())

    async def _wait_for(self, task: asyncio.Future[Sample]) -> None:
        """Raises TimeoutError after rollout.request_timeout_s, without the time in which engines were given weights."""
        stalled, left = self._fleet.stall.seconds, self._request_timeout_s
        while left > 0:
            done, _ = await asyncio.wait([task], timeout=left)
            if done:
                return
            before, stalled = stalled, self._fleet.stall.seconds
            left = stalled - before
        raise TimeoutError(f"no whole answer in {self._request_timeout_s:g} s")

    async def _server(self, part: _Together) -> Server:
        server = part.server
        if server is None or not server.up or server.life != part.life:
            server = part.server = await self._least_loaded()
            part.life, part.prefill = server.life, None
        return server

    async def _generate(self, server: Server, request: Request, part: _Together) -> Sample:
        asks = self._expected.routed is not None
        if server.url in self._fleet.prefix_caches and not asks:
            if part.prefill is None:
                part.prefill = asyncio.ensure_future(self._prefill(server.url, part.requests))
            await asyncio.shield(part.prefill)  # others wait for it too
        body = generate_body(request, self._sampling, self._adapter, experts=asks)
        content = await self._post(server.url, body, most_bytes(request, self._expected))
        if len(content) < LARGE_BYTES:
            return read_answer(request, content, self._expected, body["rid"])
        return await asyncio.to_thread(read_answer, request, content, self._expected, body["rid"])

    async def _prefill(self, url: str, requests: Sequence[Request]) -> None:
        body = prefill_body(requests, self._sampling, self._adapter)
        if body is not None:
            await self._post(url, body, most_bytes(requests[0], self._expected))

    async def _post(self, url: str, body: GenerateBody, most: int) -> bytes:
        """Returns the content of an answer; raises Refused or BadAnswer for one that is an error."""
        data = orjson.dumps(body)
        try:
            status, content = await self._send(url, data, most)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError):  # a kept connection that the server had closed
            status, content = await self._send(url, data, most)
        if status != 200:
            kind = Refused if 400 <= status < 500 else BadAnswer
            raise kind(f"HTTP {status}: {error_message(content)}")
        return content

    async def _send(self, url: str, data: bytes, most: int) -> tuple[int, bytes]:
        async with self._http.post(f"{url}{GENERATE.path}", data=data, allow_redirects=False) as reply:
            incoming = Incoming(reply.headers, most)
            async for part in reply.content.iter_any():
                incoming.take(part)
            return reply.status, incoming.content

    async def _least_loaded(self) -> Server:
        while (server := self._fleet.least_loaded()) is None:
            if self._restarting:
                await asyncio.wait(self._restarting, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(WATCH_S)  # for one to come, as long as `_watch` allows
        return server

    async def _judge(self, server: Server, life: int, request: Request, error: Exception) -> None:
        """Returns if the request is to be sent again; raises RolloutError if it failed for good."""
        if not isinstance(error, (TimeoutError, Refused)):
            await server.ends_soon()
        if not server.up or server.life != life:
            if not self._looks_after:
                raise ServerLost(server.url, life, str(error)) from error
            return
        problem = self._explain(server, request, error)
        if server.has_ended or not isinstance(error, BadAnswer):
            self._lose(server, problem)
        else:
            raise problem from error

    def _explain(self, server: Server, request: Request, error: Exception) -> RolloutError:
        name = f"sample {request.sample_id} (data row {request.prompt.index})"
        if server.has_ended:
            return RolloutError(f"engine died during generation of {name}: {server.obituary().strip()}")
        tail = f"\n{server.obituary()}" if server.process is not None and not isinstance(error, Refused) else ""
        if isinstance(error, TimeoutError):
            limit = f"rollout.request_timeout_s = {self._request_timeout_s:g} s"
            return RolloutError(f"engine {server.url}: no answer for {name} within {limit}{tail}")
        if not isinstance(error, BadAnswer):
            error = RuntimeError(f"connection lost ({type(error).__name__}: {error})")
        return RolloutError(f"engine {server.url}: {GENERATE.path} failed for {name}: {error}{tail}")

    # ---- servers

    async def _watch(self) -> None:
        """A broken server need not break its connections. Takes in those that come."""
        while True:
            if self._looks_after:
                self._fleet.check_alone()
                for server in self._fleet.admit():
                    self._bring(self._fleet.bring_in(server))
            await asyncio.sleep(WATCH_S)
            for server in self._fleet.servers:
                if server.up and server.has_ended:
                    self._lose(server, RolloutError(f"engine died during generation: {server.obituary().strip()}"))

    def _lose(self, server: Server, error: RolloutError) -> None:
        """Raises `error` if the server cannot be started again, and has not left with its node."""
        if not self._looks_after:
            raise ServerLost(server.url, server.life, str(error)) from error
        has_left = self._fleet.is_left_by(server)
        if not has_left:
            self._fleet.lose(server, error)
        for task in self._running[server]:
            task.cancel()
        if not has_left:
            self._bring(self._fleet.bring_back(server))

    def _bring(self, coming: Coroutine[Any, Any, None]) -> None:
        """Of a server that will be up."""
        task = self._tasks.create_task(coming)
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    def _abort_running(self) -> None:
        for server in self._fleet.servers:
            if server.up and not server.has_ended:
                with closing(self._fleet.client(server.url, ABORT_TIMEOUT_S)) as client:
                    with suppress(EngineError):  # the error that brought us here is the one to report
                        client.abort_all()


async def _once(requests: Sequence[Request]) -> AsyncIterator[Sequence[Request]]:
    yield requests


def _by_prompt(requests: Sequence[Request], most: int) -> Iterator[_Together]:
    """Consecutive requests of one prompt, at most `most` of them together."""
    for _, group in groupby(requests, key=lambda request: id(request.prompt)):
        same = list(group)
        for first in range(0, len(same), most):
            yield _Together(same[first : first + most])
