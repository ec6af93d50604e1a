"""Dispatch of generation requests: one HTTP request per sample, to the engine with the fewest in flight.

* The event loop has a thread of its own and never waits for the trainer. The main thread gives restarted engines their
  weights, in `serve`; until then they take no requests.
* A request's time-out starts when it is sent to its engine.
* No request is in flight during a weight sync: `pause` holds back those of asynchronous sampling and, with `interrupt`,
  ends those in flight early. Such a response keeps its tokens and continues with the next weights.
* A failure restarts the engine at which it happened, and no other. Its unfinished requests go to engines that are up,
  with the same seeds.
* No engine is restarted while all engines receive weights: the sync itself does that (`EnginePool.revive`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar
from uuid import uuid4

import aiohttp
import orjson

from mrl.core import Request, Sample, SamplingParams
from mrl.inference.access import tls
from mrl.inference.answers import PLAIN, Incoming, error_message
from mrl.inference.client import CONNECT_TIMEOUT_S
from mrl.inference.engine_pool import EnginePool
from mrl.inference.errors import BadAnswer, EngineError, Refused, RolloutError
from mrl.inference.protocol import ABORT, GENERATE, GenerateBody
from mrl.inference.samples import Expected, PartialResponse, generate_body, most_bytes, prefill_body, read_answer
from mrl.inference.server import Server
from mrl.stopping import run_coroutine

WATCH_S = 0.25  # between checks of the engine processes
INTERRUPT_S = 0.1  # between requests to end the responses in flight early
ABORT_TIMEOUT_S = 5.0
CLOSE_S = 15.0  # until the event loop has ended, once it is told to
ABORTS_AT_ONCE = 64
KEEP_ALIVE_S = 3600.0  # of an idle connection; engines may close it earlier
RETRY_PAUSES_S = (0.1, 0.3, 1.0)  # before a request is sent again whose connection failed at an engine that is up
PREFIX_SLACK = 4  # more requests in flight that an engine may have whose prefix cache holds the prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Generation:
    """Sampling parameters, and the properties that every answer must have.

    is_background: waits while the dispatcher is paused; adapter: name of the run's adapter
    """

    sampling: SamplingParams
    expected: Expected
    is_background: bool = False
    adapter: str = ""

    def after(self, tokens: int) -> Generation:
        """Returns how to sample what is left of a response that has so many tokens."""
        left = self.sampling.max_new_tokens - tokens
        sampling, expected = replace(self.sampling, max_new_tokens=left), replace(self.expected, max_new_tokens=left)
        return replace(self, sampling=sampling, expected=expected)


@dataclass(eq=False)
class PromptGroup:
    """Requests of one prompt that are sent together. prefills: of its prompt, by engine, restart and weight sync"""

    requests: Sequence[Request]
    prefills: dict[tuple[Server, int, int], asyncio.Future[bytes]] = field(default_factory=dict)


class RequestDispatcher:
    """Requests in flight over the engines of a pool. The event loop starts with the first `submit`.

    concurrent_requests: maximum number in flight
    sent: background requests that an engine has
    """

    def __init__(self, pool: EnginePool, concurrent_requests: int, request_timeout_s: float) -> None:
        self._pool, self.request_timeout_s = pool, request_timeout_s
        self._concurrent_requests = concurrent_requests
        self._changed = threading.Condition()  # guards what both threads use: the next three
        self._for_main: deque[Callable[[], object]] = deque()
        self._awaiting: dict[str, asyncio.Future[None]] = {}  # weights, by address of an engine that is ready for them
        self._failure: BaseException | None = None
        self._restarting: set[asyncio.Task[None]] = set()
        self._posts: dict[Server, set[asyncio.Task[Sample]]] = defaultdict(set)
        self._open = self.sent = self._pauses = 0  # open: requests that have no sample yet
        self._thread: threading.Thread | None = None
        self._started: Future[None] = Future()

    # ---- the main thread

    def submit(self, program: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the event loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_loop, name="requests", daemon=True)
            self._thread.start()
            try:
                self._started.result()
            except BaseException:
                program.close()
                raise
        future = asyncio.run_coroutine_threadsafe(program, self._loop)
        future.add_done_callback(lambda done: self._notify())
        return future

    def post(self, work: Callable[[], object]) -> None:
        """Has `work` done in the main thread, in order, once that calls `serve`. Any thread may call this."""
        with self._changed:
            self._for_main.append(work)
            self._changed.notify_all()

    async def in_main(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns in the main thread, or raises what it raises there."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self.post(run)
        return await asyncio.wrap_future(done)

    def serve(
        self,
        until: Callable[[], bool],
        give_weights: Callable[[str], None] | None = None,
        left_s: Callable[[], float] = lambda: 3600.0,
        late: Callable[[], str] = lambda: "",
    ) -> None:
        """Does what the event loop has for this thread, until `until()`.

        Args:
            give_weights: brings the engine at an address to the weights of the others, meanwhile; None: nobody can now.
            left_s: seconds that this may still wait without any progress; then raises RolloutError of `late()`.

        Raises the failure of the event loop.
        """
        while True:
            with self._changed:
                work = self._for_main.popleft() if self._for_main else None
                url = next(iter(self._awaiting), None) if give_weights is not None else None
                if work is None and url is None:
                    if self._failure is not None:
                        raise self._failure
                    if until():
                        return
                    if (left := left_s()) <= 0:
                        raise RolloutError(late())
                    self._changed.wait(left)
            if work is not None:
                work()
            elif url is not None:
                assert give_weights is not None
                try:
                    give_weights(url)
                except Exception as error:
                    self._given([url], error)
                else:
                    self._given([url])

    @property
    def awaiting_weights(self) -> tuple[str, ...]:
        """Addresses of restarted and joining engines that take no requests until they get weights."""
        with self._changed:
            return tuple(self._awaiting)

    @property
    def is_restarting(self) -> bool:
        """True if an engine is being started that does not wait for weights yet."""
        return len(self._restarting) > len(self.awaiting_weights)

    def pause(self, *, interrupt: bool) -> Future[None]:
        """Holds back background requests until `resume`; engines may still work on those that are `sent`.

        Args:
            interrupt: ends them early; all must be interruptible.

        Returns a future that is done once no further request is sent.
        """
        return self.submit(self._pause(interrupt))

    def resume(self) -> None:
        """Ends a pause, if there is one."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._gate.set)

    def have_weights(self) -> None:
        """Says that all engines have received weights."""
        self._given(self.awaiting_weights)

    def close(self) -> None:
        """Cancels everything; no request is left running. The dispatcher cannot be used afterwards."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(CLOSE_S)

    def _given(self, urls: Sequence[str], error: Exception | None = None) -> None:
        with self._changed:
            given = [self._awaiting.pop(url) for url in urls if url in self._awaiting]
        for future in given:
            self._loop.call_soon_threadsafe(_settle, future, error)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the event loop

    def _run_loop(self) -> None:
        try:
            run_coroutine(self._until_closed())
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        if not self._started.done():
            self._started.set_exception(error)

    async def _until_closed(self) -> None:
        """Runs until it is cancelled, or a restart fails for good."""
        self._loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        self._main = main
        self._slots = {is_background: asyncio.Semaphore(self._concurrent_requests) for is_background in (True, False)}
        self._gate = asyncio.Event()  # clear while paused
        self._gate.set()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls(), keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),  # `_attempt` bounds the rest
            headers=self._pool.access.headers | PLAIN | {"Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy set for the internet must not see engine traffic
        )
        try:
            async with session as self._http, asyncio.TaskGroup() as self._background:
                self._started.set_result(None)
                await self._watch()
        except BaseException as failed:  # told before what waits for a result finds that cancelled
            error = failed.exceptions[0] if isinstance(failed, BaseExceptionGroup) else failed
            is_closed = isinstance(error, asyncio.CancelledError)
            self._fail(RolloutError("sampling was interrupted") if is_closed else error)
        finally:
            runs = any(self._posts.values())
            for task in asyncio.all_tasks() - {main}:
                task.cancel()
            if runs:
                self._abort_running()

    # ---- one request

    async def generate(self, request: Request, how: Generation, group: PromptGroup | None = None) -> Sample:
        """Returns the sample of a request, whichever engine it comes from. Raises RolloutError."""
        slots = self._slots[how.is_background]
        self._open += 1
        self._pool.waiting.begin(1)
        try:
            await slots.acquire()
        except BaseException:
            self._open -= 1
            raise
        finally:
            self._pool.waiting.end(1)
        response, most, stop = PartialResponse.empty(), how.sampling.max_new_tokens, how.sampling.stop
        try:
            while True:
                tokens = len(response.ids)
                sample = await self._attempt(response.rest_of(request), how.after(tokens) if tokens else how, group)
                if sample is None:  # its engine was lost
                    continue
                if not how.expected.is_interruptible:
                    return sample
                response = response.longer(sample, most, stop)
                if response.finish:
                    return response.sample(request)
        finally:
            slots.release()
            self._open -= 1

    async def _attempt(self, request: Request, how: Generation, group: PromptGroup | None) -> Sample | None:
        """Returns None if its engine was lost."""
        server = await self._choose(group, how)
        restarts = server.restarts
        post = asyncio.create_task(self._generate(server, request, how, group))
        post.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
        self._posts[server].add(post)
        self.sent += how.is_background
        server.meter.begin(1)
        sample: Sample | None = None
        try:
            done, _ = await asyncio.wait([post], timeout=self.request_timeout_s)
            if not done:
                raise TimeoutError(f"no whole answer in {self.request_timeout_s:g} s")
            sample = None if post.cancelled() else post.result()
            return sample
        except (aiohttp.ClientError, OSError, BadAnswer) as error:  # TimeoutError is an OSError
            await self._handle(server, restarts, request, error)
            return None
        finally:
            post.cancel()
            self._posts[server].discard(post)
            self.sent -= how.is_background
            if not self._gate.is_set():
                self._notify()
            server.meter.end(1, () if sample is None else (sample,))

    async def _choose(self, group: PromptGroup | None, how: Generation) -> Server:
        """Waits until an engine is up and, for a background request, until the dispatcher is not paused."""
        while True:
            if how.is_background:
                await self._gate.wait()
            if (least := self._pool.least_loaded()) is not None:
                break
            await asyncio.sleep(WATCH_S)  # for one to be restarted or to join
        for server, restarts, pauses in group.prefills if group is not None else ():
            is_same = server.up and (restarts, pauses) == (server.restarts, self._pauses)
            if is_same and server.meter.running < least.meter.running + PREFIX_SLACK:
                return server
        return least

    async def _pause(self, interrupt: bool) -> None:
        self._pauses += self._gate.is_set()
        self._gate.clear()
        if interrupt:
            self._background.create_task(self._interrupt())

    async def _interrupt(self) -> None:
        """Has engines answer the background requests with the tokens that they have. A request that is on its way to
        its engine is ended by a later try."""
        while self.sent and not self._gate.is_set():
            await asyncio.gather(*(self._abort(server.url) for server, posts in self._posts.items() if posts))
            await asyncio.sleep(INTERRUPT_S)

    async def _abort(self, url: str) -> None:
        body, limit = orjson.dumps({"rid": "", "abort_all": True}), aiohttp.ClientTimeout(ABORT_TIMEOUT_S)
        with suppress(aiohttp.ClientError, OSError):  # its requests find out what is wrong with the engine
            async with self._http.post(f"{url}{ABORT.path}", data=body, timeout=limit, allow_redirects=False):
                pass

    async def _generate(self, server: Server, request: Request, how: Generation, group: PromptGroup | None) -> Sample:
        asks = how.expected.routed is not None
        if group is not None and server.info.has_prefix_cache and not asks:
            await self._prefill(server, how, group)
        body = generate_body(request, how.sampling, self._pool.adapters.get(how.adapter), experts=asks)
        content = await self._post(server, body, most_bytes(request, how.expected))
        return read_answer(request, content, how.expected, body["rid"])

    async def _prefill(self, server: Server, how: Generation, group: PromptGroup) -> None:
        """Has the engine prefill a prompt of several requests once, before the first of them is sent there."""
        body = prefill_body(group.requests, how.sampling, self._pool.adapters.get(how.adapter))
        if body is None:
            return
        key = server, server.restarts, self._pauses
        if key not in group.prefills:
            most = most_bytes(group.requests[0], how.expected)
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
                if not server.has_weights:  # a weight sync starts it again
                    raise
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

    async def _handle(self, server: Server, restarts: int, request: Request, error: Exception) -> None:
        """Returns if the request is to be sent again; raises RolloutError if it failed for good."""
        if not isinstance(error, (TimeoutError, Refused)):
            await server.ends_soon()
        if server.up and server.restarts == restarts:
            if server.has_ended or not isinstance(error, BadAnswer):
                await self._lose(server, restarts, lambda: self._explain(server, request, error))
            else:
                raise await asyncio.to_thread(self._explain, server, request, error) from error

    def _explain(self, server: Server, request: Request, error: Exception) -> RolloutError:
        name = f"sample {request.sample_id} (data row {request.prompt.index})"
        if server.has_ended:
            return RolloutError(f"engine died during generation of {name}: {server.exit_report().strip()}")
        tail = f"\n{server.exit_report()}" if server.process is not None and not isinstance(error, Refused) else ""
        if isinstance(error, TimeoutError):
            limit = f"rollout.request_timeout_s = {self.request_timeout_s:g} s"
            return RolloutError(f"engine {server.url}: no answer for {name} within {limit}{tail}")
        if not isinstance(error, BadAnswer):
            error = RuntimeError(f"connection lost ({type(error).__name__}: {error})")
        return RolloutError(f"engine {server.url}: {GENERATE.path} failed for {name}: {error}{tail}")

    async def _lose(self, server: Server, restarts: int, explain: Callable[[], RolloutError]) -> None:
        """Begins the restart of a lost engine, unless it has left with its node or a weight sync restarts it. Raises
        RolloutError if it cannot be restarted."""
        while self._pool.is_syncing:
            await asyncio.sleep(WATCH_S)
        if not server.up or server.restarts != restarts:
            return
        server.up = False
        for post in self._posts[server]:
            post.cancel()
        error = await asyncio.to_thread(explain)
        if not self._pool.has_left(server):
            self._pool.lose(server, error)
            self._bring(self._pool.bring_back(server, self._weights))

    def _bring(self, coming: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine after which an engine is up."""
        task = self._background.create_task(coming)
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)
        task.add_done_callback(lambda done: self._notify())

    async def _weights(self, url: str) -> None:
        """Waits until the engine at `url` has received weights."""
        future = self._loop.create_future()
        with self._changed:
            self._awaiting[url] = future
            self._changed.notify_all()
        try:
            await future
        finally:
            with self._changed:
                self._awaiting.pop(url, None)

    async def _watch(self) -> None:
        """Looks for engines that ended, whose connections need not break, and for those that join."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._open:
                continue
            for server in await asyncio.to_thread(self._pool.admit):
                self._bring(self._pool.bring_in(server, self._weights))
            for server in self._pool.servers:
                if server.up and server.has_ended:
                    await self._lose(server, server.restarts, lambda: _death(server))  # noqa: B023

    def _abort_running(self) -> None:
        def abort_all(url: str) -> None:
            with closing(self._pool.client(url, ABORT_TIMEOUT_S)) as client, suppress(EngineError):
                client.abort_all()  # the error that brought us here is the one to report

        with ThreadPoolExecutor(ABORTS_AT_ONCE) as threads:
            list(threads.map(abort_all, [server.url for server in self._pool.servers if not server.has_ended]))


def by_prompt(requests: Sequence[Request]) -> Iterator[PromptGroup]:
    """Yields consecutive requests of one prompt."""
    for _, group in groupby(requests, key=lambda request: id(request.prompt)):
        yield PromptGroup(list(group))


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _death(server: Server) -> RolloutError:
    return RolloutError(f"engine died during generation: {server.exit_report().strip()}")
