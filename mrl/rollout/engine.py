"""The rollout engines of a run: samples in order, or one clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from mrl.core import Request, Sample, SamplingParams
from mrl.rollout.access import Access
from mrl.rollout.client import EngineClient
from mrl.rollout.errors import EngineError, RolloutError
from mrl.rollout.fleet import Fleet
from mrl.rollout.flight import Flight, OnSamples
from mrl.rollout.protocol import BEGIN_UPDATE, MemoryPart
from mrl.rollout.restarts import Restarts
from mrl.rollout.samples import Expected


class Engine:
    """The rollout engines of a run. `start_engine` makes one.

    fleet: its servers
    vocab_size: tokens of the model; a sample with any other one is refused
    concurrent_requests: in flight at once, over all servers
    request_timeout_s: of one call, which may hold several requests
    weight_version: the name of the weights that the run gave them last, once it did; a sample of others is refused
    """

    def __init__(self, fleet: Fleet, *, vocab_size: int, concurrent_requests: int, request_timeout_s: float) -> None:
        self.fleet = fleet
        self.vocab_size = vocab_size
        self.concurrent_requests, self.request_timeout_s = concurrent_requests, request_timeout_s
        self.weight_version: str | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, one a server."""
        return tuple(server.url for server in self.fleet.servers)

    @property
    def access(self) -> Access:
        """What opens them."""
        return self.fleet.access

    @property
    def notes(self) -> list[str]:
        """What the user should know about these engines before the run starts, one sentence each."""
        return self.fleet.notes

    @property
    def restarts(self) -> Restarts:
        """Who may start a lost server again; nobody, until `restarts.allow` is called."""
        return self.fleet.restarts

    def wait_ready(self) -> None:
        """Until every server answers and has been checked; then `notes` is complete. Raises EngineStartError when a
        server of ours does not come up, EngineError when a given URL does not answer or serves something else."""
        self.fleet.wait_ready()

    def close(self) -> None:
        """End the servers that mrl started; given URLs are left alone."""
        self.fleet.close()

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_samples: OnSamples | None = None
    ) -> list[Sample]:
        """Finished samples ordered by sample_id. `on_samples` is called in this thread with those that finish together.

        Log-probs are of logits / temperature (raw logits when greedy), not renormalised for top_p and top_k.
        A server of ours that dies or does not answer within rollout.request_timeout_s is started again as often as
        `restarts` allows; what it had not finished is sampled again with the same seeds.
        Raises RolloutError when that is not allowed, an engine refuses, has given up memory or lacks its weights; no
        request is left running on the other servers then.
        """
        self.wait_ready()
        for server in self.fleet.servers:
            if (reason := server.asleep()) is not None:
                raise RolloutError(reason)
        if sampling.stop and not self.fleet.accepts_stop_strings:
            raise RolloutError(
                f"stop strings {list(sampling.stop)} need an engine with a tokenizer, but {self.urls[0]} was started "
                "without one: set them in rollout.sampling.stop, or use stop_token_ids"
            )
        if not requests:
            return []
        expected = Expected(self.vocab_size, sampling.max_new_tokens, self.weight_version)
        flight = Flight(self.fleet, sampling, expected, on_samples, self.concurrent_requests, self.request_timeout_s)
        samples = asyncio.run(flight.run(requests))
        return sorted(samples, key=lambda sample: sample.request.sample_id)

    # ---- memory

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Gives up these parts of every server's memory, as far as it holds them. Waits until no request runs.

        Weights are gone then, and back with the first push after `resume_memory`. A server of ours that dies or does
        not answer within rollout.request_timeout_s is started again as often as `restarts` allows, gives up as much,
        and lacks its weights (`lacks_weights`). Raises RolloutError when that is not allowed, or a server refuses.
        """
        self.wait_ready()
        self.fleet.settle(lambda released: released | set(parts))

    def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Takes back these parts of every server's memory, as far as they are given up; restarts and errors as in
        `release_memory`."""
        self.fleet.settle(lambda released: released - set(parts))

    @property
    def lacks_weights(self) -> bool:
        """Whether a server has given its weights up, or lost them with its life, and got no others since: they must be
        pushed before it samples."""
        return not all(server.has_weights for server in self.fleet.servers)

    def check_push(self, url: str) -> None:
        """Raises EngineError if the weights of the server at `url` are given up: a push would write into nothing."""
        (server,) = (server for server in self.fleet.servers if server.url == url)
        if "weights" in server.released:
            text = "not asked: the memory of its weights is given up; take it back before the push"
            raise EngineError(url, BEGIN_UPDATE.name, None, text)

    def has_pushed(self, version: str) -> None:
        """To be called after each push of weights to all servers: from now on samples of others are refused."""
        self.weight_version = version
        for server in self.fleet.servers:
            server.has_weights = True

    def client(self, url: str, timeout_s: float = 300.0) -> EngineClient:
        """Of the server at `url`, one of `urls`."""
        return self.fleet.client(url, timeout_s)

    def revive(self, error: Exception) -> bool:
        """After a failed push of weights: starts again what has died in it; the weights are for the caller to push.

        Returns whether there was such a server and a restart left for it.
        """
        return self.fleet.revive(error)
