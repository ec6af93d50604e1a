"""Reward server client: samples are scored over HTTP, in batches, while others are still generated."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from mrl.reward.errors import RewardError, SampleError
from mrl.reward.plan import Component
from mrl.reward.score_requests import Outcome, PendingScores, ScoreRequest, set_outcome
from mrl.reward.server_api import APIS, BadResponse, head, known_defect, read_answer

if TYPE_CHECKING:
    from mrl.config.schema import ServerConfig

log = logging.getLogger(__name__)

RETRIED = (408, 429, *range(500, 600))
MAX_ERROR_BYTES = 2000
CLOSE_TIMEOUT_S = 10.0


class _Retryable(Exception):
    """Failure that a retry may fix."""


@dataclass(frozen=True)
class _QueuedSample:
    text: str
    label: str
    future: Future[Outcome]


class ServerClient:
    """Client of one server. A call carries up to `batch_size` waiting samples; up to `connections` calls run
    concurrently.

    A call has `timeout_s` in total. Time-outs, lost connections and the statuses `RETRIED` are retried. Redirects are
    not followed, compressed answers are refused, and answers over `max_answer_mib` are not read. A failed call fails
    each of its samples with a SampleError; a score that is not a finite number fails only its own sample.
    """

    def __init__(self, name: str, cfg: ServerConfig) -> None:
        self.cfg, self.api = cfg, APIS[cfg.api]
        self.url = cfg.url.rstrip("/") + self.api.path if self.api.path else cfg.url
        parts = urlsplit(self.url)
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # no password in messages
        self._who = f"reward server {name!r} ({shown})"
        self._pending = PendingScores()
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[_QueuedSample] = asyncio.Queue()
        self._main = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name=f"reward-server-{name}", daemon=True)
        self._thread.start()

    def submit(self, component: Component, call: ScoreRequest, label: str) -> Future[Outcome]:
        """Queues a sample; a sample that JSON cannot represent fails at once."""
        future = self._pending.new()
        try:
            item = _QueuedSample(self.api.item(call), label, future)
        except (TypeError, ValueError, RecursionError) as error:
            set_outcome(future, SampleError(f"{label}: its row cannot be sent to a reward server: {error}"))
        else:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        return future

    def flush(self, component: Component, futures: Collection[Future[Outcome]]) -> None:
        """Does nothing: calls do not wait for full batches."""

    def close(self) -> None:
        """Ends the client; safe to call twice."""
        if self._pending.ended is None:
            self._pending.end(RewardError("the reward client is closed"))
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("%s: calls in flight did not end within %.0f s", self._who, CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass  # closed
        except Exception as error:
            self._pending.end(RewardError(f"{self._who} failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        # trust_env=False: a proxy set for the internet must not see the samples
        async with (
            httpx.AsyncClient(timeout=None, follow_redirects=False, trust_env=False) as self._http,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self.cfg.connections):
                tasks.create_task(self._connection())
            if self.cfg.api == "sglang":
                await self._look_at_the_model()

    async def _look_at_the_model(self) -> None:
        """Warns of scores that cannot be right. A server that does not describe its model is accepted."""
        url = self.cfg.url.rstrip("/") + "/model_info"
        try:
            async with asyncio.timeout(self.cfg.timeout_s), self._http.stream("GET", url) as reply:
                problem = known_defect(json.loads(await self._read(reply)))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError, TimeoutError):
            return
        if problem:
            log.warning("%s %s", self._who, problem)

    async def _connection(self) -> None:
        while True:
            items = [await self._queue.get()]
            while len(items) < self.cfg.batch_size and not self._queue.empty():
                items.append(self._queue.get_nowait())
            await self._score(items)

    async def _score(self, items: Sequence[_QueuedSample]) -> None:
        """Settles every item."""
        for item, result in zip(items, await self._results(items), strict=True):
            if isinstance(result, str):
                set_outcome(item.future, SampleError(f"{self._who} on {item.label}: {result}"))
            else:
                set_outcome(item.future, result)

    async def _results(self, items: Sequence[_QueuedSample]) -> list[Outcome | str]:
        """Returns the outcome of each item, or the reason why it has none."""
        body, attempt = self.api.body([item.text for item in items]), 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self.cfg.timeout_s):
                    return read_answer(self.api, await self._post(body), len(items))
            except BadResponse as error:
                return [str(error)] * len(items)
            except _Retryable as error:
                problem = str(error)
            except TimeoutError:
                problem = f"no response within {self.cfg.timeout_s:g} s (timeout_s)"
            if attempt > self.cfg.retries:
                return [f"{problem}; attempts: {attempt}"] * len(items)
            await asyncio.sleep(self.cfg.backoff_s * 2 ** (attempt - 1))

    async def _post(self, body: str) -> bytes:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        try:
            async with self._http.stream("POST", self.url, content=body.encode(), headers=headers) as reply:
                if reply.status_code == 200:
                    return await self._read(reply)
                text = await _beginning(reply)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Retryable(f"{type(error).__name__}: {error}") from error
        if reply.has_redirect_location:
            raise BadResponse(f"HTTP {reply.status_code} to {reply.headers['location']!r}: redirects are not followed")
        problem = f"HTTP {reply.status_code}: {head(text)}"
        raise _Retryable(problem) if reply.status_code in RETRIED else BadResponse(problem)

    async def _read(self, reply: httpx.Response) -> bytes:
        """Returns the whole answer, within its limits."""
        if reply.headers.get("content-encoding", "identity") != "identity":
            raise BadResponse(f"the response is compressed ({reply.headers['content-encoding']}): send it uncompressed")
        limit, data = self.cfg.max_answer_mib << 20, bytearray()
        async for chunk in reply.aiter_raw():
            data += chunk
            if len(data) > limit:
                raise BadResponse(f"the response is longer than {self.cfg.max_answer_mib} MiB (max_answer_mib)")
        return bytes(data)


async def _beginning(reply: httpx.Response) -> bytes:
    data = b""
    async for chunk in reply.aiter_raw():
        data += chunk
        if len(data) > MAX_ERROR_BYTES:
            break
    return data[:MAX_ERROR_BYTES]
