"""Many generations in flight over one or several engine servers, in order, or one clear error."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

import httpx

from mrl.core import Request, Sample, SamplingParams
from mrl.rollout.client import CONNECT_TIMEOUT_S, EngineClient, EngineError, error_message
from mrl.rollout.process import EngineProcess
from mrl.rollout.wire import BadAnswer, generate_body, read_samples

REQUESTS_A_CALL = 32  # several requests share an HTTP call: on small models a call costs far more than a token
WATCH_S = 0.25  # between looks at the engine processes
DEATH_WAIT_S = 3.0  # a connection breaks a moment before the process is seen to end

OnSample = Callable[[Sample], None]


class RolloutError(RuntimeError):
    """A rollout could not be finished; the message names the engine, its end and the end of its log."""


class Refused(BadAnswer):
    """The engine found fault with the request (HTTP 4xx): its answer says it all, its log adds nothing."""


class Engine:
    """The rollout engines of a run.

    urls: base URLs, one a server
    notes: what the user should know about these engines before the run starts, one sentence each
    """

    def __init__(
        self,
        urls: Sequence[str],
        processes: Sequence[EngineProcess],
        *,
        concurrent_requests: int,
        request_timeout_s: float,
        on_ready: Callable[[Engine], None],
        startup_timeout_s: float,
    ) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.notes: list[str] = []
        self.accepts_stop_strings = True
        self._processes = {process.url: process for process in processes}
        self._concurrent_requests = concurrent_requests
        self._request_timeout_s = request_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._on_ready = on_ready
        self._ready = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Until every server answers and has been checked; then `notes` is complete. Raises EngineStartError when a
        server of ours does not come up, EngineError when a given URL does not answer or serves something else."""
        if self._ready:
            return
        for process in self._processes.values():
            process.wait_ready(self._startup_timeout_s)
        self._on_ready(self)
        self._ready = True

    def close(self) -> None:
        """End the servers that mrl started; given URLs are left alone."""
        for process in self._processes.values():
            process.close()

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_sample: OnSample | None = None
    ) -> list[Sample]:
        """Finished samples ordered by sample_id. `on_sample` is called in this thread as samples finish.

        Log-probs are of logits / temperature (raw logits when greedy), not renormalised for top_p and top_k.
        Raises RolloutError when an engine dies, refuses or does not answer within rollout.request_timeout_s; no
        request is left running on the other servers then.
        """
        self.wait_ready()
        if sampling.stop and not self.accepts_stop_strings:
            raise RolloutError(
                f"stop strings {list(sampling.stop)} need an engine with a tokenizer, but {self.urls[0]} was started "
                "without one: set them in rollout.sampling.stop, or use stop_token_ids"
            )
        if not requests:
            return []
        samples = asyncio.run(_Flight(self, sampling, on_sample).run(requests))
        return sorted(samples, key=lambda sample: sample.request.sample_id)

    @property
    def concurrent_requests(self) -> int:
        return self._concurrent_requests

    @property
    def request_timeout_s(self) -> float:
        return self._request_timeout_s

    def dead(self) -> EngineProcess | None:
        """A server of ours that has ended, if one has."""
        return next((p for p in self._processes.values() if p.exit_code() is not None), None)

    def process_of(self, url: str) -> EngineProcess | None:
        return self._processes.get(url)


