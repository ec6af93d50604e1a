"""Reward servers: samples are scored over HTTP, in batches, while others are still generated; and their protocols."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from mrl.reward.errors import RewardError, SampleError
from mrl.reward.images import encode_image
from mrl.reward.loading import check_result
from mrl.reward.plan import Component
from mrl.reward.score_requests import Outcome, ScoreRequest
from mrl.workers.event_loop import EventLoopThread

if TYPE_CHECKING:
    from mrl.config.schema import ServerConfig

log = logging.getLogger(__name__)

RETRIED = (408, 429, *range(500, 600))
MAX_ERROR_BYTES = 2000
BIASED_IN_SGLANG = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


class BadResponse(ValueError):
    """Answer of the server that does not have the expected form."""


class _Retryable(Exception):
    """Failure that a retry may fix."""


@dataclass(frozen=True)
class ServerApi:
    """Protocol of a reward server.

    path: below the server's address
    item: one sample as JSON text; raises ValueError, TypeError or RecursionError for values that JSON cannot represent
    body: request body from the items of a call
    results: result of each item in an answer, parsed from JSON; raises BadResponse for another form
    """

    path: str
    item: Callable[[ScoreRequest], str]
    body: Callable[[Sequence[str]], str]
    results: Callable[[Any], list[Any]]


def read_answer(api: ServerApi, data: bytes, count: int) -> list[Outcome | str]:
    """Returns the outcome of each sample, or its error. Raises BadResponse unless there is one result a sample."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadResponse(f"the response is not JSON ({reason}): {head(data)}") from None
    results = api.results(answer)
    if len(results) != count:
        raise BadResponse(f"{len(results)} scores for {count} samples")
    return [_outcome(result) for result in results]


def head(data: bytes) -> str:
    """Returns the beginning of an answer, for messages."""
    return repr(data[:200].decode(errors="replace"))


def _outcome(result: Any) -> Outcome | str:
    try:
        return check_result(result)
    except (TypeError, ValueError) as error:
        return str(error)


def _sample(call: ScoreRequest) -> str:
    if call.image is not None:
        png = base64.b64encode(encode_image(call.image, "PNG", compress_level=1)).decode()
        return json.dumps({"prompt": call.prompt, "image": png, "row": call.row}, allow_nan=False)
    found = {"prompt": call.prompt, "response": call.response, "row": call.row}
    if call.pictures is not None:
        found["pictures"] = [base64.b64encode(png).decode() for png in call.pictures]
    return json.dumps(found, allow_nan=False)


def unserializable_value(row: Mapping[str, Any]) -> str | None:
    """Returns the first value of a row that JSON cannot represent, and why; None if there is none."""
    for key, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"{key!r} cannot be sent to a reward server: {error}"
    return None


def _scores(answer: Any) -> list[Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise BadResponse(f'expected {{"scores": [...]}}, got {head(json.dumps(answer).encode())}')
    scores: list[Any] = answer["scores"]
    return scores


def _embeddings(answer: Any) -> list[Any]:
    """Returns the scores: a reward model's score is an "embedding" of length 1."""
    if not isinstance(answer, list) or not all(isinstance(item, dict) for item in answer):
        raise BadResponse(f'expected [{{"embedding": [score]}}, ...], got {head(json.dumps(answer).encode())}')
    found = [item.get("embedding") for item in answer]
    for numbers in found:
        if not isinstance(numbers, list) or len(numbers) != 1:
            what = f"{len(numbers)} numbers" if isinstance(numbers, list) else repr(numbers)
            raise BadResponse(f"expected one score per sample, got {what}: check that it serves a reward model")
    return [numbers[0] for numbers in found if numbers is not None]


def known_defect(about: Any) -> str:
    """Returns a known defect of the model of this /model_info; empty if there is none."""
    found = about.get("architectures") if isinstance(about, dict) else None
    names = [name for name in BIASED_IN_SGLANG if isinstance(found, list) and name in found]
    if not names:
        return ""
    return (
        f"serves a {names[0]}, whose score head has a bias in SGLang (0.5.23) but none in transformers. Unless the "
        "checkpoint has score.bias, all scores are off by a constant that changes with each start of the server: use "
        "reward.model.path to run the model in Megatron instead"
    )


MRL = ServerApi("", _sample, lambda items: f'{{"samples": [{", ".join(items)}]}}', _scores)
SGLANG = ServerApi(
    "/classify",
    lambda call: json.dumps(call.token_ids),
    lambda items: f'{{"input_ids": [{", ".join(items)}]}}',
    _embeddings,
)
APIS = {"mrl": MRL, "sglang": SGLANG}


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
