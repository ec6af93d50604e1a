"""Reward server client: samples are scored over HTTP, in batches, while others are still generated."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from mrl.reward.errors import RewardError, SampleError
from mrl.reward.plan import Component
from mrl.reward.score_requests import Outcome, ScoreRequest
from mrl.reward.server_api import APIS, BadResponse, head, known_defect, read_answer
from mrl.workers.event_loop import EventLoopThread

if TYPE_CHECKING:
    from mrl.config.schema import ServerConfig

log = logging.getLogger(__name__)

RETRIED = (408, 429, *range(500, 600))
MAX_ERROR_BYTES = 2000


class _Retryable(Exception):
    """Failure that a retry may fix."""


@dataclass(eq=False)
class _QueuedSample:
    """text: of the request; answers: of the batch that it is sent in, at `place`"""

    text: str
    answers: asyncio.Task[list[Outcome | str]] | None = None
    place: int = 0


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
        self._waiting: deque[_QueuedSample] = deque()
        self._connections = asyncio.Semaphore(cfg.connections)
        # trust_env=False: a proxy set for the internet must not see the samples
        self._http = httpx.AsyncClient(timeout=None, follow_redirects=False, trust_env=False)
        self._loop = EventLoopThread(f"reward-server-{name}", RewardError("the reward client is closed"))
        self._loop.submit(self._serve())
        self.close = self._loop.close

    def submit(
        self, component: Component, calls: Sequence[ScoreRequest], labels: Sequence[str]
    ) -> Future[list[Outcome | SampleError]]:
        """Starts scoring samples, from any thread; a sample that JSON cannot represent fails at once."""
        return self._loop.submit(self._score_all(calls, labels))

    async def _serve(self) -> None:
        async with self._http:
            if self.cfg.api == "sglang":
                await self._look_at_the_model()
            await asyncio.Event().wait()  # until it is closed

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

    async def _score_all(self, calls: Sequence[ScoreRequest], labels: Sequence[str]) -> list[Outcome | SampleError]:
        return await asyncio.gather(*map(self._score, calls, labels))

    async def _score(self, call: ScoreRequest, label: str) -> Outcome | SampleError:
        """Waits for a connection, and sends the samples that wait then, unless another one has sent this one."""
        try:
            sample = _QueuedSample(self.api.item(call))
        except (TypeError, ValueError, RecursionError) as error:
            return SampleError(f"{label}: its row cannot be sent to a reward server: {error}")
        self._waiting.append(sample)
        async with self._connections:
            if sample.answers is None:
                batch = [self._waiting.popleft() for _ in range(min(self.cfg.batch_size, len(self._waiting)))]
                answers = asyncio.create_task(self._answers([each.text for each in batch]))
                for place, each in enumerate(batch):
                    each.answers, each.place = answers, place
                await answers
        assert sample.answers is not None  # the first that wait are sent first
        result = (await sample.answers)[sample.place]
        return SampleError(f"{self._who} on {label}: {result}") if isinstance(result, str) else result

    async def _answers(self, texts: Sequence[str]) -> list[Outcome | str]:
        """Returns the outcome of each sample, or the reason why it has none."""
        body, attempt = self.api.body(texts), 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self.cfg.timeout_s):
                    return read_answer(self.api, await self._post(body), len(texts))
            except BadResponse as error:
                return [str(error)] * len(texts)
            except _Retryable as error:
                problem = str(error)
            except TimeoutError:
                problem = f"no response within {self.cfg.timeout_s:g} s (timeout_s)"
            if attempt > self.cfg.retries:
                return [f"{problem}; attempts: {attempt}"] * len(texts)
            await asyncio.sleep(self.cfg.backoff_s * 2 ** (attempt - 1))

    async def _post(self, body: str) -> bytes:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        try:
            async with self._http.stream("POST", self.url, content=body.encode(), headers=headers) as reply:
                if reply.status_code == 200:
                    return await self._read(reply)
                text = await anext(reply.aiter_raw(MAX_ERROR_BYTES), b"")
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
        limit = self.cfg.max_answer_mib << 20
        data = await anext(reply.aiter_raw(limit + 1), b"")  # all of it, or more than is allowed
        if len(data) > limit:
            raise BadResponse(f"the response is longer than {self.cfg.max_answer_mib} MiB (max_answer_mib)")
        return data
