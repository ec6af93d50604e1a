"""Requests in flight over the servers, those of one call or as they come, and what is done when a server is lost.

Everything happens in one thread, but for the reading of answers, which is most of the work. While an engine gets its
weights the loop stands still; the servers do not, their answers wait in the sockets.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import closing, suppress
from typing import Any

import httpx

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

REQUESTS_A_CALL = 32  # several requests share an HTTP call: on small models a call costs far more than a token
WATCH_S = 0.25  # between looks at the engine processes
ABORT_TIMEOUT_S = 5.0

OnSamples = Callable[[list[Sample]], None]


class Flight:
    """Each call goes to the server with the least to do. A server of ours that dies or lets a request time out is
    started again, as often as `Restarts` allows; its unfinished calls, seeds and all, go to whichever server is up.

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
        self._posts: dict[Server, set[asyncio.Future[httpx.Response]]] = defaultdict(set)
        self._restarting: set[asyncio.Task[None]] = set()
        self._unfinished = self._waiting = 0

    async def run(self, requests: Sequence[Request]) -> list[Sample]:
        """Finished samples in the order of their ends. Raises RolloutError, or what `on_samples` raises."""
        samples: list[Sample] = []
        on_samples = self._on_samples

        def finished(some: list[Sample]) -> None:
            nonlocal samples
            samples += some
            if on_samples is not None:
                on_samples(some)

        self._fleet.forget_losses()
        self._on_samples = finished
        size = self._call_size(len(requests))
        await self._fly(_cut(_once(requests), size), size)
        return samples

    async def follow(self, fed: AsyncIterator[Sequence[Request]], together: int) -> None:
        """Sends requests as they come, in calls as `run` would send `together` of them, and returns when there are no
        more and all have finished. Raises as `run`; and ServerLost, if this flight does not look after servers."""
        size = self._call_size(together)
        await self._fly(_cut(fed, size), size)

    async def _fly(self, calls: AsyncIterator[Sequence[Request]], size: int) -> None:
        """size: requests of a call, at most"""
        self._slots = asyncio.Semaphore(max(1, self._concurrent_requests // size))
        limit = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # `_wait_for` has the limit of an answer
        limits = httpx.Limits(max_connections=None, keepalive_expiry=None)  # however long the loop stands still
        try:
            async with (
                httpx.AsyncClient(
                    timeout=limit,
                    limits=limits,
                    headers=self._fleet.access.headers | PLAIN,
                    trust_env=False,
                    verify=tls(),
                ) as self._http,
                asyncio.TaskGroup() as self._tasks,
            ):
                self._watcher = self._tasks.create_task(self._watch())
                self._unfinished = 1  # as long as more may come
                async for call in calls:
                    self._unfinished += 1
                    self._waiting += len(call)
                    self._fleet.waiting.begin(len(call))
                    self._tasks.create_task(self._finish(call))
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

    def _call_size(self, requests: int) -> int:
        """Requests a call: no more than leaves every server busy, nor than may be in flight."""
        servers = max(1, len(self._fleet.servers))
        return max(1, min(REQUESTS_A_CALL, requests // servers, self._concurrent_requests // servers))

    # ---- calls

    async def _finish(self, requests: Sequence[Request]) -> None:
        async with self._slots:
            self._begin(len(requests))
            while (samples := await self._attempt(requests)) is None:
                pass
        if self._on_samples is not None:
            self._on_samples(samples)
        self._one_less()

    def _one_less(self) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self._watcher.cancel()

    async def _attempt(self, requests: Sequence[Request]) -> list[Sample] | None:
        """None if the server was lost over it."""
        server = await self._least_loaded()
        life = server.life
        if not self._looks_after and not server.has_weights:  # another life than the one that this flight began with
            raise ServerLost(server.url, life - 1, server.asleep() or "")
        asks = self._expected.routed is not None
        body = generate_body(requests, self._sampling, self._adapter, experts=asks)
        shares = server.url in self._fleet.prefix_caches and not asks
        first = prefill_body(requests, self._sampling, self._adapter) if shares else None
        self._fleet.access.check(server.url, GENERATE.name)
        post = asyncio.ensure_future(self._post(server.url, first, body, most_bytes(requests, self._expected)))
        post.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
        self._posts[server].add(post)
        server.meter.begin(len(requests))
        samples: list[Sample] | None = None
        try:
            await self._wait_for(post)
            samples = None if post.cancelled() else await self._read(requests, post.result(), body["rid"])
            return samples
        except (httpx.HTTPError, BadAnswer) as error:
            await self._judge(server, life, requests, error)
            return None
        finally:
            post.cancel()
            self._posts[server].discard(post)
            server.meter.end(len(requests), samples or ())

    async def _wait_for(self, post: asyncio.Future[httpx.Response]) -> None:
        """Raises ReadTimeout after rollout.request_timeout_s, without the time in which engines were given weights."""
        stalled, left = self._fleet.stall.seconds, self._request_timeout_s
        while left > 0:
            done, _ = await asyncio.wait([post], timeout=left)
            if done:
                return
            before, stalled = stalled, self._fleet.stall.seconds
            left = stalled - before
        raise httpx.ReadTimeout(f"no whole answer in {self._request_timeout_s:g} s")

    async def _post(self, url: str, first: GenerateBody | None, body: GenerateBody, most: int) -> httpx.Response:
        """Returns the answer to `body`, or to `first` if that is an error."""
        if first is not None and (found := await self._post(url, None, first, most)).status_code != 200:
            return found
        async with self._http.stream(GENERATE.method, f"{url}{GENERATE.path}", json=body) as reply:
            incoming = Incoming(reply, most)
            async for part in reply.aiter_bytes():
                incoming.take(part)
        return incoming.whole()

    async def _read(self, requests: Sequence[Request], reply: httpx.Response, names: Sequence[str]) -> list[Sample]:
        if reply.status_code != 200:
            kind = Refused if 400 <= reply.status_code < 500 else BadAnswer
            raise kind(f"HTTP {reply.status_code}: {error_message(reply.content)}")
        return await asyncio.to_thread(read_answer, requests, reply.content, self._expected, names)

    async def _least_loaded(self) -> Server:
        while (server := self._fleet.least_loaded()) is None:
            if self._restarting:
                await asyncio.wait(self._restarting, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(WATCH_S)  # for one to come, as long as `_watch` allows
        return server

    async def _judge(self, server: Server, life: int, requests: Sequence[Request], error: Exception) -> None:
        """Returns if the requests are to be sent again; raises RolloutError if they failed for good."""
        if not isinstance(error, (httpx.TimeoutException, Refused)):
            await server.ends_soon()
        if not server.up or server.life != life:
            if not self._looks_after:
                raise ServerLost(server.url, life, str(error)) from error
            return
        problem = self._explain(server, requests, error)
        if server.has_ended or isinstance(error, httpx.TransportError):
            self._lose(server, problem)
        else:
            raise problem from error

    def _explain(self, server: Server, requests: Sequence[Request], error: Exception) -> RolloutError:
        names = _names(requests)
        if server.has_ended:
            return RolloutError(f"engine died during generation of {names}: {server.obituary().strip()}")
        tail = f"\n{server.obituary()}" if server.process is not None and not isinstance(error, Refused) else ""
        if isinstance(error, httpx.TimeoutException):
            limit = f"rollout.request_timeout_s = {self._request_timeout_s:g} s"
            return RolloutError(f"engine {server.url}: no answer for {names} within {limit}{tail}")
        if isinstance(error, httpx.TransportError):
            error = RuntimeError(f"connection lost ({type(error).__name__}: {error})")
        return RolloutError(f"engine {server.url}: {GENERATE.path} failed for {names}: {error}{tail}")

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
        for post in self._posts[server]:
            post.cancel()
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


async def _cut(fed: AsyncIterator[Sequence[Request]], size: int) -> AsyncIterator[Sequence[Request]]:
    async for requests in fed:
        for start in range(0, len(requests), size):
            yield requests[start : start + size]


def _names(requests: Sequence[Request]) -> str:
    first = requests[0]
    if len(requests) == 1:
        return f"sample {first.sample_id} (data row {first.prompt.index})"
    ids = ", ".join(str(request.sample_id) for request in requests)
    return f"samples {ids}"
