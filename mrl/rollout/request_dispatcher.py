"""Dispatch of generation requests: one HTTP request per sample, to the engine with the fewest in flight.

* The event loop has a thread of its own and never waits for the trainer. The caller's thread runs weight syncs of
  restarted engines and receives the samples.
* A request's time-out starts when it is sent to its engine, and leaves out weight syncs of all engines.
* A failure restarts the engine at which it happened, and no other. Its unfinished requests go to engines that are up,
  with the same seeds.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from uuid import uuid4

import aiohttp
import orjson

from mrl.core import Request, Sample, SamplingParams
from mrl.rollout.access import tls
from mrl.rollout.answers import error_message
from mrl.rollout.caller_thread import CallerThread
from mrl.rollout.client import CONNECT_TIMEOUT_S
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.errors import BadAnswer, EngineError, Refused, RolloutError, ServerLost
from mrl.rollout.incoming import PLAIN, Incoming
from mrl.rollout.protocol import GENERATE, GenerateBody
from mrl.rollout.samples import Expected, generate_body, most_bytes, prefill_body, read_answer
from mrl.rollout.server import Server
from mrl.stopping import run_coroutine

WATCH_S = 0.25  # between checks of the engine processes
ABORT_TIMEOUT_S = 5.0
ABORTS_AT_ONCE = 64
KEEP_ALIVE_S = 3600.0  # of an idle connection; engines may close it earlier
RETRY_PAUSES_S = (0.1, 0.3, 1.0)  # before a request is sent again whose connection failed at an engine that is up
PREFIX_SLACK = 4  # more requests in flight that an engine may have whose prefix cache holds the prompt

OnSamples = Callable[[list[Sample]], None]


@dataclass(eq=False)
class _PromptGroup:
    """Requests of one prompt that arrived together. prefills: of its prompt, by engine and restart"""

    requests: Sequence[Request]
    prefills: dict[tuple[Server, int], asyncio.Future[bytes]] = field(default_factory=dict)


class RequestDispatcher:
    """Requests in flight over the engines of a pool, for one `run`.

    concurrent_requests: maximum number in flight
    adapter: name of the LoRA adapter to sample with
    restarts_engines: False: another thread restarts engines, and a lost one is raised as ServerLost
    """

    def __init__(
        self,
        pool: EnginePool,
        sampling: SamplingParams,
        expected: Expected,
        concurrent_requests: int,
        request_timeout_s: float,
        adapter: str | None = None,
        *,
        restarts_engines: bool = True,
    ) -> None:
        self._pool, self._sampling, self._expected, self._adapter = pool, sampling, expected, adapter
        self._concurrent_requests, self._request_timeout_s = concurrent_requests, request_timeout_s
        self._restarts_engines = restarts_engines
        self._pending: deque[tuple[Request, _PromptGroup]] = deque()
        self._running = 0
        self._posts: dict[Server, set[asyncio.Task[Sample]]] = defaultdict(set)
        self._restarting: set[asyncio.Task[None]] = set()
        self._finished: deque[Sample] = deque()
        self._caller = CallerThread()
        self._failure: BaseException | None = None
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._is_cancelled = False

    def run(self, batches: AsyncIterator[Sequence[Request]], on_samples: OnSamples) -> None:
        """Blocks until there are no more batches and all requests have finished. Calls `on_samples` in this thread with
        the samples that finished since its last call. Raises RolloutError, or what `on_samples` raises; no request is
        left running then."""

        def deliver() -> None:
            if samples := [self._finished.popleft() for _ in range(len(self._finished))]:
                on_samples(samples)

        thread = threading.Thread(target=self._run_loop, args=(batches, deliver), name="requests", daemon=True)
        thread.start()
        try:
            self._caller.serve()
        finally:
            self.cancel()
            thread.join()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Ends `run`, which then raises CancelledError. Any thread may call it."""
        self._is_cancelled = True
        if self._task is not None:
            loop, task = self._task
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)

    # ---- the event loop

    def _run_loop(self, batches: AsyncIterator[Sequence[Request]], deliver: Callable[[], None]) -> None:
        try:
            run_coroutine(self._dispatch(batches, deliver))
        except BaseException as error:
            self._failure = error
        self._caller.close()

    async def _dispatch(self, batches: AsyncIterator[Sequence[Request]], deliver: Callable[[], None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._deliver = (asyncio.get_running_loop(), task), deliver
        if self._is_cancelled:
            raise asyncio.CancelledError
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls(), keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),  # `_wait_for` bounds the rest
            headers=self._pool.access.headers | PLAIN | {"Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy set for the internet must not see engine traffic
        )
        try:
            async with session as self._http, asyncio.TaskGroup() as self._background:
                watcher = self._background.create_task(self._watch())
                async with asyncio.TaskGroup() as self._requests:
                    async for batch in batches:
                        self._pool.waiting.begin(len(batch))
                        self._pending += [(request, group) for group in by_prompt(batch) for request in group.requests]
                        self._start_pending()
                watcher.cancel()
        except BaseException as failed:
            self._abort_running()
            error = failed
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from error.__cause__
        finally:
            self._pool.waiting.end(len(self._pending))

    def _start_pending(self) -> None:
        while self._pending and self._running < self._concurrent_requests:
            self._running += 1
            self._pool.waiting.end(1)
            self._requests.create_task(self._finish(*self._pending.popleft()))

    async def _finish(self, request: Request, group: _PromptGroup) -> None:
        while (sample := await self._attempt(request, group)) is None:
            pass
        self._finished.append(sample)
        self._caller.put(self._deliver)
        self._running -= 1
        self._start_pending()

    # ---- one request

    async def _attempt(self, request: Request, group: _PromptGroup) -> Sample | None:
        """Returns None if its engine was lost."""
        server = await self._choose(group)
        life = server.life
        if not self._restarts_engines and not server.has_weights:  # it was restarted meanwhile
            raise ServerLost(server.url, life - 1, server.asleep() or "")
        post = asyncio.create_task(self._generate(server, request, group))
        post.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
        self._posts[server].add(post)
        server.meter.begin(1)
        sample: Sample | None = None
        try:
            await self._wait_for(post)
            sample = None if post.cancelled() else post.result()
            return sample
        except (aiohttp.ClientError, OSError, BadAnswer) as error:  # TimeoutError is an OSError
            await self._handle(server, life, request, error)
            return None
        finally:
            post.cancel()
            self._posts[server].discard(post)
            server.meter.end(1, () if sample is None else (sample,))

    async def _choose(self, group: _PromptGroup) -> Server:
        """Waits until an engine is up."""
        while (least := self._pool.least_loaded()) is None:
            if self._restarting:
                await asyncio.wait(self._restarting, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(WATCH_S)  # for one to join, as long as `_watch` allows
        for server, life in group.prefills:
            if server.up and server.life == life and server.meter.running < least.meter.running + PREFIX_SLACK:
                return server
        return least

    async def _wait_for(self, post: asyncio.Task[Sample]) -> None:
        """Raises TimeoutError after rollout.request_timeout_s without the time of weight syncs."""
        stalled, left = self._pool.stall.seconds, self._request_timeout_s
        while left > 0:
            done, _ = await asyncio.wait([post], timeout=left)
            if done:
                return
            before, stalled = stalled, self._pool.stall.seconds
            left = stalled - before
        raise TimeoutError(f"no whole answer in {self._request_timeout_s:g} s")

    async def _generate(self, server: Server, request: Request, group: _PromptGroup) -> Sample:
        asks = self._expected.routed is not None
        if server.url in self._pool.prefix_caches and not asks:
            await self._prefill(server, group)
        body = generate_body(request, self._sampling, self._adapter, experts=asks)
        content = await self._post(server, body, most_bytes(request, self._expected))
        return read_answer(request, content, self._expected, body["rid"])

    async def _prefill(self, server: Server, group: _PromptGroup) -> None:
        """Has the engine prefill a prompt of several requests once, before the first of them is sent there."""
        body = prefill_body(group.requests, self._sampling, self._adapter)
        if body is None:
            return
        key = server, server.life
        if key not in group.prefills:
            most = most_bytes(group.requests[0], self._expected)
            group.prefills[key] = asyncio.ensure_future(self._post(server, body, most))
            group.prefills[key].add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(group.prefills[key])  # others wait for it too

    async def _post(self, server: Server, body: GenerateBody, most: int) -> bytes:
        """Returns the content of an answer; raises Refused or BadAnswer for one that is an error."""
        for pause_s in (*RETRY_PAUSES_S, None):
            self._pool.access.check(server.url, GENERATE.name)
            try:
                status, content = await self._send(server.url, orjson.dumps(body), most)
                break
            except (aiohttp.ClientError, ConnectionError) as error:  # also of an idle connection that has just ended
                if pause_s is None or isinstance(error, TimeoutError) or server.has_ended:
                    raise
                await asyncio.sleep(pause_s)
                body["rid"] = uuid4().hex  # the engine may still know the former one
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

    # ---- failures

    async def _handle(self, server: Server, life: int, request: Request, error: Exception) -> None:
        """Returns if the request is to be sent again; raises RolloutError if it failed for good."""
        if not isinstance(error, (TimeoutError, Refused)):
            await server.ends_soon()
        if not server.up or server.life != life:
            if not self._restarts_engines:
                raise ServerLost(server.url, life, str(error)) from error
        elif server.has_ended or not isinstance(error, BadAnswer):
            await self._lose(server, lambda: self._explain(server, request, error))
        else:
            raise await asyncio.to_thread(self._explain, server, request, error) from error

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

    async def _lose(self, server: Server, explain: Callable[[], RolloutError]) -> None:
        """Begins the restart of a lost engine, unless it has left with its node. Raises RolloutError if it cannot be
        restarted."""
        if not self._restarts_engines:
            error = await asyncio.to_thread(explain)
            raise ServerLost(server.url, server.life, str(error)) from error
        server.up = False
        for post in self._posts[server]:
            post.cancel()
        error = await asyncio.to_thread(explain)
        if not self._pool.is_left_by(server):
            await self._caller.call(lambda: self._pool.lose(server, error))
            self._bring(self._pool.bring_back(server, self._caller))

    def _bring(self, coming: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine after which an engine is up."""
        task = self._background.create_task(coming)
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _watch(self) -> None:
        """Looks for engines that ended, whose connections need not break, and for those that join."""
        while True:
            if self._restarts_engines:
                self._pool.check_alone()
                for server in await asyncio.to_thread(self._pool.admit):
                    self._bring(self._pool.bring_in(server, self._caller))
            await asyncio.sleep(WATCH_S)
            for server in self._pool.servers:
                if server.up and server.has_ended:
                    await self._lose(server, lambda: _death(server))  # noqa: B023

    def _abort_running(self) -> None:
        urls = [server.url for server in self._pool.servers if not server.has_ended]
        with ThreadPoolExecutor(ABORTS_AT_ONCE) as threads:
            list(threads.map(self._abort_all, urls))

    def _abort_all(self, url: str) -> None:
        with closing(self._pool.client(url, ABORT_TIMEOUT_S)) as client:
            with suppress(EngineError):  # the error that brought us here is the one to report
                client.abort_all()


def by_prompt(requests: Sequence[Request]) -> Iterator[_PromptGroup]:
    """Yields consecutive requests of one prompt."""
    for _, group in groupby(requests, key=lambda request: id(request.prompt)):
        yield _PromptGroup(list(group))


def _death(server: Server) -> RolloutError:
    return RolloutError(f"engine died during generation: {server.obituary().strip()}")
