"""The rollout engines of a run: samples in order, or one clear error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from mrl.core import Request, Sample, SamplingParams
from mrl.rollout.client import Access, EngineClient
from mrl.rollout.errors import RolloutError
from mrl.rollout.flight import DEATH_WAIT_S, Flight, OnSample
from mrl.rollout.process import EngineProcess
from mrl.rollout.restarts import Restarts

RESTART_POLL_S = 0.25


class Engine:
    """The rollout engines of a run.

    urls: base URLs, one a server
    access: what opens them
    vocab_size: tokens of the model; a sample with any other one is refused
    weight_version: the name of the weights that the run gave them last, once it did; a sample of others is refused
    notes: what the user should know about these engines before the run starts, one sentence each
    restarts: who may start a lost server again; nobody, until `restarts.allow` is called
    """

    def __init__(
        self,
        urls: Sequence[str],
        processes: Sequence[EngineProcess],
        *,
        access: Access,
        vocab_size: int,
        concurrent_requests: int,
        request_timeout_s: float,
        check: Callable[[Engine, str], None],
        startup_timeout_s: float,
        max_restarts: int,
    ) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.access, self.vocab_size = access, vocab_size
        self.weight_version: str | None = None
        self.notes: list[str] = []
        self.accepts_stop_strings = True
        self._processes = {process.url: process for process in processes}
        self._concurrent_requests = concurrent_requests
        self._request_timeout_s = request_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._check = check
        self.restarts = Restarts(max_restarts)
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
        for url in self.urls:
            self._check(self, url)
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
        A server of ours that dies or does not answer within rollout.request_timeout_s is started again as often as
        `restarts` allows; what it had not finished is sampled again with the same seeds.
        Raises RolloutError when that is not allowed, or an engine refuses; no request is left running on the other
        servers then.
        """
        self.wait_ready()
        if sampling.stop and not self.accepts_stop_strings:
            raise RolloutError(
                f"stop strings {list(sampling.stop)} need an engine with a tokenizer, but {self.urls[0]} was started "
                "without one: set them in rollout.sampling.stop, or use stop_token_ids"
            )
        if not requests:
            return []
        samples = asyncio.run(Flight(self, sampling, on_sample).run(requests))
        return sorted(samples, key=lambda sample: sample.request.sample_id)

    def client(self, url: str, timeout_s: float = 300.0) -> EngineClient:
        """Of the server at `url`, one of `urls`."""
        return EngineClient(url, timeout_s, self.access)

    @property
    def concurrent_requests(self) -> int:
        return self._concurrent_requests

    @property
    def request_timeout_s(self) -> float:
        return self._request_timeout_s

    async def start_again(self, process: EngineProcess) -> None:
        """Until the server answers and has been checked. It has the weights of its model directory then."""
        process.restart()
        while not process.is_ready(self._startup_timeout_s):
            await asyncio.sleep(RESTART_POLL_S)
        self._check(self, process.url)

    def revive(self, error: Exception) -> bool:
        """After a failed push of weights: starts again what has died in it; the weights are for the caller to push.

        Returns whether there was such a server and a restart left for it.
        """
        end = time.monotonic() + DEATH_WAIT_S
        while not (dead := self._dead()) and self._processes and time.monotonic() < end:
            time.sleep(0.05)
        for process in dead:
            if not self.restarts.is_left():
                return False
            self.restarts.take(process, error)
            asyncio.run(self.start_again(process))
        return bool(dead)

    def _dead(self) -> list[EngineProcess]:
        return [process for process in self._processes.values() if process.exit_code() is not None]

    def process_of(self, url: str) -> EngineProcess | None:
        """The server at `url`, if it is one of ours."""
        return self._processes.get(url)