class _Flight:
    """One `Engine.generate` call."""

    def __init__(self, engine: Engine, sampling: SamplingParams, on_sample: OnSample | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._on_sample = on_sample
        self._load = dict.fromkeys(engine.urls, 0)

    async def run(self, requests: Sequence[Request]) -> list[Sample]:
        limit = httpx.Timeout(self._engine.request_timeout_s, connect=CONNECT_TIMEOUT_S)
        size = self._call_size(len(requests))
        calls = [requests[start : start + size] for start in range(0, len(requests), size)]
        slots = asyncio.Semaphore(max(1, self._engine.concurrent_requests // size))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=limit, limits=limits, trust_env=False, verify=_tls()) as http:
            tasks = [asyncio.create_task(self._call(http, slots, call)) for call in calls]
            watch = asyncio.create_task(self._watch())
            try:
                return await self._collect(tasks, watch)
            except BaseException:
                await _cancel([*tasks, watch])
                self._abort_running()
                raise
            finally:
                await _cancel([watch])

    def _call_size(self, requests: int) -> int:
        """Requests a call: no more than leaves every server busy, nor than may be in flight."""
        servers = len(self._engine.urls)
        return max(1, min(REQUESTS_A_CALL, requests // servers, self._engine.concurrent_requests // servers))

    async def _collect(self, tasks: list[asyncio.Task[list[Sample]]], watch: asyncio.Task[None]) -> list[Sample]:
        samples: list[Sample] = []
        waiting: set[asyncio.Task[Any]] = {*tasks, watch}
        while len(waiting) > 1:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                finished = task.result()  # raises here, in one place, whatever went wrong anywhere
                for sample in finished or ():
                    samples.append(sample)
                    if self._on_sample is not None:
                        self._on_sample(sample)
        return samples

    async def _watch(self) -> None:
        """Ends, with the error, when a server of ours dies: a broken server need not break its connections."""
        while True:
            await asyncio.sleep(WATCH_S)
            dead = self._engine.dead()
            if dead is not None:
                raise RolloutError(f"engine died during generation: {dead.obituary()}")

    async def _call(
        self, http: httpx.AsyncClient, slots: asyncio.Semaphore, requests: Sequence[Request]
    ) -> list[Sample]:
        async with slots:
            url = min(self._load, key=lambda u: self._load[u])
            self._load[url] += len(requests)
            try:
                reply = await http.post(f"{url}/generate", json=generate_body(requests, self._sampling))
                if reply.status_code != 200:
                    kind = Refused if 400 <= reply.status_code < 500 else BadAnswer
                    raise kind(f"HTTP {reply.status_code}: {error_message(reply)}")
                return read_samples(requests, reply.json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise await self._explain(url, requests, error) from error
            finally:
                self._load[url] -= len(requests)

    async def _explain(self, url: str, requests: Sequence[Request], error: Exception) -> RolloutError:
        names = _names(requests)
        if isinstance(error, httpx.TimeoutException):
            limit = f"rollout.request_timeout_s = {self._engine.request_timeout_s:g} s"
            return RolloutError(f"engine {url}: no answer for {names} within {limit}{self._tail(url)}")
        if isinstance(error, httpx.TransportError):
            process = self._engine.process_of(url)
            deadline = asyncio.get_running_loop().time() + DEATH_WAIT_S
            while process and process.exit_code() is None and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.05)
            if process and process.exit_code() is not None:
                return RolloutError(f"engine died during generation of {names}: {process.obituary()}")
            error = RuntimeError(f"connection lost ({type(error).__name__}: {error})")
        tail = "" if isinstance(error, Refused) else self._tail(url)
        return RolloutError(f"engine {url}: /generate failed for {names}: {error}{tail}")

    def _tail(self, url: str) -> str:
        process = self._engine.process_of(url)
        return "" if process is None else f"\n{process.obituary()}"

    def _abort_running(self) -> None:
        for url in self._engine.urls:
            process = self._engine.process_of(url)
            if process is None or process.exit_code() is None:
                client = EngineClient(url, timeout_s=5.0)
                with suppress(EngineError):  # the error that brought us here is the one to report
                    client.abort_all()
                client.close()


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes 20 ms: once a process, not once a rollout."""
    return httpx.create_ssl_context(trust_env=False)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _names(requests: Sequence[Request]) -> str:
    first = requests[0]
    if len(requests) == 1:
        return f"sample {first.sample_id} (data row {first.prompt.index})"
    ids = ", ".join(str(request.sample_id) for request in requests)
    return f"samples {ids}"
